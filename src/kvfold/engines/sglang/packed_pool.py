"""The pool that holds packed pages in place of SGLang's."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVCache
from torch import Tensor

from kvfold.engines.serving import Plan, Served
from kvfold.engines.sglang import logger


class PackedPool(KVCache):
    """Pages uint8[pages, kv_heads, page_bytes] per packed layer, and a ring per row of SGLang's table of requests.
    SGLang decides which token lies where. It reads no bytes.

    Some models have local layers, with sliding windows or chunks, that SGLang keeps in one pool with the full layers.
    Then `local_layers` are their numbers, and `stock` makes SGLang's own pool for them. Both have the same locations.
    """

    hicache_write_back_staging = None  # SGLang asks for it

    def __init__(
        self,
        plan: Plan,
        rings: int,
        local_layers: Sequence[int],
        stock: Callable[..., KVCache],
        size: int,
        *,
        page_size: int,
        layer_num: int,
        device: str,
        enable_memory_saver: bool,
        start_layer: int | None = None,
        end_layer: int | None = None,
        **options: Any,
    ) -> None:
        # uint8, because SGLang's RoPE kernels write keys into a pool that has the dtype of K and V
        super().__init__(size, page_size, torch.uint8, layer_num, device, enable_memory_saver, start_layer, end_layer)
        pages = size // page_size + 1  # page 0 is SGLang's, for padding
        self.served = Served(plan, logger, rings)
        self.served.open(pages)
        # Pages and rings are what a memory saver takes away and gives back, without their contents.
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            for number, layout in plan.layouts.items():
                pool = layout.allocate(pages, plan.kv_heads, plan.device)
                self.served.attach(number, pool, plan.allocate_rings(number, rings))
        layers = self.served.layers
        self.rows = [layers[number].pages.pool.flatten(1) for number in sorted(layers)]  # each uint8[pages, bytes]
        self.places = {number: place for place, number in enumerate(local_layers)}
        self.local_pool = None
        if local_layers:
            own = {"page_size": page_size, "device": device, "enable_memory_saver": enable_memory_saver}
            self.local_pool = stock(size, layer_num=len(local_layers), **own, **options)
        self._finalize_allocation_log(size)
        self.served.announce(pages - 1)

    def get_device_pool_infos(self) -> tuple[SimpleNamespace]:
        """What SGLang makes a host pool from: see `hierarchical_cache.host_pool`."""
        return (SimpleNamespace(buffer_info=self),)

    def wait_for(self, layer: int) -> None:
        """Wait until the pages that the step reads are loaded, in this layer and all before it."""
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(layer)

    @property
    def token_bytes(self) -> float:
        """Bytes per token, over all layers in this pool."""
        return self.served.plan.token_bytes + self.local_bytes / (self.size + self.page_size)

    @property
    def local_bytes(self) -> int:
        """Bytes of the pool of local layers."""
        return 0 if self.local_pool is None else sum(self.local_pool.get_kv_size_bytes())

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """SGLang adds the two numbers, which are keys and values in its own pools."""
        layers = self.served.layers.values()
        packed = sum(layer.pages.pool.nbytes + layer.pages.ring.nbytes for layer in layers)
        return packed, self.local_bytes

    def _local(self, layer: int) -> tuple[KVCache, int]:
        """The pool of a local layer, and the layer's number in it."""
        if self.local_pool is None or layer not in self.places:
            raise NotImplementedError(
                f"keys and values of layer {layer} are packed: only kvfold's attention backend reads and writes them"
            )
        return self.local_pool, self.places[layer]

    def get_key_buffer(self, layer_id: int) -> Tensor:
        pool, place = self._local(layer_id)
        return pool.get_key_buffer(place)

    def get_value_buffer(self, layer_id: int) -> Tensor:
        pool, place = self._local(layer_id)
        return pool.get_value_buffer(place)

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        pool, place = self._local(layer_id)
        return pool.get_kv_buffer(place)

    def set_kv_buffer(self, layer: RadixAttention, *arguments: Any, **options: Any) -> None:
        pool, place = self._local(layer.layer_id)
        pool.set_kv_buffer(layer, *arguments, **options, layer_id_override=place)

    def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        """Nothing has to move: SGLang asks for this after drafts were accepted, and accepted drafts of a chain lie
        where they belong."""


def packed_pool_of(pool: KVCache) -> PackedPool:
    """The packed pool that SGLang's pool is, or has for its full layers."""
    full = getattr(pool, "full_kv_pool", pool)
    if not isinstance(full, PackedPool):
        raise ValueError(f"kvfold: SGLang made a {type(full).__name__} instead of packed pages")
    return full
