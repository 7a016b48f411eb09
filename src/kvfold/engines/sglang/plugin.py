"""The entry point of SGLang's plugins: nothing changes unless KVFOLD_RECIPE, and KVFOLD_ARTIFACT beside it, ask for it.

SGLang only logs what fails in a plugin, and serves on without it. So what fails here ends it: in the main process with
one line; in a scheduler's by an error, of which SGLang makes its own end.
"""

import json
import math
import pkgutil
from collections.abc import Callable
from functools import cache, partial, wraps
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from kvfold.artifact import digest_model
from kvfold.engines.serving import Config, Plan
from kvfold.layout import ALIGNMENT

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.server_args import ServerArgs

BACKEND = "kvfold"
PAGE_SIZE = {"cuda": 64, "cpu": 16}
PLAIN: dict[str, tuple[Any, ...]] = {  # arguments, and the values with which the cache is where and what kvfold expects
    **dict.fromkeys(("attention_backend", "prefill_attention_backend", "decode_attention_backend"), (None, BACKEND)),
    "kv_cache_dtype": ("auto",),
    "disaggregation_mode": ("null",),
    **dict.fromkeys(("pp_size", "dcp_size", "attn_cp_size"), (1,)),
    "cuda_graph_backend_prefill": (None, "disabled"),  # lists of lengths describe a prefill step
    "cuda_graph_backend_decode": (None, "full", "disabled"),
    **dict.fromkeys(
        (
            *("speculative_algorithm", "dllm_algorithm", "enable_dp_attention", "enable_two_batch_overlap"),
            *("enable_hierarchical_cache", "enable_lmcache", "enable_flexkv", "enable_hisparse", "enable_pdmux"),
            *("enable_unified_memory", "enable_page_major_kv_layout", "enable_memory_saver", "enable_prefill_cp"),
            *("prefill_only_disable_kv_cache", "encoder_only"),
        ),
        (None, False),
    ),
}
RUNNING = 128  # requests at a time, where each keeps windows in 16 bits and nobody says how many there will be


def aborting(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except Exception as error:
            raise SystemExit(f"kvfold cannot serve this: {error}") from error

    return wrapped


@aborting
def register() -> None:
    """Called by SGLang in each of its processes, before it reads its arguments."""
    if Config.read() is None:
        return
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import ServerArgs, add_attention_backend_choices

    from kvfold.engines.sglang.backend import PackedBackend

    add_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(PackedBackend)
    pools = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
    sizes = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"
    begin = "resolve_once" if hasattr(ServerArgs, "resolve_once") else "__post_init__"  # of older versions
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
    """SGLang would leave out a hook on what is not there. Before 0.5.16 pools are built by one function for all models,
    which leaves no place for one."""
    try:
        pkgutil.resolve_name(target)
    except (AttributeError, ImportError) as error:
        raise ValueError(
            f"SGLang {version('sglang')} has no {target}; kvfold is made for 0.5.17 to 0.5.21: "
            "pip install 'kvfold[sglang]'"
        ) from error


@aborting
def prepare(arguments: "ServerArgs") -> None:
    """Refuse what cannot be served, before anything is loaded, and choose what kvfold needs."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = Config.read()
    if config is None or getattr(arguments, "_resolution_finished", False):  # SGLang asks again
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
    for name, values in PLAIN.items():
        if (given := getattr(arguments, name, values[0])) not in values:
            raise ValueError(f"--{name.replace('_', '-')} {given} does not go together with a packed cache")


def page_budget(available: int, configurator: "KVCacheConfigurator", *_: Any) -> int:
    """What is left for pages, after shadow pages."""
    plan = plan_of(configurator)
    taken = plan.shadow_bytes(shadows_of(plan))
    if taken >= available:
        raise ValueError(
            f"kvfold: windows of so many requests take {taken / 2**20:,.0f} of {available / 2**20:,.0f} MiB for the "
            "cache: lower --max-running-requests"
        )
    return available - taken


def cell_size(_: int, sizes: Any, configurator: "KVCacheConfigurator", layers: int) -> int:
    """Bytes of a token."""
    return math.ceil(plan_of(configurator).token_bytes)


def build_pool(build: Callable[..., "KVCache"], configurator: "KVCacheConfigurator", **options: Any) -> "KVCache":
    from kvfold.engines.sglang.backend import PackedPool

    plan = plan_of(configurator)
    return build(configurator, **{**options, "mha_pool_class": partial(PackedPool, plan, shadows_of(plan))})


def verify(result: Any, configurator: "KVCacheConfigurator", **_: Any) -> None:
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator

    from kvfold.engines.sglang.backend import PackedPool

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
