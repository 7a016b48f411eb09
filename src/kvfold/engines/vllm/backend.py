"""vLLM's attention over packed pages: the backend says how large pages are, the builder describes each step, the
implementation packs and attends."""

from dataclasses import dataclass, replace
from functools import cached_property, wraps
from pkgutil import resolve_name
from typing import Any, ClassVar

import torch
import vllm
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from kvfold.artifact import digest_model
from kvfold.engines.gauges import Gauges
from kvfold.engines.serving import Faults, Layer, Plan, decode_step, steps_of, warm_up
from kvfold.engines.shadow_table import ShadowTable
from kvfold.engines.vllm.plugin import asked_for
from kvfold.engines.vllm.requests import Requests
from kvfold.geometry import Geometry
from kvfold.layout import ALIGNMENT
from kvfold.ops.pages import Step
from kvfold.ops.restore import Restore

TESTED = "0.32"  # the version of vLLM that kvfold is tested with
RUNNERS = ("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "vllm.v1.worker.gpu.model_runner:GPUModelRunner")  # V1, V2
HOOKS = {  # what vLLM has to have so that it calls what is below, and says what is asked for there
    AttentionBackend: (
        *("get_impl_cls", "get_builder_cls", "get_supported_kernel_block_sizes", "supported_kv_cache_layouts"),
        *("supports_kv_connector", "customize_spec"),
    ),
    AttentionMetadataBuilder: ("_cudagraph_support", "reorder_batch_threshold", "requires_block_table_width", "build"),
    AttentionSpec: ("state_content_bytes",),
    CommonAttentionMetadata: ("compute_num_computed_tokens", "seq_lens_cpu_upper_bound"),
}

logger = init_logger("vllm.kvfold")  # below vLLM's own, so that it is shown


def require() -> None:
    """Refuse a vLLM that would leave out some of this."""
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
    if len({layout.page_bytes for layout in plan.layouts}) > 1:
        raise ValueError(f"kvfold: vLLM has pages of one size for all layers, and {plan.recipe} has not")
    return plan


class Engine:
    """What the layers of the engine in this process share. It is made with the first of them, before vLLM measures how
    much memory is left for pages, and shadow pages are allocated then."""

    current: ClassVar["Engine | None"] = None
    followed: ClassVar[set[type]] = set()  # classes that show their steps

    def __init__(self, config: VllmConfig) -> None:
        self.config, self.device = config, config.device_config.device
        self.plan = make_plan(config, get_tensor_model_parallel_rank(), self.device)
        scheduler, cache = config.scheduler_config, config.cache_config
        self.shadows = self.plan.shadows(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        if cache.kv_cache_memory_bytes is not None:  # then nothing is measured: what was given is for both
            given = vars(cache).setdefault("kvfold_given", cache.kv_cache_memory_bytes)  # an engine may be made anew
            cache.kv_cache_memory_bytes = given - self.plan.shadow_bytes(self.shadows)
            if cache.kv_cache_memory_bytes <= 0:
                raise ValueError(
                    f"kvfold: {self.shadows} shadow pages for the windows of --max-num-seqs {scheduler.max_num_seqs} "
                    "requests leave nothing of the memory for the cache"
                )
        self.faults: Faults | None = None  # once it is known how many pages there are
        self.layers: dict[str, Layer] = {}  # by vLLM's names, once they have run
        self.restore: Restore | None = None
        self.requests = Requests()
        if self.plan.windows:
            follow_steps(resolve_name(RUNNERS[config.use_v2_model_runner]))

    def add(self, name: str, pool: Tensor, shadows: Tensor) -> Layer:
        """A layer whose pages are known now. Before the last is, no page has lost its shadow."""
        slots = len(pool) * self.plan.page_size
        if self.faults is None or len(self.faults.marks) != slots:
            self.faults = Faults(slots, self.device, logger)
        layer = Layer(self.plan, extract_layer_index(name), pool, shadows, self.faults.marks)
        self.layers[name] = layer
        if len(self.layers) == len(self.plan.layouts):
            self.restore = Restore([layer.pages for layer in self.layers.values()])
            if self.config.compilation_config.cudagraph_mode.has_full_cudagraphs():  # else a request would wait for it
                warm_up(self.layers.values())
        return layer

    def forget(self) -> None:
        """Let go of the pages of all layers: on a GPU, vLLM measures CUDA graphs with a few that it frees again."""
        self.layers.clear()
        self.restore = self.faults = None

    @classmethod
    def of(cls, config: VllmConfig) -> "Engine":
        current = cls.current
        # vLLM makes the language model of a larger one with another configuration, of the same cache
        if current is None or current.config.cache_config is not config.cache_config:
            with torch.device("cpu"):  # vLLM makes layers where the default is their own
                cls.current = current = cls(config)
        return current


def follow_steps(runner: Any) -> None:
    """Show the engine each step that vLLM's scheduler sends to this worker, by the class that runs it."""
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


class PackedBackend(AttentionBackend):
    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto"]

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN" if current_platform.is_cpu() else "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["PackedImpl"]:
        return PackedImpl

    @staticmethod
    def get_builder_cls() -> type["PackedMetadataBuilder"]:
        return PackedMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(ALIGNMENT)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)  # a page is one piece of memory, and in it what belongs to a KV head

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """vLLM counts [blocks, heads, tokens, bytes]; the bytes of a page of ours are spread evenly over its tokens."""
        assert Engine.current is not None, "vLLM makes layers before it counts their bytes"
        page_bytes = Engine.current.plan.layouts[0].page_bytes
        return replace(spec, dtype=torch.uint8, state_content_bytes=page_bytes // spec.block_size)


@dataclass
class PackedMetadata:
    steps: list[tuple[slice, Step]]


class PackedMetadataBuilder(AttentionMetadataBuilder[PackedMetadata]):
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1  # requests that decode come first
    requires_block_table_width = True  # which vLLM rounds up

    def __init__(
        self,
        spec: AttentionSpec,
        layer_names: list[str],
        config: VllmConfig,
        device: torch.device,
        block_table_width: int,
    ) -> None:
        super().__init__(spec, layer_names, config, device)
        self.config, self.engine = config, Engine.of(config)
        if len(layer_names) != len(self.engine.plan.layouts):
            raise ValueError(
                f"kvfold: vLLM gives it {len(layer_names)} layers of {len(self.engine.plan.layouts)}, and would serve "
                "the others in 16 bits"
            )
        self.engine.forget()
        self.page_size = spec.block_size
        requests = config.scheduler_config.max_num_seqs
        self.starts = torch.zeros(requests, dtype=torch.int32, device=device)
        self.table = torch.zeros(requests, block_table_width, dtype=torch.int64, device=device)
        self.gauges = Gauges(self.engine.plan, self.engine.shadows)
        if (pages := config.cache_config.num_gpu_blocks) is not None:  # else see `shadows`
            logger.info(self.engine.plan.report(pages, self.engine.shadows))

    @cached_property
    def shadows(self) -> ShadowTable:
        """Made with the first step: on a GPU, vLLM makes a builder to measure CUDA graphs before it says with how many
        pages."""
        pages = self.config.cache_config.num_gpu_blocks
        return ShadowTable(self.engine.plan.windows, self.page_size, pages, self.engine.shadows, self.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PackedMetadata:
        step = common_attn_metadata
        slots, table = step.slot_mapping[: step.num_actual_tokens], step.block_table_tensor
        starts = step.compute_num_computed_tokens()
        if self.shadows.windows:
            if self.engine.requests.resting:
                self.shadows.rest(*self.engine.requests.described(self.device))
            lost = self.shadows.update(slots, starts, step.seq_lens, table)
            if self.engine.restore is not None:
                self.engine.restore(*lost)
        if self.engine.faults is not None:
            self.gauges.step(self.shadows, self.engine.faults)
        if self.device.type == "cpu":
            lists = starts.tolist(), step.seq_lens.tolist()
            described = (slots, starts, step.seq_lens)
            return PackedMetadata(steps_of(*lists, table, self.page_size, self.shadows.of, described, ragged=False))
        return PackedMetadata(self._device_steps(step, starts))

    def _device_steps(self, step: CommonAttentionMetadata, starts: Tensor) -> list[tuple[slice, Step]]:
        """Requests that decode as one step, which lies where the last one did so that CUDA graphs see it; then the
        others."""
        rows = slice(step.num_reqs)
        self.starts[rows].copy_(starts)
        table = self.table[rows, : step.block_table_tensor.shape[1]].copy_(step.block_table_tensor)
        counts = step.query_start_loc_cpu.diff().tolist()
        lengths = step.seq_lens_cpu_upper_bound.tolist()  # exact, without speculative decoding
        before = [length - count for length, count in zip(lengths, counts, strict=True)]
        decodes = next((row for row, count in enumerate(counts) if count > 1), len(counts))
        described = (step.slot_mapping[decodes:], self.starts[rows][decodes:], step.seq_lens[decodes:])
        steps = [
            (slice(decodes + tokens.start, decodes + tokens.stop), part)
            for tokens, part in steps_of(
                before[decodes:], lengths[decodes:], table[decodes:], self.page_size, self.shadows.of, described, True
            )
        ]
        if decodes:
            rows = slice(decodes)
            one = decode_step(
                step.slot_mapping[rows],
                step.query_start_loc[: decodes + 1],
                self.starts[rows],
                step.seq_lens[rows],
                self.table[rows],
                self.shadows.of,
                self.page_size,
            )
            steps.insert(0, one)
        return steps


class PackedImpl(AttentionImpl[PackedMetadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        unsupported = {
            "ALiBi": alibi_slopes,
            "a sliding window": sliding_window,
            "logit soft-capping": logits_soft_cap,
            "another layer's cache": kv_sharing_target_layer_name,
            "bidirectional or cross attention": attn_type != AttentionType.DECODER,
            **{name.replace("_", " "): value for name, value in others.items()},
        }
        for what, value in unsupported.items():
            if value:
                raise ValueError(f"kvfold: attention with {what} cannot run over packed pages")
        self.engine = Engine.of(get_current_vllm_config())
        self.shadows = self.engine.plan.allocate_shadows(self.engine.shadows)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PackedMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Queries [tokens, heads, d] over pages uint8[blocks, kv_heads, tokens, bytes]."""
        if attn_metadata is None:  # vLLM measures memory
            return output.zero_()
        packed = self.engine.layers.get(layer.layer_name)
        if packed is None or packed.pages.pool.data_ptr() != kv_cache.data_ptr():
            packed = self.engine.add(layer.layer_name, kv_cache.flatten(2), self.shadows)
        packed.attend(attn_metadata.steps, query, key, value, self.scale, output)
        return output
