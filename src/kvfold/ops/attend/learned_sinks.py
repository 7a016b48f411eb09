"""Learned sinks (`Logits.sinks`) as one more part of attention over transformed keys and values."""

import torch
from torch import Tensor

from kvfold.ops.pages import LayerPages, Logits
from kvfold.transforms import Transform


def sink_part(pages: LayerPages, q: Tensor, logits: Logits) -> tuple[Tensor, Tensor]:
    """The part of queries [..., q_heads, d]: outputs [..., q_heads, d] and logits [..., q_heads], float32.

    Logits over centred keys lack scale·q·mean. So the logits of sinks have to lack it too. With a soft-cap, no logit
    lacks it.
    """
    assert logits.sinks is not None
    values, lacking = sink_values(pages), None if logits.cap else logits.of_mean(pages.key.transform, q)
    weight = logits.sinks.float().expand(q.shape[:-1])
    out = values.repeat_interleave(q.shape[-2] // len(values), dim=0)
    return out.expand(*q.shape[:-1], -1), weight.clone() if lacking is None else weight - lacking


def sink_values(pages: LayerPages) -> Tensor:
    """What zero is among transformed values: float32[kv_heads, d]."""
    return pages.value.transform.once(_zero, pages.pool.shape[1], pages.layout.value.dims, pages.pool.device)


def _zero(transform: Transform, kv_heads: int, dims: int, device: torch.device) -> Tensor:
    return transform.forward(torch.zeros(kv_heads, dims, device=device))
