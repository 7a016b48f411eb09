"""kvfold in one vLLM process: what it refuses, its plan, and what the layers of a model share."""

from functools import wraps
from pkgutil import resolve_name
from typing import Any, ClassVar

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

from kvfold.artifact import digest_model
from kvfold.engines.serving import Plan, Served
from kvfold.engines.vllm.configuration import asked_for
from kvfold.engines.vllm.requests import Requests
from kvfold.format.layout import ALIGNMENT
from kvfold.geometry import Geometry

TESTED = "0.32"  # the version of vLLM that kvfold is tested with
RUNNERS = ("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "vllm.v1.worker.gpu.model_runner:GPUModelRunner")  # V1, V2
HOOKS = {  # names of vLLM that kvfold overrides or reads
    AttentionBackend: (
        *("get_impl_cls", "get_builder_cls", "get_supported_kernel_block_sizes", "supported_kv_cache_layouts"),
        *("supports_kv_connector", "customize_spec"),
    ),
    AttentionMetadataBuilder: ("_cudagraph_support", "reorder_batch_threshold", "requires_block_table_width", "build"),
    AttentionSpec: ("state_content_bytes",),
    CommonAttentionMetadata: ("compute_num_computed_tokens", "seq_lens_cpu_upper_bound"),
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
    parallel, cache = config.parallel_config, config.cache_config
    reasons = {
        "multi-head latent attention (MLA) caches one vector for all heads, which cannot be packed yet": (
            config.model_config.use_mla
        ),
        "encoder-decoder models cannot be packed": config.model_config.is_encoder_decoder,
        f"--kv-cache-dtype {cache.cache_dtype} packs the cache in another way: leave it at auto": (
            cache.cache_dtype != "auto"
        ),
        "KV connectors would ship pages to where they cannot be read": config.kv_transfer_config is not None,
        "speculative decoding is not supported yet": config.speculative_config is not None,
        "pipeline parallelism is not supported yet": parallel.pipeline_parallel_size > 1,
        "context parallelism is not supported": (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1
        ),
        "microbatching (DBO) is not supported": parallel.use_ubatching,
        "--enable-sleep-mode would lose means and rotations": config.model_config.enable_sleep_mode,
        "VLLM_ENABLE_STARTUP_PLAN takes memory as measured with other recipes: unset it": (
            vllm.envs.VLLM_ENABLE_STARTUP_PLAN
        ),
        f"pages need a multiple of {ALIGNMENT} tokens, not --block-size {cache.block_size}": (
            cache.block_size % ALIGNMENT != 0
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"kvfold: {reason}")
    Geometry.from_config(config.model_config.hf_config.to_dict())


def make_plan(config: VllmConfig, rank: int = 0, device: torch.device | str = "cpu") -> Plan:
    """The plan for a rank of a vLLM engine."""
    refuse(config)
    choice = asked_for(config)
    if choice is None:
        raise ValueError("kvfold's backend was selected without a recipe: set KVFOLD_RECIPE or additional-config")
    plan = Plan.make(
        choice,
        config.model_config.hf_config.to_dict(),
        config.cache_config.block_size,
        config.model_config.dtype,
        device,
        rank,
        config.parallel_config.tensor_parallel_size,
        digest_model(config.model_config.model) if choice.artifact else None,
    )
    if len({layout.page_bytes for layout in plan.layouts.values()}) > 1:
        raise ValueError(f"kvfold: vLLM has pages of one size for all layers, and {plan.recipe} has not")
    return plan


class Engine:
    """What all layers in this process share. It is made with the first layer, and allocates the shadow pages. Only
    then does vLLM measure the memory that is left for pages."""

    current: ClassVar["Engine | None"] = None
    followed: ClassVar[set[type]] = set()  # runners that `follow_steps` has wrapped

    def __init__(self, config: VllmConfig) -> None:
        self.config = config
        plan = make_plan(config, get_tensor_model_parallel_rank(), config.device_config.device)
        scheduler, cache = config.scheduler_config, config.cache_config
        shadow_pages = plan.shadows(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        if cache.kv_cache_memory_bytes is not None:  # for pages and shadow pages: vLLM measures nothing then
            given = vars(cache).setdefault("kvfold_given", cache.kv_cache_memory_bytes)  # an engine may be made again
            cache.kv_cache_memory_bytes = given - plan.shadow_bytes(shadow_pages)
            if cache.kv_cache_memory_bytes <= 0:
                raise ValueError(
                    f"kvfold: {shadow_pages} shadow pages for the windows of --max-num-seqs {scheduler.max_num_seqs} "
                    "requests leave nothing of the memory for the cache"
                )
        self.served = Served(plan, shadow_pages, logger)
        self.requests = Requests()
        if plan.windows:
            follow_steps(resolve_name(RUNNERS[config.use_v2_model_runner]))

    @classmethod
    def of(cls, config: VllmConfig) -> "Engine":
        current = cls.current
        # the language model of a multimodal one has its own configuration, with the same cache_config
        if current is None or current.config.cache_config is not config.cache_config:
            cls.current = None  # frees the memory of the last engine first
            with torch.device("cpu"):  # while vLLM makes layers, the default is their device
                cls.current = current = cls(config)
        return current


def follow_steps(runner: Any) -> None:
    """Wrap vLLM's runner class, so that `Requests` sees each step that the scheduler sends to this worker."""
    if runner in Engine.followed:
        return
    execute = runner.execute_model

    @wraps(execute)
    def followed(self: Any, scheduler_output: Any, *others: Any, **options: Any) -> Any:
        current = Engine.current
        if current is not None and self.cache_config is current.config.cache_config:  # else it is another engine's
            current.requests.follow(scheduler_output)
        return execute(self, scheduler_output, *others, **options)

    runner.execute_model = followed
    Engine.followed.add(runner)
