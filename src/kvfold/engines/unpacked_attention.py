"""Attention over keys and values that are not packed: of layers with transformers' own cache, and in calibration."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvfold.ops.dense import by_head, log_weights
from kvfold.ops.pages import Logits


def logits_of(query: Tensor, scaling: float | None, kwargs: dict[str, Any]) -> Logits:
    """What the keyword arguments of an attention function say about logits."""
    sinks = kwargs.get("s_aux")
    return Logits(
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        kwargs.get("softcap"),
        None if sinks is None else sinks.detach().float(),
    )


def attend_unpacked(
    module: nn.Module,
    query: Tensor,  # [batch, q_heads, n, d]
    key: Tensor,  # [batch, kv_heads, tokens, d]
    value: Tensor,
    mask: Tensor | None,  # as for SDPA. None: causal, if the module is
    scaling: float | None = None,
    **kwargs: Any,
) -> Tensor:
    """[batch, n, q_heads, d of values]. SDPA refuses soft-caps and ignores learned sinks: plain PyTorch does these."""
    logits = logits_of(query, scaling, kwargs)
    if logits.cap is None and logits.sinks is None:
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)[0]
    n, tokens, kv_heads = query.shape[2], key.shape[2], key.shape[1]
    if mask is None:
        mask = torch.ones(n, tokens, dtype=torch.bool, device=query.device)
        mask = mask.tril(tokens - n) if getattr(module, "is_causal", True) else mask
    heads = []  # one after the other, since the weights of all heads may take much memory
    for head, own in enumerate(by_head(logits, kv_heads)):
        q = query.unflatten(1, (kv_heads, -1))[:, head]
        weights = log_weights(q, key[:, head], mask, own)[..., :tokens].exp()
        heads.append(weights @ value[:, head, None].float())
    return torch.cat(heads, dim=1).transpose(1, 2).to(query.dtype).contiguous()
