"""Stands in for FlashAttention 3, which needs a GPU: the functions that its three packages have, with the arguments
that are used here, computed in float64."""

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.ops.attend.flash_attention_3 import AUTHORS, SGLANG, VLLM, Library


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Of q [n, q_heads, d] over k, v [tokens, kv_heads, d]: outputs in the dtype of q, log-sum-exps [q_heads, n].

    With `causal`, the last query reads the last token, the query before it ends one token earlier, and so on.
    """
    assert q.dtype == k.dtype == v.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    logits = scale * torch.einsum("nhd,jhd->hnj", q.double(), k)
    if causal:
        last = torch.arange(len(k) - len(q), len(k)).unsqueeze(1)
        logits = logits.masked_fill(torch.arange(len(k)) > last, -math.inf)
    return torch.einsum("hnj,jhd->nhd", logits.softmax(-1), v).to(q.dtype), logits.logsumexp(-1).float()


def _written(outs: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return outs
    assert (out.dtype, out.shape, out.stride(-1)) == (outs.dtype, outs.shape, 1)
    return out.copy_(outs)


def authors_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_softmax_lse: bool = False,
) -> Any:
    """Of flash_attn_interface: batches [sequences, tokens, heads, d], log-sum-exps [sequences, heads, tokens]."""
    assert softmax_scale is not None
    parts = (attention(*x, softmax_scale, causal) for x in zip(q, k_cache, v_cache, strict=True))
    outs, logs = (torch.stack(x) for x in zip(*parts, strict=True))
    return (outs, logs) if return_softmax_lse else outs


def sglang_kvcache(*args: Tensor, out: Tensor | None = None, **options: Any) -> Any:
    """Of sgl_kernel: it takes `out`, and returns more than it is asked for."""
    outs, logs = authors_kvcache(*args, **options)
    return _written(outs, out), logs, torch.empty(0), torch.empty(0)


def vllm_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    fa_version: int = 2,
) -> Any:
    """Of vLLM: sequences one after the other, [tokens, heads, d], log-sum-exps [heads, tokens]."""
    assert (fa_version, return_softmax_lse) == (3, True)
    assert cu_seqlens_k is not None
    assert softmax_scale is not None
    for ends, most, x in ((cu_seqlens_q, max_seqlen_q, q), (cu_seqlens_k, max_seqlen_k, k)):
        assert (ends.dtype, ends.tolist(), most) == (torch.int32, [0, len(x)], len(x))
    outs, logs = attention(q, k, v, softmax_scale, causal)
    return _written(outs, out), logs


MODULES = {
    SGLANG: SimpleNamespace(flash_attn_with_kvcache=sglang_kvcache),
    AUTHORS: SimpleNamespace(flash_attn_with_kvcache=authors_kvcache),
    VLLM: SimpleNamespace(flash_attn_varlen_func=vllm_varlen, is_fa_version_supported=lambda version: version == 3),
}
LIBRARIES = [Library(name, module) for name, module in MODULES.items()]


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let these packages be installed, and no others."""
    for name, module in MODULES.items():
        package = name.partition(".")[0]
        monkeypatch.setitem(sys.modules, name, module if name in names else None)
        if name in names and package != name:
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
