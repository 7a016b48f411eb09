"""vLLM's OpenAI server with the plugin on."""

import os
from collections.abc import Sequence

from vllm import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvfold.engines.serving import Config
from kvfold.engines.start import ARTIFACT, RECIPE
from kvfold.engines.vllm.plan import make_plan

CPU_CACHE = 2**30  # bytes, unless a flag or VLLM_CPU_KVCACHE_SPACE says otherwise


def serve(model: str, name: str, config: Config, flags: Sequence[str]) -> None:
    """Serve a model folder or Hub id under a name, until interrupted. `flags` are vLLM's own. If one is given twice,
    the last counts. What cannot be served is refused before a process is started."""
    os.environ[RECIPE], os.environ[ARTIFACT] = str(config.recipe), config.artifact or ""
    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args([model, "--served-model-name", name, *_platform_flags(), *flags])
    validate_parsed_serve_args(args)
    args.model = args.model_tag
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    if not AttentionBackendEnum.CUSTOM.is_overridden():
        raise ImportError("vLLM did not load kvfold's plugin: install kvfold with pip, and see VLLM_PLUGINS")
    make_plan(config)
    ServeSubcommand.cmd(args)


def _platform_flags() -> list[str]:
    if not current_platform.is_cpu():
        return ["--block-size", "64"]
    explicit = [] if os.environ.get("VLLM_CPU_KVCACHE_SPACE") else ["--kv-cache-memory-bytes", str(CPU_CACHE)]
    return ["--dtype", "float32", "--enforce-eager", *explicit]
