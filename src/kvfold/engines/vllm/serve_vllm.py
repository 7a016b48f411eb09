"""vLLM's OpenAI server with the plugin on."""

import math
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from vllm import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.engine import utils as engine_utils

from kvfold.engines.serving import Config
from kvfold.engines.start import ARTIFACT, CAUSES, RECIPE
from kvfold.engines.vllm.plan import make_plan

PAGE = 64  # tokens of a page on a GPU, or as many more as open blocks need
CPU_CACHE = 2**30  # bytes, unless a flag or VLLM_CPU_KVCACHE_SPACE says otherwise
KILLED = "a process of vLLM ended without a word, as it does if the machine's memory is full"
QUIET = "ignore::UserWarning:multiprocessing.resource_tracker"  # it would list what it removes, after the last line


def serve(model: str, name: str, config: Config, flags: Sequence[str]) -> None:
    """Serve a model folder or Hub id under a name, until interrupted. `flags` are vLLM's own. If one is given twice,
    the last counts. What cannot be served is refused before a process is started."""
    os.environ[RECIPE], os.environ[ARTIFACT] = str(config.recipe), config.artifact or ""
    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args([model, "--served-model-name", name, *_platform_flags(config), *flags])
    validate_parsed_serve_args(args)
    args.model = args.model_tag
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    if not AttentionBackendEnum.CUSTOM.is_overridden():
        raise ImportError("vLLM did not load kvfold's plugin: install kvfold with pip, and see VLLM_PLUGINS")
    make_plan(config)
    _run(args)


def _platform_flags(config: Config) -> list[str]:
    if not current_platform.is_cpu():
        return ["--block-size", str(math.lcm(PAGE, config.recipe.block or 1))]
    explicit = [] if os.environ.get("VLLM_CPU_KVCACHE_SPACE") else ["--kv-cache-memory-bytes", str(CPU_CACHE)]
    return ["--dtype", "float32", "--enforce-eager", *explicit]


def _run(args: Namespace) -> None:
    """Run the server. If it does not start, the last line says why."""
    engine_utils.zmq_socket_ctx = _interruptible(engine_utils.zmq_socket_ctx)
    os.environ["PYTHONWARNINGS"] = f"{os.environ.get('PYTHONWARNINGS', '')},{QUIET}".strip(",")
    with NamedTemporaryFile(prefix="kvfold-causes-") as causes:
        os.environ[CAUSES] = causes.name
        try:
            ServeSubcommand.cmd(args)
        except KeyboardInterrupt:  # vLLM makes one of SIGTERM too
            raise ValueError("the server was ended before it had started") from None
        except Exception as error:
            said = Path(causes.name).read_text(encoding="utf-8").splitlines()
            if not said and "Engine core initialization failed" not in str(error):
                raise  # nothing was started yet
            raise ValueError(next((line for line in said if "in a background process" not in line), KILLED)) from error


def _interruptible(socket: Callable[..., AbstractContextManager[Any]]) -> Callable[..., AbstractContextManager[Any]]:
    """Wrap the socket over which vLLM waits for its processes to start. It swallows an interrupt, and vLLM goes on."""

    @contextmanager
    def wrapped(*arguments: Any, **options: Any) -> Iterator[Any]:
        interrupt = None
        with socket(*arguments, **options) as opened:
            try:
                yield opened
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt:
            raise interrupt

    return wrapped
