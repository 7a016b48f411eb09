"""Attention over keys and values that are not packed: of layers with transformers' own cache, and in calibration."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvfold.format.codec import Codec
from kvfold.format.open_block import raw_from
from kvfold.ops.dense import by_head, log_softmax, log_weights
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


def attend_masked(
    q: Tensor,  # [batch, q_heads, n, d]
    k: Tensor,  # [batch, kv_heads, n, d]
    v: Tensor,
    mask: Tensor,  # bool[batch, 1, n, n]
    logits: Logits,
    codecs: tuple[Codec | None, Codec | None],  # None: a side that is not packed
    block: int,
    raw_dtype: torch.dtype,
) -> Tensor:
    """What the queries of a first step get with any mask: float32[batch, n, q_heads, d of values].

    A mask may let queries read later tokens too, as those of an image are. These are read raw, as those of the open
    block are. Columns that no query reads are padding.
    """
    n, kv_heads = k.shape[2], k.shape[1]
    position = torch.arange(n, device=q.device) - (~mask.any(dim=2)).sum(dim=-1, keepdim=True)  # [batch, 1, n]
    t, j = position.unsqueeze(3), position.unsqueeze(2)
    near = j >= raw_from(t, block)  # [batch, 1, n, n]
    (packed_k, raw_k), (packed_v, raw_v) = (
        _decoded(codec, x, position, raw_dtype) for codec, x in zip(codecs, (k, v), strict=True)
    )
    heads = []
    for head, own in enumerate(by_head(logits, kv_heads)):
        queries = q.unflatten(1, (kv_heads, -1))[:, head].float()
        products = torch.where(near, queries @ raw_k[:, head, None].mT, queries @ packed_k[:, head, None].mT)
        weights = log_softmax(products, mask, own)[..., :n].exp()
        heads.append((weights * near) @ raw_v[:, head, None] + (weights * ~near) @ packed_v[:, head, None])
    return torch.cat(heads, dim=1).transpose(1, 2)


def _decoded(codec: Codec | None, x: Tensor, position: Tensor, raw_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Vectors [batch, heads, n, d] at positions [batch, 1, n] as they are read packed and raw, in float32."""
    if codec is None:
        return x.float(), x.float()
    tokens = x.transpose(1, 2).flatten(0, 1)
    raw = codec.transform.inverse(codec.transform.forward(tokens).to(raw_dtype).float())
    both = codec.read_packed(tokens, position.flatten()), raw
    packed, raw = (y.unflatten(0, (len(x), -1)).transpose(1, 2) for y in both)
    return packed, raw
