"""Attention weights over keys that are not packed, and how far distributions are apart."""

import torch
from torch import Tensor

from kvfold.ops.pages import Logits


def log_weights(q: Tensor, k: Tensor, mask: Tensor, logits: Logits) -> Tensor:
    """The logarithms of softmax weights of one KV head: q [..., group, n, d], k [..., tokens, d] -> float32[..., group,
    n, tokens]. If the head has learned sinks, they follow the tokens as one more column.

    `mask` [..., n, tokens] says which tokens a query reads, or holds numbers to add to logits. A query that reads no
    token gets finite weights.
    """
    return log_softmax(q.float() @ k.float().unsqueeze(-3).mT, mask, logits)


def log_softmax(products: Tensor, mask: Tensor, logits: Logits) -> Tensor:
    """The same from products q·k, float32[..., group, n, tokens]."""
    x = logits.scale * products
    if logits.cap is not None:
        x = logits.cap * torch.tanh(x / logits.cap)
    x = x.masked_fill(~mask, torch.finfo(x.dtype).min) if mask.dtype == torch.bool else x + mask
    if logits.sinks is not None:
        x = torch.cat((x, logits.sinks.view(-1, 1, 1).expand(*x.shape[:-1], 1)), dim=-1)
    return torch.log_softmax(x, dim=-1)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """The KL divergence of q from p, both the logarithms [..., n] of distributions: [...]"""
    return (p.exp() * (p - q)).sum(dim=-1)


def by_head(logits: Logits, kv_heads: int) -> list[Logits]:
    """The logits of each KV head."""
    if logits.sinks is None:
        return [logits] * kv_heads
    return [logits._replace(sinks=sinks) for sinks in logits.sinks.unflatten(0, (kv_heads, -1))]
