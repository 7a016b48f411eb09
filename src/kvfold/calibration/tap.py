"""Taps: the inputs and the output of each attention layer, seen while the model runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvfold.geometry import UnsupportedModel

IMPLEMENTATION = "kvfold-capture"


@dataclass(frozen=True)
class Seen:
    """One call of one attention layer. The tokens of all sequences of the batch follow each other.

    In multi-head latent attention (MLA), q and k are only the coordinates with RoPE. k has one head, which all query
    heads share. v and out are as attention has them, with a value head per query head.
    """

    layer: int
    q: Tensor  # [tokens, q_heads, d], after RoPE
    k: Tensor  # [tokens, kv_heads, d], after RoPE
    v: Tensor  # [tokens, kv_heads, d]
    out: Tensor  # [tokens, q_heads, d], before the output projection
    scale: float  # of the logits


_tap: ContextVar[Callable[[Seen], None]] = ContextVar("kvfold-capture")


@contextmanager
def tapped(model: PreTrainedModel, tap: Callable[[Seen], None]) -> Iterator[PreTrainedModel]:
    """The decoder of `model`, which calls `tap` at every attention layer. It computes the same as with SDPA."""
    decoder = model.get_decoder()
    previous = decoder.config._attn_implementation
    token = _tap.set(tap)
    try:
        decoder.set_attn_implementation(IMPLEMENTATION)
        if decoder.config._attn_implementation != IMPLEMENTATION:
            raise UnsupportedModel(f"{type(model).__name__} does not let its attention be replaced")
        yield decoder
    finally:
        decoder.set_attn_implementation(previous)
        _tap.reset(token)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    for unsupported in ("softcap", "s_aux"):  # SDPA refuses softcap and ignores s_aux
        if kwargs.get(unsupported) is not None:
            raise UnsupportedModel(f"{type(module).__name__}: attention with {unsupported} cannot be captured")
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if getattr(module, "kv_lora_rank", None):
        rope: int = module.qk_rope_head_dim  # type: ignore[assignment]
        query, key = query[..., -rope:], key[:, :1, :, -rope:]
    q, k, v = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    _tap.get()(Seen(module.layer_idx, q, k, v, out.flatten(0, 1), scale))  # type: ignore[arg-type]
    return out, None


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
