"""Packed pages in host memory: what SGLang's hierarchical cache (HiCache) keeps of the pages of a GPU."""

import math
from inspect import signature
from typing import Any

import torch
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from torch import Tensor

from kvfold.engines.sglang.packed_pool import PackedPool
from kvfold.engines.sglang.page_copies import copy_pages


class PackedHostPool(HostKVCache):
    """The bytes of packed pages, layer by layer: uint8[pages, bytes] per layer. Rings are not kept here: prefixes
    end where an open block begins.

    SGLang decides which page goes where. It names pages by their tokens, on the device and here.
    """

    def __init__(
        self,
        device_pool: PackedPool,
        ratio: float,
        gigabytes: float,
        page_size: int,
        layout: str,
        *,
        allocator_type: str,
        pool_label: str = "kv",
        **_: Any,
    ) -> None:
        self.device_pool = device_pool
        self.layer_num = self.target_layer_num = device_pool.layer_num
        self.row_bytes = [rows.shape[1] for rows in device_pool.rows]
        given: dict[str, Any] = {
            "host_to_device_ratio": ratio,
            "host_size": gigabytes,
            "page_size": page_size,
            "layout": "layer_first",  # whatever `layout` is: there is one way to arrange packed pages
            "pin_memory": torch.device(device_pool.device).type == "cuda",
            "device": "cpu",
            "allocator_type": allocator_type,
            "pool_label": pool_label,
        }
        if "device_pool" in signature(HostKVCache.__init__).parameters:  # up to 0.5.21
            given["device_pool"] = device_pool
        else:
            given |= {
                "dtype": torch.uint8,
                "device_capacity_tokens": device_pool.size,
                "size_per_token": self.get_size_per_token(),
                "start_layer": device_pool.start_layer,
                "end_layer": device_pool.end_layer,
            }
        super().__init__(**given)
        self.rows = [
            layer.view(self.page_num, -1)
            for layer in self.kv_buffer.split([self.page_num * size for size in self.row_bytes])
        ]
        addresses = [[rows.data_ptr() for rows in layers] for layers in (self.rows, device_pool.rows)]
        self.addresses = torch.tensor(addresses, device=device_pool.device)
        alike = [[n for n, each in enumerate(self.row_bytes) if each == size] for size in dict.fromkeys(self.row_bytes)]
        self.alike = {layers[0]: self.addresses[:, layers] for layers in alike}  # by the first of them
        if self.pin_memory:  # compiles the kernel
            nothing = torch.empty(0, dtype=torch.int64)
            self.backup_from_device_all_layer(device_pool, nothing, nothing, "kernel")

    def get_size_per_token(self) -> int:
        return math.ceil(sum(self.row_bytes) / self.device_pool.page_size)

    def init_kv_buffer(self) -> Tensor:
        size = (self.page_num * sum(self.row_bytes),)
        allocate = ALLOC_MEMORY_FUNCS[torch.device(self.device_pool.device).type]
        return allocate(
            size, dtype=torch.uint8, device=self.device, pin_memory=self.pin_memory, allocator=self.allocator
        )

    def load_to_device_per_layer(
        self,
        device_pool: PackedPool,
        host_indices: Tensor,
        device_indices: Tensor,
        layer_id: int,
        io_backend: str,
        **_: Any,
    ) -> None:
        """SGLang calls it for layer after layer of one load."""
        if layer_id == 0:
            self.loading = self._pages(host_indices), self._pages(device_indices)
        if self.pin_memory:
            sources, targets = self.addresses[:, layer_id : layer_id + 1]
            copy_pages(sources, targets, self.row_bytes[layer_id], *self.loading)
        else:
            host, device = self.loading
            device_pool.rows[layer_id][device] = self.rows[layer_id][host]

    def backup_from_device_all_layer(
        self, device_pool: PackedPool, host_indices: Tensor, device_indices: Tensor, io_backend: str
    ) -> None:
        host, device = self._pages(host_indices), self._pages(device_indices)
        if self.pin_memory:
            for first, (targets, sources) in self.alike.items():
                copy_pages(sources, targets, self.row_bytes[first], device, host)
        else:
            for target, source in zip(self.rows, device_pool.rows, strict=True):
                target[host] = source[device]

    def _pages(self, indices: Tensor) -> Tensor:
        """The pages of tokens, which are whole pages one after the other. SGLang's `direct` transfers have indices on
        the host."""
        return indices[:: self.page_size].to(self.device_pool.device) // self.page_size

    def get_data_page(self, index: int | Tensor, flat: bool = True) -> Tensor:
        """The page that token `index` begins, of all layers, as it is stored."""
        page = int(index) // self.page_size
        return torch.cat([layer[page] for layer in self.rows])

    def get_dummy_flat_data_page(self) -> Tensor:
        return torch.empty(sum(self.row_bytes), dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int | Tensor, data_page: Tensor) -> None:
        page = int(index) // self.page_size
        for layer, row in zip(self.rows, data_page.split(self.row_bytes), strict=True):
            layer[page] = row
