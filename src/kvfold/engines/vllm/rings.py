"""The rings of running requests: KV-cache groups of vLLM whose blocks hold the raw vectors of open blocks.

A request has a ring beside each group of packed layers: a few blocks, from its first step until it ends or is
preempted. vLLM gives a block to one group at a time. So block b of a ring is block b of the packed layers' own pages,
and a ring needs no other memory. A group of vLLM needs layers, by whose names it is known: each packed layer has a
`RingLayer` beside it.

vLLM learns of all this when it imports this module, as each process does that gets a `RingSpec`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheGroupSpec, KVCacheLayout, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import register_kv_cache_spec
from vllm.v1.request import Request

NAME = ".ring"  # of a packed layer's `RingLayer`, after the layer's own

Specs = dict[str, KVCacheSpec]  # by the layer's name


class RingManager(CircularBufferManager):
    """As vLLM's, but a ring has several blocks."""

    def get_num_blocks_to_allocate(self, request_id: str, *_: Any, **options: Any) -> int:
        return 0 if self.req_to_blocks.get(request_id) else self.kv_cache_spec.blocks

    def _claim_ring_block(self, request_id: str, record_for_zeroing: bool = True) -> list[KVCacheBlock]:
        held = self.req_to_blocks[request_id]
        new = [] if held else self.block_pool.get_new_blocks(self.kv_cache_spec.blocks)
        held.extend(new)
        return new


@register_kv_cache_spec(manager_class=RingManager, uniform_type_base_spec=CircularBufferSpec)
@dataclass(frozen=True, kw_only=True)
class RingSpec(CircularBufferSpec):
    """`block_size` is that of packed layers: prefix hits end at multiples of the block sizes of all groups."""

    blocks: int  # of a ring
    open_block: int  # tokens

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        return self.blocks * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """vLLM's older runner computes slots of this group too, and reads the table where a packed group has blocks."""
        return max(self.blocks, cdiv(max_len, self.block_size))


class RingBackend(AttentionBackend):
    """Attends nothing. Its builder takes the blocks of each step's rings."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("packed layers attend")

    @staticmethod
    def get_builder_cls() -> type["RingBuilder"]:
        return RingBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)


class RingLayer(torch.nn.Module, AttentionLayerBase):
    """Stands for the ring of a packed layer. `rings` has the blocks of all rings of its group in the current step."""

    rings: Tensor  # int64[requests, blocks]; set by the engine

    def __init__(self, spec: RingSpec) -> None:
        super().__init__()
        self.spec, self.kv_cache = spec, torch.empty(0)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return RingBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> RingSpec:
        return self.spec


class RingBuilder(AttentionMetadataBuilder[None]):
    """Before each step, in any order with the builders of packed layers, as only the layers read `rings`."""

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, spec: RingSpec, layer_names: list[str], config: VllmConfig, device: torch.device) -> None:
        super().__init__(spec, layer_names, config, device)
        self.rings = config.compilation_config.static_forward_context[layer_names[0]].rings

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> None:
        table = common_attn_metadata.block_table_tensor
        self.rings[: len(table)].copy_(table[:, : self.rings.shape[1]])


def beside_packed(
    grouped: Callable[[VllmConfig, Specs], list[KVCacheGroupSpec]],
) -> Callable[[VllmConfig, Specs], list[KVCacheGroupSpec]]:
    """Wrap vLLM's planner: it groups layers as without rings, and each group with packed layers gets its rings."""

    @wraps(grouped)
    def wrapped(vllm_config: VllmConfig, kv_cache_spec: Specs) -> list[KVCacheGroupSpec]:
        rings = {name: spec for name, spec in kv_cache_spec.items() if isinstance(spec, RingSpec)}
        groups = grouped(vllm_config, {name: spec for name, spec in kv_cache_spec.items() if name not in rings})
        ringed = [[name + NAME for name in group.layer_names if name + NAME in rings] for group in groups]
        return groups + [KVCacheGroupSpec(names, rings[names[0]]) for names in ringed if names]

    return wrapped


def without_rings(validate: Callable[..., None]) -> Callable[..., None]:
    """Wrap vLLM's check that layers of unequal size are in a single group. Rings lie in the pages of that group."""

    @wraps(validate)
    def wrapped(layout: KVCacheLayout, kv_cache_groups: Sequence[KVCacheGroupSpec]) -> None:
        validate(layout, [group for group in kv_cache_groups if not isinstance(group.kv_cache_spec, RingSpec)])

    return wrapped


def from_block_borders(loaded: Callable[[Scheduler, Request], None]) -> Callable[[Scheduler, Request], None]:
    """Wrap what vLLM does when the pages of a waiting request were loaded from elsewhere. If that is its whole prompt,
    vLLM computes the last token again, whose open block would not be in the ring."""

    @wraps(loaded)
    def wrapped(self: Scheduler, request: Request) -> None:
        loaded(self, request)
        for group in self.kv_cache_config.kv_cache_groups:
            if isinstance(group.kv_cache_spec, RingSpec):
                request.num_computed_tokens -= request.num_computed_tokens % group.kv_cache_spec.open_block

    return wrapped


def of_layers(context: Mapping[str, Any], names: Sequence[str]) -> list[RingLayer]:
    """The `RingLayer`s beside these layers, those without a ring left out. `context` has all layers by name."""
    return [context[name + NAME] for name in names if name + NAME in context]


kv_cache_utils.get_kv_cache_groups = beside_packed(kv_cache_utils.get_kv_cache_groups)
kv_cache_utils.validate_kv_cache_layout = without_rings(kv_cache_utils.validate_kv_cache_layout)
Scheduler._update_waiting_for_remote_kv = from_block_borders(Scheduler._update_waiting_for_remote_kv)
