"""What a vLLM configuration means for kvfold: what is refused, which layers a rank packs, and its plan."""

import math
from collections.abc import Set
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.utils import get_pp_indices
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager
from vllm.v1.kv_cache_interface import AttentionSpec

from kvfold.artifact import digest_model
from kvfold.engines.serving import Plan
from kvfold.engines.vllm.configuration import SIXTEEN_BITS, asked_for
from kvfold.engines.vllm.offload import refusals, tiers
from kvfold.format.layout import ALIGNMENT
from kvfold.format.open_block import DRAFTED
from kvfold.geometry import Geometry

TESTED = "0.32"  # the version of vLLM that kvfold is tested with
# methods of speculative decoding: drafts are looked up in earlier tokens, or made by layers that have a cache too
LOOKUPS, DRAFT_MODELS = ("ngram", "suffix"), ("eagle", "eagle3", "mtp", "draft_model")
HOOKS: dict[Any, tuple[str, ...]] = {  # names of vLLM that kvfold overrides or reads
    AttentionBackend: (
        *("get_impl_cls", "get_builder_cls", "get_supported_kernel_block_sizes", "supported_kv_cache_layouts"),
        "customize_spec",
    ),
    AttentionMetadataBuilder: ("_cudagraph_support", "reorder_batch_threshold", "requires_block_table_width", "build"),
    AttentionSpec: ("state_content_bytes", "page_size_padded"),
    CommonAttentionMetadata: ("compute_num_computed_tokens", "seq_lens_cpu_upper_bound"),
    CircularBufferManager: ("_claim_ring_block", "get_num_blocks_to_allocate"),
    Scheduler: ("_update_waiting_for_remote_kv",),
    kv_cache_utils: ("get_kv_cache_groups", "validate_kv_cache_layout"),
}

logger = init_logger("vllm.kvfold")  # a child of vLLM's logger, so that it is shown


def require() -> None:
    """Refuse a vLLM without one of these names. It would leave out a part of kvfold."""
    for owner, names in HOOKS.items():
        for name in names:
            if not hasattr(owner, name) and name not in owner.__annotations__:
                raise ValueError(
                    f"vLLM {vllm.__version__} has no {owner.__name__}.{name}; kvfold is tested with {TESTED}: "
                    "pip install 'kvfold[vllm]'"
                )
    if not vllm.__version__.startswith(f"{TESTED}."):
        logger.warning_once("kvfold is tested with vLLM %s, and this is %s", TESTED, vllm.__version__)


def refuse(config: VllmConfig) -> None:
    """Refuse what would give wrong answers, before anything is loaded."""
    require()
    parallel, cache, model = config.parallel_config, config.cache_config, config.model_config
    geometry, block = geometry_of(config), open_block(config)
    tokens = page_tokens(block)
    kinds = {layer.kind for layer in geometry.layers}
    reasons = {
        f"--kv-cache-dtype {cache.cache_dtype} packs the cache in another way: leave it at auto": (
            cache.cache_dtype not in SIXTEEN_BITS
        ),
        "chunked attention is not supported: vLLM does not tell its layers from those with full attention": (
            "chunked" in kinds
        ),
        "values of another size than keys are not supported: vLLM gives such layers a backend of its own": (
            geometry.key_dim != geometry.value_dim
        ),
        "tokens of an image attend to each other, and packed pages are read causally: add --language-model-only": (
            model.is_mm_prefix_lm
        ),
        "--disable-hybrid-kv-cache-manager would give layers with sliding windows packed pages: leave it out": (
            "sliding" in kinds and bool(config.scheduler_config.disable_hybrid_kv_cache_manager)
        ),
        "--prefix-match-unit is not tested yet: leave it out": cache.prefix_match_unit is not None,
        "--kv-sharing-fast-prefill is not supported": cache.kv_sharing_fast_prefill,
        **refusals(config.kv_transfer_config),
        **_drafts(config, kinds, block),
        "each rank of a pipeline needs layers of every kind that the model has: use fewer ranks": any(
            {geometry.layers[number].kind for number in layers} != kinds for layers in _pipeline(config, geometry)
        ),
        "context parallelism is not supported": (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1
        ),
        "microbatching (DBO) is not supported": parallel.use_ubatching,
        "files of pages would outlive weights that change while vLLM sleeps: leave out --enable-sleep-mode or "
        "secondary_tiers": model.enable_sleep_mode and bool(tiers(config.kv_transfer_config)),
        "VLLM_ENABLE_STARTUP_PLAN takes memory as measured with other recipes: unset it": (
            vllm.envs.VLLM_ENABLE_STARTUP_PLAN
        ),
        f"pages need a multiple of {tokens} tokens, not --block-size {cache.block_size}": cache.block_size % tokens
        != 0,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"kvfold: {reason}")


def open_block(config: VllmConfig) -> int:
    """Tokens of the recipe's open block."""
    choice = asked_for(config)
    return choice.recipe.block if choice else 0


def page_tokens(block: int) -> int:
    """Pages have a multiple of so many tokens. Prefix hits end at the ends of pages, and thus of open blocks."""
    return math.lcm(ALIGNMENT, block or 1)


def choose_block_size(config: VllmConfig) -> None:
    """Take vLLM's block size, or else the next that is made of whole open blocks, unless the user has chosen one."""
    cache, block = config.cache_config, open_block(config)
    tokens = page_tokens(block)
    if cache.user_specified_block_size or cache.block_size % tokens == 0:
        return
    chosen = math.lcm(cache.block_size, tokens)
    logger.info("kvfold: --block-size %d, made of whole open blocks of %d tokens", chosen, block)
    cache.block_size, cache.user_specified_block_size = chosen, True  # else vLLM would choose again


def _drafts(config: VllmConfig, kinds: Set[str], block: int) -> dict[str, bool]:
    """Reasons to refuse speculative decoding."""
    speculation = config.speculative_config
    if speculation is None:
        return {}
    drafted = speculation.method in DRAFT_MODELS
    return {
        f"speculative decoding by {speculation.method} is not tested yet: use {', '.join(LOOKUPS + DRAFT_MODELS)}": (
            speculation.method not in LOOKUPS + DRAFT_MODELS
        ),
        f"num_speculative_tokens has to be at most {DRAFTED - 1} with an open block, and is "
        f"{config.num_speculative_tokens}: lower it, or add block=0 to the recipe": (
            block > 0 and config.num_speculative_tokens >= DRAFTED
        ),
        f"speculative decoding by {speculation.method} beside {' and '.join(sorted(kinds - {'full'}))} layers is not "
        "tested yet: use ngram": drafted and kinds != {"full"},
        f"speculative decoding by {speculation.method} beside offloading is not tested yet: use ngram": (
            drafted and config.kv_transfer_config is not None
        ),
        f"speculative decoding by {speculation.method} needs --no-async-scheduling": (
            drafted and bool(config.scheduler_config.async_scheduling)
        ),
        f"speculative decoding by {speculation.method} needs VLLM_USE_V2_MODEL_RUNNER=0": (
            drafted and config.use_v2_model_runner
        ),
        "speculative decoding in a pipeline is not tested yet: leave out one of the two": (
            config.parallel_config.pipeline_parallel_size > 1
        ),
    }


def _pipeline(config: VllmConfig, geometry: Geometry) -> list[range]:
    """The layers of each rank of a pipeline."""
    ranks, layers = config.parallel_config.pipeline_parallel_size, len(geometry.layers)
    return [range(*get_pp_indices(layers, rank, ranks)) for rank in range(ranks)]


def geometry_of(config: VllmConfig) -> Geometry:
    return Geometry.from_config(config.model_config.hf_config.to_dict())


def layers_of(config: VllmConfig) -> range:
    """The layers of this pipeline-parallel rank."""
    return range(*config.model_config.get_layers_start_end_indices(config.parallel_config))


def make_plan(config: VllmConfig, rank: int = 0, device: torch.device | str = "cpu") -> Plan:
    """The plan for a tensor-parallel rank of a vLLM engine. `config` knows the pipeline-parallel one."""
    refuse(config)
    choice = asked_for(config)
    if choice is None:
        raise ValueError("kvfold's backend was selected without a recipe: set KVFOLD_RECIPE or additional-config")
    model = config.model_config
    plan = Plan.make(
        choice,
        model.hf_config.to_dict(),
        config.cache_config.block_size,
        model.dtype,
        device,
        rank,
        config.parallel_config.tensor_parallel_size,
        digest_model(model.model, model.revision) if choice.artifact else None,
        layers_of(config),
    )
    others = {layer.kind for layer in plan.geometry.layers} - {"full", "shared"}
    if others and len({layout.page_bytes for layout in plan.layouts.values()}) > 1:
        raise ValueError(
            f"kvfold: in a model with {' and '.join(sorted(others))} layers, vLLM needs packed layers of one size, and "
            f"those of {plan.recipe} differ: leave out skip, or use a recipe with given widths, such as fold4"
        )
    return plan
