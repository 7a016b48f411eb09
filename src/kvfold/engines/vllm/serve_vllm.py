"""vLLM's OpenAI server with the plugin on."""

import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.engine import utils as engine_utils

from kvfold.engines.serving import Config, Plan
from kvfold.engines.start import ARTIFACT, CAUSES, RECIPE
from kvfold.engines.vllm.plan import logger, make_plan
from kvfold.engines.window_memory import carried, check_left
from kvfold.models import weight_files

CPU_CACHE = 2**30  # bytes, unless a flag or VLLM_CPU_KVCACHE_SPACE says otherwise
KILLED = "a process of vLLM ended without a word, as it does if the machine's memory is full"
QUIET = "ignore::UserWarning:multiprocessing.resource_tracker"  # it would list what it removes, after the last line


def serve(model: str, name: str, config: Config, flags: Sequence[str]) -> None:
    """Serve a model folder or Hub id under a name, until interrupted. `flags` are vLLM's own. If one is given twice,
    the last counts. What cannot be served is refused before a process is started."""
    os.environ[RECIPE], os.environ[ARTIFACT] = str(config.recipe), config.artifact or ""
    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args([model, "--served-model-name", name, *_platform_flags(), *flags])
    validate_parsed_serve_args(args)
    args.model = args.model_tag
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    if not AttentionBackendEnum.CUSTOM.is_overridden():
        raise ImportError("vLLM did not load kvfold's plugin: install kvfold with pip, and see VLLM_PLUGINS")
    if (plan := make_plan(config)).windows:
        args.max_num_seqs = _requests(config, plan, args.max_num_seqs)
    _run(args)


def _platform_flags() -> list[str]:
    if not current_platform.is_cpu():
        return ["--block-size", "64"]
    explicit = [] if os.environ.get("VLLM_CPU_KVCACHE_SPACE") else ["--kv-cache-memory-bytes", str(CPU_CACHE)]
    return ["--dtype", "float32", "--enforce-eager", *explicit]


def _requests(config: VllmConfig, plan: Plan, given: int | None) -> int:
    """How many requests may run at once: as many as the user says, else no more than the memory carries."""

    def taken(requests: int) -> int:
        return plan.shadow_bytes(plan.shadows(requests, scheduler.max_num_batched_tokens))

    scheduler, memory, default = config.scheduler_config, _cache_memory(config), config.scheduler_config.max_num_seqs
    requests = given or carried(default, memory, taken)
    check_left(memory, taken(requests), requests)
    if requests < default:
        logger.warning(
            "kvfold: --max-num-seqs %d instead of %d, because windows take 16 bits of each request: %.1f of about %.1f "
            "GiB for the cache",
            *(requests, default, taken(requests) / 2**30, memory / 2**30),
        )
    return requests


def _cache_memory(config: VllmConfig) -> int:
    """Bytes for pages and shadow pages of a rank, as the user says, else estimated: the share of the GPU's memory that
    vLLM takes, without the weights in the model's files."""
    cache, parallel = config.cache_config, config.parallel_config
    if cache.kv_cache_memory_bytes is not None:
        return int(cache.kv_cache_memory_bytes)
    weights = sum(file.stat().st_size for file in weight_files(config.model_config.model, config.model_config.revision))
    total = current_platform.get_device_total_memory() * cache.gpu_memory_utilization
    return int(total - weights / (parallel.tensor_parallel_size * parallel.pipeline_parallel_size))


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
