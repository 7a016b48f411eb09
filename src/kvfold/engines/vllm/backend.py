"""vLLM's attention over packed pages. The backend gives the size of pages, the builder describes each step, and the
implementation packs and attends."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
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

from kvfold.engines.serving import Steps
from kvfold.engines.vllm.engine import Engine
from kvfold.format.layout import ALIGNMENT
from kvfold.ops.pages import HostLengths, Logits


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
        return (KVCacheLayout.LBHNC,)  # a block is contiguous, and so is each KV head in it

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """vLLM counts [blocks, heads, tokens, bytes]. So the bytes of a page are spread evenly over its tokens."""
        assert Engine.current is not None, "vLLM makes layers before it counts their bytes"
        page_bytes = next(iter(Engine.current.served.plan.layouts.values())).page_bytes
        return replace(spec, dtype=torch.uint8, state_content_bytes=page_bytes // spec.block_size)


@dataclass
class PackedMetadata:
    steps: Steps


class PackedMetadataBuilder(AttentionMetadataBuilder[PackedMetadata]):
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1  # requests that decode come first
    requires_block_table_width = True  # vLLM rounds it up

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
        self.served = served = self.engine.served
        if len(layer_names) != len(served.plan.codecs):
            raise ValueError(
                f"kvfold: vLLM gives it {len(layer_names)} layers of {len(served.plan.codecs)}, and would serve the "
                "others in 16 bits"
            )
        served.close()  # on a GPU, vLLM measures CUDA graphs with a few pages, which it frees
        requests = config.scheduler_config.max_num_seqs
        self.starts = torch.zeros(requests, dtype=torch.int32, device=device)
        self.table = torch.zeros(requests, block_table_width, dtype=torch.int64, device=device)
        if (pages := config.cache_config.num_gpu_blocks) is not None:
            served.open(pages)
            served.announce(pages)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PackedMetadata:
        if not self.served.pages:  # vLLM may not know their number before its first step
            self.served.open(self.config.cache_config.num_gpu_blocks)
        step, requests = common_attn_metadata, self.engine.requests
        locations, table = step.slot_mapping[: step.num_actual_tokens], step.block_table_tensor
        starts = step.compute_num_computed_tokens()
        self.served.before_step(requests.described(self.device) if requests.resting else None)
        self.served.begin(locations, starts, step.seq_lens, table)
        if self.device.type == "cpu":
            host = HostLengths(starts.tolist(), step.seq_lens.tolist())
            return PackedMetadata(self.served.steps(host, locations, starts, step.seq_lens, table))
        return PackedMetadata(self._device_steps(step, starts))

    def _device_steps(self, step: CommonAttentionMetadata, starts: Tensor) -> Steps:
        """Requests that decode are one step, in tensors that stay in place for CUDA graphs. The others follow."""
        rows = slice(step.num_reqs)
        self.starts[rows].copy_(starts)
        table = self.table[rows, : step.block_table_tensor.shape[1]].copy_(step.block_table_tensor)
        counts = step.query_start_loc_cpu.diff().tolist()
        lengths = step.seq_lens_cpu_upper_bound.tolist()  # the lengths themselves, without speculative decoding
        before = [length - count for length, count in zip(lengths, counts, strict=True)]
        decodes = next((row for row, count in enumerate(counts) if count > 1), len(counts))
        steps = []
        if decodes:
            rows = slice(decodes)
            query_starts = step.query_start_loc[: decodes + 1]
            described = step.slot_mapping[rows], query_starts, self.starts[rows], step.seq_lens[rows], self.table[rows]
            steps.append(self.served.decode(*described))
        if decodes < step.num_reqs:
            others = slice(decodes, step.num_reqs)
            host = HostLengths(before[others], lengths[others])
            rest = step.slot_mapping[decodes:], self.starts[others], step.seq_lens[others], table[others]
            for tokens, part in self.served.steps(host, *rest):
                steps.append((slice(decodes + tokens.start, decodes + tokens.stop), part))
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
        config = get_current_vllm_config()
        self.served = Engine.of(config).served
        self.compilation = config.compilation_config
        self.number: int | None = None  # of the layer, once it has run

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
        """Queries [tokens, heads, d] over pages uint8[pages, kv_heads, page_size, bytes]."""
        if attn_metadata is None:  # vLLM profiles memory
            return output.zero_()
        if self.number is None:
            self.number = extract_layer_index(layer.layer_name)
        packed = self.served.layers.get(self.number)
        if packed is None or packed.pages.pool.data_ptr() != kv_cache.data_ptr():
            packed = self.served.attach(self.number, kv_cache.flatten(2))
            # with CUDA graphs, vLLM gets here at start; without, only in a request, which would wait
            if self.served.complete and self.compilation.cudagraph_mode.has_full_cudagraphs():
                self.served.warm_up()
        packed.attend(attn_metadata.steps, query, key, value, Logits(self.scale), output)
        return output
