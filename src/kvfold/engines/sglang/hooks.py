"""What the plugin hooks into SGLang: it refuses, chooses arguments, sizes and builds the pool, and checks the result.

A failure in the main process ends it with one line. A failure in a scheduler's process raises, and SGLang ends.
"""

import json
import math
import pkgutil
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import version
from logging import getLogger
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version

from kvfold.artifact import digest_model
from kvfold.engines.serving import Config, Plan
from kvfold.engines.start import aborting
from kvfold.format.layout import ALIGNMENT

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.server_args import ServerArgs

logger = getLogger("sglang.kvfold")  # a child of SGLang's logger, so that it is shown

BACKEND = "kvfold"
PAGE_SIZE = {"cuda": 64, "cpu": 16}
OLDEST, NEWEST = "0.5.17", "0.5.23"  # versions of SGLang that kvfold is tested with
PLAIN: dict[str, tuple[Any, ...]] = {  # arguments, and the values that go together with a packed cache
    **dict.fromkeys(("attention_backend", "prefill_attention_backend", "decode_attention_backend"), (None, BACKEND)),
    "kv_cache_dtype": ("auto",),
    "kv_canary": ("none",),
    **dict.fromkeys(("disaggregation_mode", "decoupled_spec_role"), ("null",)),
    **dict.fromkeys(("pp_size", "dcp_size", "attn_cp_size", "attn_dp_size"), (1,)),
    "cuda_graph_config": (None,),  # it would override the next three
    "cuda_graph_backend_prefill": (None, "disabled"),  # a prefill step needs its lengths on the host
    "cuda_graph_backend_decode": (None, "full", "disabled"),
    "disable_prefill_cuda_graph": (False, True),  # `prepare` sets it, so it has to exist
    **dict.fromkeys(
        (
            *("speculative_algorithm", "dllm_algorithm", "enable_dp_attention", "enable_two_batch_overlap"),
            *("enable_hierarchical_cache", "enable_lmcache", "enable_flexkv", "enable_hisparse", "enable_pdmux"),
            *("enable_unified_memory", "enable_page_major_kv_layout", "enable_memory_saver", "enable_prefill_cp"),
            *("enable_unified_cache_external_linker", "enable_kv_cache_sharding", "radix_cache_backend"),
            *("enable_mis", "enable_nvidia_megakernel", "enable_amd_monokernel"),
            *("prefill_only_disable_kv_cache", "encoder_only"),
        ),
        (None, False),
    ),
}
SINCE = {  # the version that brought an argument, if later than OLDEST
    "enable_unified_cache_external_linker": "0.5.20",
    **dict.fromkeys(("enable_kv_cache_sharding", "attn_dp_size"), "0.5.22"),
    **dict.fromkeys(("enable_nvidia_megakernel", "enable_amd_monokernel"), "0.5.23"),
}
GLUE = "SGLANG_ENABLE_METADATA_GLUE_GRAPH"  # an environment variable
RUNNING = 128  # default of max_running_requests for recipes with windows: each request takes shadow pages


def install() -> None:
    """Add the attention backend and the hooks."""
    Config.read()  # refuses an unknown recipe
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import ServerArgs, add_attention_backend_choices

    from kvfold.engines.sglang.attention import PackedBackend

    if Version(version("sglang")) > Version(NEWEST):
        logger.warning("kvfold: SGLang %s is newer than %s, the last one tested", version("sglang"), NEWEST)
    add_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(PackedBackend)
    pools = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
    sizes = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"
    begin = "resolve_once" if hasattr(ServerArgs, "resolve_once") else "__post_init__"  # in older versions
    for target, kind, hook in (
        (f"sglang.srt.server_args.ServerArgs.{begin}", HookType.BEFORE, prepare),
        (f"{pools}._profile_available_bytes", HookType.AFTER, page_budget),
        (f"{sizes}._compute_cell_size", HookType.AFTER, cell_size),
        (f"{pools}._build_mha_kv_pool", HookType.AROUND, build_pool),
        (f"{pools}.configure", HookType.AFTER, verify),
    ):
        require(target)
        HookRegistry.register(target, hook, kind)


def require(target: str) -> None:
    """Refuse an SGLang without `target`, because it would leave out the hook. Before 0.5.16, one function builds the
    pools of all models, which leaves no place for a hook."""
    try:
        pkgutil.resolve_name(target)
    except (AttributeError, ImportError) as error:
        raise missing(target) from error


def missing(what: str) -> ValueError:
    return ValueError(
        f"SGLang {version('sglang')} has no {what}; kvfold is tested with {OLDEST} to {NEWEST}: "
        "pip install 'kvfold[sglang]'"
    )


@aborting
def prepare(arguments: "ServerArgs") -> None:
    """Refuse what cannot be served, before anything is loaded, and set the arguments that kvfold needs."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = Config.read()
    if config is None or getattr(arguments, "_resolution_finished", False):  # SGLang calls again
        return
    refuse(arguments)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    arguments.attention_backend = BACKEND
    arguments.page_size = arguments.page_size or PAGE_SIZE.get(device, ALIGNMENT)
    arguments.disable_prefill_cuda_graph = True
    if config.recipe.windows and arguments.max_running_requests is None:
        arguments.max_running_requests = RUNNING
    if arguments.page_size % ALIGNMENT:
        raise ValueError(f"pages need a multiple of {ALIGNMENT} tokens, not --page-size {arguments.page_size}")
    overrides = json.loads(arguments.json_model_override_args)
    model = get_config(arguments.model_path, arguments.trust_remote_code, arguments.revision, overrides).to_dict()
    weights = digest_model(arguments.model_path) if config.artifact else None
    Plan.make(config, model, arguments.page_size, torch.bfloat16, ranks=arguments.tp_size, weights=weights)


def refuse(arguments: "ServerArgs") -> None:
    """Refuse arguments that do not go together with a packed cache. A missing argument is refused too: SGLang may have
    renamed it."""
    from sglang.srt.environ import envs

    for name, values in PLAIN.items():
        flag = f"--{name.replace('_', '-')}"
        if hasattr(arguments, name):
            if (given := getattr(arguments, name)) not in values:
                raise ValueError(f"{flag} {given} does not go together with a packed cache")
        elif name not in SINCE or Version(version("sglang")) >= Version(SINCE[name]):
            raise missing(f"{flag}, which kvfold has to check")
    if hasattr(envs, GLUE) and getattr(envs, GLUE).get():  # a graph would replay what has to run on the host
        raise ValueError(f"{GLUE} does not go together with a packed cache")


def page_budget(available: int, configurator: "KVCacheConfigurator", *_: Any) -> int:
    """Bytes left for pages, after shadow pages."""
    plan = plan_of(configurator)
    taken = plan.shadow_bytes(shadows_of(plan))
    if taken >= available:
        raise ValueError(
            f"kvfold: shadow pages for windows take {taken / 2**20:,.0f} of {available / 2**20:,.0f} MiB for the "
            "cache: lower --max-running-requests"
        )
    return available - taken


def cell_size(_: int, sizes: Any, configurator: "KVCacheConfigurator", layers: int) -> int:
    """Bytes per token, over all layers."""
    return math.ceil(plan_of(configurator).token_bytes)


def build_pool(build: Callable[..., "KVCache"], configurator: "KVCacheConfigurator", **options: Any) -> "KVCache":
    from kvfold.engines.sglang.attention import PackedPool

    plan = plan_of(configurator)
    return build(configurator, **{**options, "mha_pool_class": partial(PackedPool, plan, shadows_of(plan))})


def verify(result: Any, configurator: "KVCacheConfigurator", **_: Any) -> None:
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator

    from kvfold.engines.sglang.attention import PackedPool

    plan = plan_of(configurator)
    if not isinstance(result.token_to_kv_pool, PackedPool):
        raise ValueError(f"kvfold: SGLang made a {type(result.token_to_kv_pool).__name__} instead of packed pages")
    counted = getattr(create_memory_pool_configurator(configurator), "_cell_size", None)
    if counted != math.ceil(plan.token_bytes):
        raise ValueError(f"kvfold: SGLang counts {counted} bytes for a token, and it takes {plan.token_bytes:g}")


def plan_of(configurator: "KVCacheConfigurator") -> Plan:
    return _plan(configurator.model_config, configurator.page_size, configurator.model_dtype, configurator.device)


@cache
def _plan(model: "ModelConfig", page_size: int, dtype: torch.dtype, device: str) -> Plan:
    from sglang.srt.runtime_context import get_parallel

    config, ranks = Config.read(), get_parallel()
    assert config is not None
    return Plan.make(
        config, model.hf_config.to_dict(), page_size, dtype, device, ranks.attn_tp_rank, ranks.attn_tp_size
    )


def shadows_of(plan: Plan) -> int:
    from sglang.srt.runtime_context import get_schedule

    schedule = get_schedule()
    if not plan.windows:
        return 0
    chunk = schedule.chunked_prefill_size
    return plan.shadows(schedule.max_running_requests, chunk if chunk > 0 else schedule.max_prefill_tokens)
