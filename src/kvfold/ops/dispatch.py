"""Which implementation of each op a layer gets, and why."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple
from warnings import warn

import torch
from torch import Tensor

from kvfold.layout import PageLayout
from kvfold.ops.attend import blocked
from kvfold.ops.pages import LayerPages
from kvfold.ops.store import naive

New = tuple[Tensor, Tensor] | None
AMPERE, HOPPER = (8, 0), (9, 0)  # compute capabilities


class Choice(NamedTuple):
    implementation: str
    reason: str
    run: Callable[..., Any]
    step: Callable[..., Tensor] | None = None  # `store` and this, of the implementations that share work between them


class Ops(NamedTuple):
    """`decode` is `attend` for steps with a single query of each sequence, `extend` for others."""

    store: Choice
    decode: Choice
    extend: Choice

    def step(
        self, pages: LayerPages, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor | None = None
    ) -> Tensor:
        """`store`, then `attend`."""
        step = self._attention(pages).step
        if step is not None:
            return step(pages, q, k, v, scale, out)
        return self.attend(pages, q, self.store.run(pages, k, v), scale, out)

    def attend(self, pages: LayerPages, q: Tensor, new: New, scale: float, out: Tensor | None = None) -> Tensor:
        return self._attention(pages).run(pages, q, new, scale, out)

    def _attention(self, pages: LayerPages) -> Choice:
        return self.decode if pages.step.n == 1 else self.extend


@lru_cache
def choose(layout: PageLayout, ratio: int, device: torch.device, capability: tuple[int, int] | None = None) -> Ops:
    """The ops for pages of this layout and `ratio` query heads for each KV head, on this device; `capability` is that
    of a GPU that is not there."""
    if device.type == "cpu":
        return _cpu(layout)
    if device.type != "cuda":
        return _torch(f"there are kernels for GPUs and CPUs, and the cache is on {device.type}")
    from kvfold.ops import tiles
    from kvfold.ops.attend import gluon, unpacked
    from kvfold.ops.attend import triton as attend
    from kvfold.ops.store import triton as store

    if reason := tiles.unreadable(layout):
        warn(f"{reason}; PyTorch's operators do its work on the GPU, many times slower", stacklevel=2)
        return _torch(reason)
    capability = capability or torch.cuda.get_device_capability(device)
    store_here = partial(store.store, overlaps=capability >= HOPPER)
    stored = Choice("triton", "segments are affine, codebooks or raw", store_here)
    if unstored := tiles.unsupported_side(layout):
        reason = "there is no kernel that stores these {}: {}".format(*unstored)
        warn(f"{reason}; PyTorch's operators do that on the GPU, many times slower", stacklevel=2)
        stored = Choice("torch", reason, naive.store)
    if capability < HOPPER:
        decode = Choice("triton", f"the GPU is older than Hopper: {capability}", attend.attend)
    elif reason := gluon.unsupported(layout, ratio):
        warn(f"the portable kernel decodes, several times slower than the one for Hopper: {reason}", stacklevel=2)
        decode = Choice("triton", reason, attend.attend)
    else:
        step = gluon.step if stored.implementation == "triton" else None
        decode = Choice("gluon", "affine integers or codebooks on Hopper or later", gluon.attend, step)
    if capability < AMPERE:
        extend = Choice("triton", f"the GPU is older than Ampere: {capability}", attend.attend)
    elif reason := unpacked.unsupported(layout):
        extend = Choice("triton", reason, attend.attend)
    else:
        extend = Choice("unpacked", "torch has flash attention for heads of this size", unpacked.attend)
    return Ops(stored, decode, extend)


def _cpu(layout: PageLayout) -> Ops:
    try:
        from kvfold.ops import compiled
        from kvfold.ops.attend import numba as attend
        from kvfold.ops.store import numba as store
    except ImportError as error:
        return _torch(f"the kernels for CPUs need numba: pip install 'kvfold[cpu]' ({error})")
    if reason := compiled.unsupported(layout):
        return _torch(reason)
    kernel = partial(Choice, "numba", "segments are affine, codebooks or raw")
    extend = _torch("of several queries for each sequence PyTorch's matrix products are faster").extend
    return Ops(kernel(store.store), kernel(attend.attend), extend)


def _torch(reason: str) -> Ops:
    # decoding on a CPU makes many calls on small vectors, which inference mode makes cheaper
    store, attend = torch.inference_mode()(naive.store), torch.inference_mode()(blocked.attend)
    return Ops(Choice("torch", reason, store), Choice("torch", reason, attend), Choice("torch", reason, attend))
