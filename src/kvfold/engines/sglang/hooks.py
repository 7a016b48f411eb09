"""What the plugin hooks into SGLang: it refuses, chooses arguments, sizes and builds the pool, puts its attention in
place of SGLang's, and checks the result.

A failure in the main process ends it with one line. A failure in a scheduler's process raises, and SGLang ends.
"""

import json
import math
import pkgutil
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version

from kvfold.artifact import digest_model
from kvfold.engines.serving import Config, Plan
from kvfold.engines.sglang import hierarchical_cache, logger
from kvfold.engines.sglang.speculation import chains, draft_layers, refuse_drafts
from kvfold.engines.start import aborting
from kvfold.format.layout import ALIGNMENT
from kvfold.geometry import Geometry, listed
from kvfold.models import default_device

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

    from kvfold.engines.sglang.attention import PackedBackend

Source = tuple[str, bool, str | None, str]

GPU_PAGE_SIZE = 64  # by default
OLDEST, NEWEST = "0.5.17", "0.5.23"  # versions of SGLang that kvfold is made for
# Attention needs the lengths of a prefill step on the host: it runs between the parts of a breakable graph.
PREFILL_GRAPHS = ("breakable", "disabled")
PLAIN: dict[str, tuple[Any, ...]] = {  # arguments, and the values that go together with a packed cache
    "kv_cache_dtype": ("auto", "bfloat16", "bf16"),
    "kv_canary": ("none",),
    **dict.fromkeys(("disaggregation_mode", "decoupled_spec_role"), ("null",)),
    **dict.fromkeys(("dcp_size", "attn_cp_size"), (1,)),
    # `hierarchical_cache.prepare` looks at them
    **dict.fromkeys(("enable_hierarchical_cache", "enable_memory_saver"), (False, True)),
    "hicache_storage_backend": (None, *hierarchical_cache.STORAGE),
    "cuda_graph_config": (None,),  # it would override the next two
    "cuda_graph_backend_prefill": (None, *PREFILL_GRAPHS),
    "cuda_graph_backend_decode": (None, "full", "disabled"),
    **dict.fromkeys(
        (
            *("dllm_algorithm", "enable_two_batch_overlap"),
            *("speculative_adaptive", "enable_multi_layer_eagle"),
            *("enable_lmcache", "enable_flexkv", "enable_hisparse", "enable_pdmux"),
            *("enable_unified_memory", "enable_page_major_kv_layout", "enable_prefill_cp"),
            *("enable_unified_cache_external_linker", "enable_kv_cache_sharding", "radix_cache_backend"),
            *("enable_mis", "enable_nvidia_megakernel", "enable_amd_monokernel"),
            *("prefill_only_disable_kv_cache", "encoder_only"),
        ),
        (None, False),
    ),
}
SINCE = {  # the version that brought an argument, if later than OLDEST
    "enable_unified_cache_external_linker": "0.5.20",
    "enable_kv_cache_sharding": "0.5.22",
    **dict.fromkeys(("enable_nvidia_megakernel", "enable_amd_monokernel"), "0.5.23"),
}
BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")  # arguments
VARIABLES = (  # of the environment, which may not be set
    "SGLANG_ENABLE_METADATA_GLUE_GRAPH",  # a graph would replay what has to run on the host
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",  # the size of a pool would change
    "SGLANG_ENABLE_OVERLAP_PLAN_STREAM",  # steps with drafts would begin on another stream
)
RUNNING = 128  # requests of an attention group by default, for recipes with an open block: each row takes a ring


def install() -> None:
    """Add the attention backend and the hooks."""
    Config.read()  # refuses an unknown recipe
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import ServerArgs

    check_version()
    pools = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
    sizes = "sglang.srt.model_executor.pool_configurator"
    backends = "sglang.srt.model_executor.model_runner_components.attention_backend_setup"
    begin = "resolve_once" if hasattr(ServerArgs, "resolve_once") else "__post_init__"  # in older versions
    for target, kind, hook in (
        (f"sglang.srt.server_args.ServerArgs.{begin}", HookType.AROUND, resolve),
        (f"{pools}._profile_available_bytes", HookType.AFTER, page_budget),
        (f"{sizes}.DefaultPoolConfigurator._compute_cell_size", HookType.AFTER, cell_size),
        (f"{sizes}.DefaultPoolConfigurator.__init__", HookType.AFTER, with_drafts),
        (f"{sizes}.HybridSWAPoolConfigurator.__init__", HookType.AFTER, full_cell_size),
        (f"{pools}._build_mha_kv_pool", HookType.AROUND, build_pool),
        (f"{pools}._build_hybrid_linear_kv_pool", HookType.AROUND, build_pool),
        (f"{pools}._build_hybrid_swa_kv_pool", HookType.AROUND, build_pool),
        (f"{pools}.configure", HookType.AFTER, verify),
        (f"{backends}._build_full_attention_backend_from_str", HookType.AROUND, build_backend),
        (hierarchical_cache.HOST_POOL, HookType.AROUND, hierarchical_cache.host_pool),
        (hierarchical_cache.STORAGE_CONFIG, HookType.AFTER, hierarchical_cache.name_storage),
        (f"{hierarchical_cache.FILES}.set", HookType.AROUND, hierarchical_cache.store),
        (f"{hierarchical_cache.FILES}.get", HookType.AROUND, hierarchical_cache.fetch),
        ("sglang.srt.speculative.cpp_ngram.ngram_corpus.NgramCorpus.batch_get", HookType.AFTER, chains),
    ):
        require(target)
        HookRegistry.register(target, hook, kind)


def check_version() -> None:
    """Warn of an SGLang that kvfold is not made for. If it lacks a hook, `require` refuses it."""
    if not Version(OLDEST) <= Version(version("sglang")) <= Version(NEWEST):
        logger.warning("kvfold is made for SGLang %s to %s, and this is %s", OLDEST, NEWEST, version("sglang"))


def require(target: str) -> None:
    """Refuse an SGLang without `target`, because it would leave out the hook. Before 0.5.16, one function builds the
    pools of all models, which leaves no place for a hook."""
    try:
        pkgutil.resolve_name(target)
    except (AttributeError, ImportError) as error:
        raise missing(target) from error


def missing(what: str) -> ValueError:
    return ValueError(
        f"SGLang {version('sglang')} has no {what}; kvfold is made for {OLDEST} to {NEWEST}: "
        "pip install 'kvfold[sglang]'"
    )


def resolve(original: Callable[["ServerArgs"], None], arguments: "ServerArgs") -> None:
    """Prepare the arguments, then let SGLang resolve them."""
    config = Config.read()
    if config is None or getattr(arguments, "_resolution_finished", False):  # SGLang calls again
        return original(arguments)
    geometry = prepare(config, arguments)
    try:
        original(arguments)
    except AssertionError as error:
        if "_buffer" not in str(error):
            raise
        refuse_prefixes(geometry, arguments, error)


@aborting
def prepare(config: Config, arguments: "ServerArgs") -> Geometry:
    """Refuse what cannot be served, before anything is loaded, and set the arguments that kvfold needs."""
    refuse(arguments)
    device = arguments.device or default_device()
    smallest = GPU_PAGE_SIZE if device == "cuda" else ALIGNMENT
    arguments.page_size = arguments.page_size or math.lcm(smallest, config.recipe.block or 1)
    groups = attention_groups(arguments)
    if config.recipe.block and arguments.max_running_requests is None:
        arguments.max_running_requests = RUNNING * groups
    if arguments.page_size % ALIGNMENT:
        raise ValueError(f"pages need a multiple of {ALIGNMENT} tokens, not --page-size {arguments.page_size}")
    weights = digest_model(arguments.model_path, arguments.revision) if config.artifact else None
    model, ranks = configuration(*source(arguments)), max(1, arguments.tp_size // groups)
    plan = Plan.make(config, model, arguments.page_size, torch.bfloat16, ranks=ranks, weights=weights)
    refuse_idle_ranks(plan, arguments.pp_size)
    hierarchical_cache.prepare(arguments, plan.geometry)
    refuse_drafts(arguments, plan, groups)
    for name in BACKENDS:
        if (given := getattr(arguments, name)) is not None and not local_layers(plan.geometry):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} {given} does not go together with a packed cache: leave it out")
    return plan.geometry


def attention_groups(arguments: "ServerArgs") -> int:
    """How many groups of ranks divide the requests (data-parallel attention). The ranks of a group divide KV heads."""
    if (groups := getattr(arguments, "attn_dp_size", 1)) > 1:  # since 0.5.22
        return groups
    return arguments.dp_size if arguments.enable_dp_attention else 1


def refuse_idle_ranks(plan: Plan, ranks: int) -> None:
    """Refuse a pipeline with a rank that has nothing to pack."""
    from sglang.srt.distributed.utils import get_pp_indices

    for rank in range(ranks):
        layers = range(*get_pp_indices(len(plan.geometry.layers), rank, ranks))
        if plan.codecs.keys().isdisjoint(layers):
            raise ValueError(
                f"--pp-size {ranks} leaves a rank only layers {listed(layers)}, which are not packed: use fewer ranks"
            )


@aborting
def refuse_prefixes(geometry: Geometry, arguments: "ServerArgs", error: AssertionError) -> None:
    raise ValueError(
        f"SGLang cannot keep prefixes of {geometry.architecture} in pages of {arguments.page_size} tokens: {error} "
        "Add --disable-radix-cache"
    )


def local_layers(geometry: Geometry) -> list[int]:
    """The layers with sliding windows or chunks. They are not packed: SGLang's own attention runs there."""
    return [number for number, layer in enumerate(geometry.layers) if layer.kind in ("sliding", "chunked")]


def refuse(arguments: "ServerArgs") -> None:
    """Refuse arguments that do not go together with a packed cache. A missing argument is refused too: SGLang may have
    renamed it."""
    from sglang.srt.environ import envs

    for name, values in PLAIN.items():
        flag = f"--{name.replace('_', '-')}"
        if hasattr(arguments, name):
            if (given := getattr(arguments, name)) not in values:
                raise ValueError(f"{flag} {given} does not go together with a packed cache: leave it out")
        elif name not in SINCE or Version(version("sglang")) >= Version(SINCE[name]):
            raise missing(f"{flag}, which kvfold has to check")
    for name in VARIABLES:
        if hasattr(envs, name) and getattr(envs, name).get():
            raise ValueError(f"{name} does not go together with a packed cache: unset it")


def page_budget(available: int, configurator: "KVCacheConfigurator", *_: Any) -> int:
    """Bytes left for pages, after rings."""
    plan = plan_of(configurator)
    taken = rings_of(plan) * plan.ring_bytes
    if taken >= available:
        raise ValueError(
            f"kvfold: the open blocks of requests take {taken / 2**20:,.0f} of {available / 2**20:,.0f} MiB for the "
            "cache: lower --max-running-requests"
        )
    return available - taken


def cell_size(counted: int, sizes: Any, configurator: "KVCacheConfigurator", layers: int) -> int:
    """Bytes per token, over all layers. SGLang counts `layers` layers of one size."""
    if configurator.is_draft_worker:
        return counted
    local = counted // layers * len(local_layers_in_pool(configurator))
    return math.ceil(plan_of(configurator).token_bytes + local)


def with_drafts(_: None, sizes: Any, configurator: "KVCacheConfigurator") -> None:
    """Count layers of a draft model in 16 bits. SGLang counts them like those of the model, which are packed."""
    if draft_layers(configurator):
        sizes._cell_size = math.ceil(plan_of(configurator).token_bytes + draft_bytes(configurator))


def full_cell_size(_: None, sizes: Any, configurator: "KVCacheConfigurator") -> None:
    """The same where SGLang has a pool for full layers and another for sliding ones."""
    layers = sizes._full_layers_num
    packed = plan_of(configurator).token_bytes
    sizes._cell_size += packed - sizes._full_per_token * layers
    sizes._full_per_token = packed / layers


def draft_bytes(configurator: "KVCacheConfigurator") -> int:
    """Bytes per token in the layers of a draft model. SGLang assumes that they are like the model's own."""
    plan = plan_of(configurator)
    numbers = plan.raw_token_bytes // 2 // len(plan.codecs)  # of a layer
    return draft_layers(configurator) * numbers * configurator.model_dtype.itemsize


def local_layers_in_pool(configurator: "KVCacheConfigurator") -> list[int]:
    """The local layers of this rank, if SGLang keeps them in one pool with full layers."""
    own = range(configurator.layer_info.start_layer, configurator.layer_info.end_layer)
    return [] if configurator.is_hybrid_swa else [n for n in local_layers(plan_of(configurator).geometry) if n in own]


def build_pool(build: Callable[..., "KVCache"], configurator: "KVCacheConfigurator", **options: Any) -> "KVCache":
    from kvfold.engines.sglang.packed_pool import PackedPool

    if configurator.is_draft_worker:  # its cache stays in 16 bits
        return build(configurator, **options)
    plan, stock = plan_of(configurator), options["mha_pool_class"]
    packed = partial(PackedPool, plan, rings_of(plan), local_layers_in_pool(configurator), stock)

    def choose(*size: int, **given: Any) -> "KVCache":
        return (stock if given.get("allocation_label") == "SWA" else packed)(*size, **given)

    pool = build(configurator, **{**options, "mha_pool_class": choose})
    pool.dtype = torch.uint8  # SGLang's RoPE kernels write keys into a pool that has the dtype of K and V
    return pool


def verify(result: Any, configurator: "KVCacheConfigurator", **_: Any) -> None:
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator

    from kvfold.engines.sglang.packed_pool import packed_pool_of

    if configurator.is_draft_worker:
        return
    packed = packed_pool_of(result.token_to_kv_pool)
    rows, rings = len(result.req_to_token_pool.req_to_token), rings_of(packed.served.plan)
    if 0 < rings < rows:
        raise ValueError(f"kvfold: SGLang has {rows} rows for requests, and there are rings for {rings}")
    takes = packed.token_bytes + draft_bytes(configurator)
    sizes = create_memory_pool_configurator(configurator)
    full = configurator.is_hybrid_swa
    counted = sizes._full_per_token * sizes._full_layers_num if full else sizes._cell_size
    if math.ceil(counted) != math.ceil(takes):
        raise ValueError(f"kvfold: SGLang counts {counted:g} bytes for a token, and it takes {takes:g}")
    if (own := packed.local_pool or getattr(result.token_to_kv_pool, "swa_kv_pool", None)) is not None:
        token_bytes = sum(own.get_kv_size_bytes()) / (own.size + own.page_size)
        logger.info(
            f"kvfold: {own.layer_num} layers in SGLang's own pool: {token_bytes:,.0f} bytes per token, for "
            f"{own.size:,} tokens"
        )


def build_backend(
    build: Callable[..., "AttentionBackend"], *, model_runner: "ModelRunner", **options: Any
) -> "AttentionBackend":
    """Attention over packed pages, beside SGLang's own if there are layers that are not packed. SGLang may build one
    for prompts and another for decoding."""
    from kvfold.engines.sglang.attention import MixedBackend

    if model_runner.is_draft_worker:
        return build(model_runner=model_runner, **options)
    refuse_prefill_graphs()
    packed = packed_backend(model_runner)
    if not local_layers(packed.served.plan.geometry):
        return packed
    return MixedBackend(packed, build(model_runner=model_runner, **options))


@aborting
def refuse_prefill_graphs() -> None:
    """For some models, SGLang chooses another kind by itself."""
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend

    for kind in (Backend.FULL, Backend.TC_PIECEWISE):
        if check_cuda_graph_backend(Phase.PREFILL, kind):
            raise ValueError(f"prefill graphs of the kind {kind} hold attention: add --disable-prefill-cuda-graph")


@cache
def packed_backend(runner: "ModelRunner") -> "PackedBackend":
    from kvfold.engines.sglang.attention import PackedBackend

    return PackedBackend(runner)


def plan_of(configurator: "KVCacheConfigurator") -> Plan:
    own = configurator.layer_info.start_layer, configurator.layer_info.end_layer
    pages = configurator.page_size, configurator.model_dtype, configurator.device
    return _plan(source(configurator.server_args), *pages, *own)


@cache
def _plan(model: Source, page_size: int, dtype: torch.dtype, device: str, start: int, end: int) -> Plan:
    from sglang.srt.runtime_context import get_parallel

    config, ranks = Config.read(), get_parallel()
    assert config is not None
    rank = ranks.attn_tp_rank, ranks.attn_tp_size
    return Plan.make(config, configuration(*model), page_size, dtype, device, *rank, layers=range(start, end))


def source(arguments: "ServerArgs") -> Source:
    """The arguments that say which model it is."""
    overrides = arguments.json_model_override_args
    return arguments.model_path, arguments.trust_remote_code, arguments.revision, overrides


def configuration(path: str, trusted: bool, revision: str | None, overrides: str) -> dict[str, Any]:
    """A model's configuration as transformers has it. SGLang has classes of its own for some, which state less."""
    import transformers
    from sglang.srt.utils.hf_transformers_utils import get_config
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    config = get_config(path, trusted, revision, changes := json.loads(overrides))
    own = getattr(transformers, CONFIG_MAPPING_NAMES.get(config.model_type, ""), None)
    if own is not None and type(config).__module__.startswith("sglang."):
        config = own.from_pretrained(path, revision=revision)
        config.update(changes)
    return config.to_dict()


def rings_of(plan: Plan) -> int:
    """Rings of this rank: one for each row of SGLang's table of requests, of which row 0 is for padding."""
    from sglang.srt.runtime_context import get_parallel, get_schedule

    if not plan.block:
        return 0
    return 1 + max(1, get_schedule().max_running_requests // get_parallel().attn_dp_size)
