"""Which implementation of each op a layer gets, and why."""

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, NamedTuple
from warnings import warn

import torch
from torch import Tensor

from kvfold.format.layout import PageLayout
from kvfold.ops import naive
from kvfold.ops.attend import attend_torch
from kvfold.ops.cards import Card, card_of
from kvfold.ops.pages import LayerPages, Logits

New = tuple[Tensor, Tensor] | None
AMPERE = (8, 0)  # compute capability: the first with kernels
OLD_TRITON = (ImportError, AttributeError)  # raised by importing kernels if Triton is too old or missing


class Choice(NamedTuple):
    implementation: str
    reason: str
    run: Callable[..., Any]
    read: Callable[..., Tensor] | None = None  # `run` where it may not overlap with what was launched before
    queries: int = 1  # of a sequence, at most, if it decodes


class Ops(NamedTuple):
    """`decode` is `attend` for steps with one query per sequence, or as few as it takes, `extend` for all others."""

    store: Choice
    decode: Choice
    extend: Choice

    def store_and_attend(
        self, pages: LayerPages, q: Tensor, k: Tensor, v: Tensor, logits: Logits, out: Tensor | None = None
    ) -> Tensor:
        """Pack k and v [tokens, kv_heads, d], then attend the queries [tokens, q_heads, d]. Outputs have the shape of
        the queries, float32 or in `out`."""
        return self.attend(pages, q, self.store.run(pages, k, v), logits, out)

    def attend(self, pages: LayerPages, q: Tensor, new: New, logits: Logits, out: Tensor | None = None) -> Tensor:
        """Let the queries [tokens, q_heads, d] read, right after `store`, which returned `new`."""
        return self._attention(pages).run(pages, q, new, logits, out)

    def read(self, pages: LayerPages, q: Tensor, new: New, logits: Logits, out: Tensor | None = None) -> Tensor:
        """`attend` at any time after `store`: for a layer that reads the pages of another one."""
        choice = self._attention(pages)
        return (choice.read or choice.run)(pages, q, new, logits, out)

    def _attention(self, pages: LayerPages) -> Choice:
        return self.decode if 1 <= pages.step.max_queries <= self.decode.queries else self.extend


@lru_cache
def choose(
    layout: PageLayout,
    ratio: int,
    device: torch.device,
    capability: tuple[int, int] | None = None,
    cap: bool = False,
) -> Ops:
    """The ops for pages of this layout, with `ratio` query heads per KV head, on this device. `capability` overrides
    that of the device, to ask about another GPU, or to run what it would. `cap`: whether logits have a soft-cap."""
    if device.type == "cpu":
        return _cpu(layout)
    if device.type != "cuda":
        return _torch(f"there are kernels for GPUs and CPUs, and the cache is on {device.type}")
    if torch.version.hip:
        raise ValueError(
            f"kvfold has kernels for NVIDIA's GPUs, and this torch is built for AMD's (ROCm {torch.version.hip}): run "
            "the model on the CPU, or on a GPU of NVIDIA"
        )
    own = capability or torch.cuda.get_device_capability(device)
    if own < AMPERE:
        name = "the GPU" if capability else torch.cuda.get_device_name(device)
        return _slow(
            "{} has compute capability {}.{}, and the kernels need 8.0, which Ampere has, or a later one".format(
                name, *own
            )
        )
    try:
        from kvfold.ops import tiles
        from kvfold.ops.attend import attend_gpu as attend
        from kvfold.ops.attend import flash_attention_3
        from kvfold.ops.attend import unpacked_prefill as unpacked
        from kvfold.ops.store import store_gpu as store
    except OLD_TRITON as error:
        return _slow(
            f"the kernels for GPUs need Triton 3.5 or newer, which torch 2.9 has: pip install -U torch ({error})"
        )
    if reason := tiles.unreadable(layout):
        return _slow(reason)
    card = card_of(own)
    stored = Choice("triton", "segments are affine, even, codebooks or raw", partial(store.store, card))
    if unstored := tiles.unsupported_side(layout):
        reason = "there is no kernel that stores these {}: {}".format(*unstored)
        warn(f"{reason}; PyTorch's operators do that on the GPU, many times slower", stacklevel=2)
        stored = Choice("torch", reason, naive.store)
    if reason := "flash attention has no soft-cap" if cap else unpacked.unsupported(layout):
        extend = Choice("triton", reason, attend.attend)
    else:
        library = flash_attention_3.find(own)
        extend = Choice(
            "unpacked",
            f"unpacked tokens are read by {f'FlashAttention 3 of {library.name}' if library else 'attention of torch'}",
            partial(unpacked.attend, library=library),
        )
    return Ops(stored, _decode(layout, ratio, card, cap, attend.attend), extend)


def check_dtype(ops: Iterable[Ops], dtype: torch.dtype) -> None:
    """Refuse a model at load time if the kernels cannot store its keys and values."""
    if dtype not in (torch.bfloat16, torch.float16) and any(each.store.implementation == "triton" for each in ops):
        raise ValueError(
            f"the kernels for GPUs store keys and values in bfloat16 or float16, and the model is in {dtype}: load it "
            "with dtype=torch.bfloat16, or start the server with --dtype bfloat16"
        )


def _decode(layout: PageLayout, ratio: int, card: Card, cap: bool, portable: Callable[..., Tensor]) -> Choice:
    """The decode op on NVIDIA's GPUs since Ampere."""
    try:
        from kvfold.ops.attend.gluon import decode_step as gluon
    except OLD_TRITON as error:
        reason: str | None = f"that needs Triton 3.6 or newer, which torch 2.10 has: pip install -U torch ({error})"
    else:
        reason = "logits have a soft-cap" if cap else gluon.unsupported(layout, ratio)
    if reason:
        warn(f"the portable kernel decodes, several times slower than the fast one: {reason}", stacklevel=3)
        return Choice("triton", reason, portable)
    run, read = partial(gluon.attend, card), partial(gluon.attend, card, stored=False)
    return Choice("gluon", "integers, evenly spaced levels or codebooks", run, read, gluon.QUERIES)


def _cpu(layout: PageLayout) -> Ops:
    try:
        from kvfold.ops import cpu
        from kvfold.ops.attend import decode_cpu as attend
        from kvfold.ops.store import store_cpu as store
    except ImportError as error:
        return _torch(f"the kernels for CPUs need numba: pip install 'kvfold[cpu]' ({error})")
    if reason := cpu.unsupported(layout):
        return _torch(reason)
    kernel = partial(Choice, "numba", "segments are affine, even, codebooks or raw")
    extend = _torch("for several queries per sequence, PyTorch's matrix products are faster").extend
    return Ops(kernel(store.store), kernel(attend.attend), extend)


def _slow(reason: str) -> Ops:
    warn(f"{reason}; PyTorch's operators do its work on the GPU, many times slower", stacklevel=3)
    return _torch(reason)


def _torch(reason: str) -> Ops:
    # decoding on a CPU makes many calls on small vectors; inference mode makes them cheaper
    store, attend = torch.inference_mode()(naive.store), torch.inference_mode()(attend_torch.attend)
    return Ops(Choice("torch", reason, store), Choice("torch", reason, attend), Choice("torch", reason, attend))
