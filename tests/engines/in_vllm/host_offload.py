"""vLLM's offloading where there is no GPU: the blocks of its CPU backend take the place of blocks on a GPU.

vLLM moves bytes by a list of addresses, on streams of the GPU. The addresses are its own here. Only the copies, the
streams and the events are stand-ins: a copy is done when it is asked for.
"""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from defined_attention import RAW, Found
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

CPU_BYTES = 2**22
ABSENT = 1e30


def transfer_config(**options: Any) -> dict[str, Any]:
    """What --kv-transfer-config says."""
    extra = {"cpu_bytes_to_use": CPU_BYTES, **options}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


class OnGpu:
    """A tensor that says so."""

    is_cuda = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str):
        return getattr(self._tensor, name)


class Done:
    """A stream on which nothing is left to do, and an event that has happened."""

    def __init__(self, **_) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _) -> float:
        return 1.0

    def nothing(self, *_) -> None:
        pass

    wait_stream = wait_event = record = synchronize = nothing


def copy_all(sources, targets, sizes, **_) -> None:
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


@contextmanager
def offloading_on_a_cpu() -> Iterator[None]:
    """Engines that are made in this context can offload."""
    handler, init = gpu_worker.SingleDirectionOffloadingHandler, gpu_worker.SingleDirectionOffloadingHandler.__init__

    def on_gpu(self, gpu_tensors, *others, **options) -> None:
        init(self, [OnGpu(tensor) for tensor in gpu_tensors], *others, **options)

    platform = SimpleNamespace(
        Stream=Done, current_stream=Done, stream=lambda _: nullcontext(), is_xpu=lambda: False, is_rocm=lambda: False
    )
    with ExitStack() as stack:
        for where, name, stand_in in (
            (handler, "__init__", on_gpu),
            (gpu_worker, "_select_swap_blocks_fn", lambda *_: copy_all),
            (gpu_worker, "current_platform", platform),
            (gpu_worker, "torch", SimpleNamespace(**{**vars(torch), "Event": Done})),
            (CPUOffloadingSpec, "get_worker", lambda self, caches: self.create_worker(caches)),
        ):
            stack.enter_context(patch.object(where, name, stand_in))
        yield


@contextmanager
def followed_to_cpu_memory(found: Found, pages: int = 1) -> Iterator[list[int]]:
    """Let the record of what was stored in pages follow them to CPU memory and back. A block has so many pages. Yields
    the blocks that came back. Raw vectors do not come back: whoever reads them reads ABSENT."""
    worker, kept, loaded = gpu_worker.CPUOffloadingWorker, {}, []
    store, load = worker.submit_store, worker.submit_load

    def stored(self, job, source, target) -> bool:
        for block, chunk in zip(source.block_ids.tolist(), target.block_ids.tolist(), strict=True):
            kept[chunk] = [
                (record, number, tuple(map(torch.clone, record.states[page])))
                for record, number in product(found.records.values(), range(pages))
                if (page := block * pages + number) in record.states  # else the block is not of this layer
            ]
        return store(self, job, source, target)

    def came_back(self, job, source, target) -> bool:
        for chunk, block in zip(source.block_ids.tolist(), target.block_ids.tolist(), strict=True):
            for record, number, states in kept[chunk]:
                record.states[block * pages + number] = tuple(map(torch.clone, states))
                for ways in record.states[block * pages + number]:
                    ways[RAW] = ABSENT
            loaded.append(block)
        return load(self, job, source, target)

    with patch.object(worker, "submit_store", stored), patch.object(worker, "submit_load", came_back):
        yield loaded
