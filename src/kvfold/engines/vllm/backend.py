"""vLLM's attention over packed pages. The backend gives the size of pages, the builder describes each step, and the
implementation packs and attends."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
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

from kvfold.engines.vllm.configuration import SIXTEEN_BITS
from kvfold.engines.vllm.engine import Engine
from kvfold.format.layout import ALIGNMENT
from kvfold.ops.pages import HostLengths, Logits
from kvfold.paged.layer import Steps


class PackedBackend(AttentionBackend):
    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = list(SIXTEEN_BITS)

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

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
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True  # those of a checkpoint: packed pages have no use for them

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Bytes of a token, before vLLM says of which layer: see `Engine.sized`."""
        assert Engine.current is not None, "vLLM makes layers before it counts their bytes"
        return replace(spec, dtype=torch.uint8, state_content_bytes=max(Engine.current.token_bytes.values()))


@dataclass
class PackedMetadata:
    steps: Steps


class PackedMetadataBuilder(AttentionMetadataBuilder[PackedMetadata]):
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH  # all requests have 1 token, or all have as many drafts too
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
        self.engine = Engine.of(config)
        self.group = self.engine.group(layer_names[0])
        # layers of unequal size have a builder per size, and one page table
        self.leads, self.group.led = not self.group.led, True
        self.queries = 1 + config.num_speculative_tokens  # of a request that decodes, at most
        self.reorder_batch_threshold = self.queries  # requests that decode come first
        requests, ratio = config.scheduler_config.max_num_seqs, self.group.ratio
        self.starts = torch.zeros(requests, dtype=torch.int32, device=device)
        self.table = torch.zeros(requests, block_table_width * ratio, dtype=torch.int64, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PackedMetadata:
        if self.leads:
            self.group.steps = self._begin(common_attn_metadata)
        return PackedMetadata(self.group.steps)

    def _begin(self, step: CommonAttentionMetadata) -> Steps:
        served = self.group.served
        locations, starts = step.slot_mapping[: step.num_actual_tokens], step.compute_num_computed_tokens()
        blocks = step.block_table_tensor
        table = self.group.pages(blocks, self.table[: len(blocks), : blocks.shape[1] * self.group.ratio])
        if self.group is self.engine.groups[0]:
            self.engine.show()
        if self.device.type == "cpu":
            host = HostLengths(starts.tolist(), step.seq_lens.tolist())
            return served.steps(host, locations, starts, step.seq_lens, table, self.group.rings[: len(blocks)])
        return self._device_steps(step, starts, table)

    def _device_steps(self, step: CommonAttentionMetadata, starts: Tensor, table: Tensor) -> Steps:
        """Requests that decode are one step, with the drafts that some of them may have. The others follow. If all
        requests decode, their step is in tensors that stay in place for CUDA graphs."""
        served, rings = self.group.served, self.group.rings
        self.starts[: step.num_reqs].copy_(starts)
        counts = step.query_start_loc_cpu.diff().tolist()
        decodes = next((row for row, count in enumerate(counts) if count > self.queries), len(counts))
        first = sum(counts[:decodes]) if decodes < step.num_reqs else step.num_actual_tokens  # token of the others
        steps = []
        if decodes:
            rows, query_starts = slice(decodes), step.query_start_loc[: decodes + 1]
            lengths = self.starts[rows], step.seq_lens[rows]
            described = step.slot_mapping[:first], query_starts, *lengths, self.table[rows], rings[rows]
            steps.append(served.decode(*described, queries=self.queries if max(counts[rows]) > 1 else 1))
        if decodes < step.num_reqs:
            others = slice(decodes, step.num_reqs)
            locations = step.slot_mapping[first : step.num_actual_tokens]
            lengths = self.starts[others], step.seq_lens[others]
            after = step.seq_lens_cpu_upper_bound.tolist()  # exact: with drafts, none is scheduled ahead
            before = [length - count for length, count in zip(after, counts, strict=True)]
            host, tables = HostLengths(before[others], after[others]), (table[others], rings[others])
            for tokens, part in served.steps(host, locations, *lengths, *tables):
                steps.append((slice(first + tokens.start, first + tokens.stop), part))
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
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.logits_soft_cap, self.sinks = logits_soft_cap or None, sinks
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        unsupported = {
            "ALiBi": alibi_slopes,
            "a sliding window": sliding_window,
            "bidirectional or cross attention": attn_type != AttentionType.DECODER,
            **{name.replace("_", " "): value for name, value in others.items()},
        }
        for what, value in unsupported.items():
            if value:
                raise ValueError(f"kvfold: attention with {what} cannot run over packed pages")
        self.engine = Engine.of(get_current_vllm_config())
        plan = self.engine.served.plan
        heads = plan.kv_heads * plan.ratio, plan.kv_heads, plan.geometry.key_dim
        if (num_heads, self.num_kv_heads, head_size) != heads:
            raise ValueError(
                f"kvfold: a layer of vLLM has {num_heads} query heads, {self.num_kv_heads} KV heads and heads of "
                f"{head_size} numbers, and by its configuration it has {heads[0]}, {heads[1]} and {heads[2]}"
            )
        self.logits = Logits(scale, self.logits_soft_cap)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Called again when weights are loaded again. CUDA graphs have the address of the first copy."""
        if self.sinks is None:
            return
        if self.logits.sinks is None:
            self.logits = self.logits._replace(sinks=self.sinks.float())
        else:
            self.logits.sinks.copy_(self.sinks)

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
        """Queries [tokens, heads, d] over the layer's pages, or over those of another layer, which ran before."""
        if attn_metadata is None:  # vLLM profiles memory
            return output.zero_()
        packed, steps = self.engine.layers[layer.layer_name], attn_metadata.steps
        if self.kv_sharing_target_layer_name is None:
            packed.attend(steps, query, key, value, self.logits, output)
        else:
            packed.read(steps, query, self.logits, output)
        return output
