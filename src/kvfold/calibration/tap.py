"""Taps: the inputs and the output of each packed layer's attention, seen while the model runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from kvfold.geometry import Geometry, UnsupportedModel
from kvfold.ops.pages import Logits
from kvfold.unpacked_attention import attend_unpacked, logits_of

IMPLEMENTATION = "kvfold-capture"


@dataclass(frozen=True)
class Seen:
    """One call of one layer's attention. The tokens of all sequences of the batch follow each other."""

    layer: int
    q: Tensor  # [tokens, q_heads, d], after RoPE
    k: Tensor  # [tokens, kv_heads, d], after RoPE
    v: Tensor  # [tokens, kv_heads, d]
    out: Tensor  # [tokens, q_heads, d], before the output projection
    logits: Logits


class _Tap(NamedTuple):
    layers: tuple[int, ...]
    call: Callable[[Seen], None]


_tap: ContextVar[_Tap] = ContextVar("kvfold-capture")


@contextmanager
def tapped(model: PreTrainedModel, tap: Callable[[Seen], None]) -> Iterator[PreTrainedModel]:
    """The decoder of `model`, which calls `tap` at every layer that would be packed. It computes the same as ever."""
    token = _tap.set(_Tap(Geometry.from_config(model.config.to_dict()).packed, tap))
    try:
        with attending(model, IMPLEMENTATION) as decoder:
            yield decoder
    finally:
        _tap.reset(token)


@contextmanager
def attending(model: PreTrainedModel, implementation: str) -> Iterator[PreTrainedModel]:
    """The decoder of `model`, with another implementation of attention."""
    decoder = model.get_decoder()
    previous = decoder.config._attn_implementation
    try:
        decoder.set_attn_implementation(implementation)
        if decoder.config._attn_implementation != implementation:
            raise UnsupportedModel(f"{type(model).__name__} does not let its attention be replaced")
        yield decoder
    finally:
        decoder.set_attn_implementation(previous)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    out = attend_unpacked(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    tap = _tap.get()
    layer: int = module.layer_idx  # type: ignore[assignment]
    if layer in tap.layers:
        q, k, v = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
        tap.call(Seen(layer, q, k, v, out.flatten(0, 1), logits_of(query, scaling, kwargs)))
    return out, None


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
