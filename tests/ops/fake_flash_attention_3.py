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

    With `causal`, the last query reads the last token, the query before it ends one token earlier, and so on. A query
    that reads none gets NaN, since nobody may use it.
    """
    assert q.dtype == k.dtype == v.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    logits = scale * torch.einsum("nhd,jhd->hnj", q.double(), k)
    if causal:
        last = torch.arange(len(k) - len(q), len(k), device=k.device).unsqueeze(1)
        logits = logits.masked_fill(torch.arange(len(k), device=k.device) > last, -math.inf)
    return torch.einsum("hnj,jhd->nhd", logits.softmax(-1), v).to(q.dtype), logits.logsumexp(-1).float()


def _written(outs: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return outs
    assert (out.dtype, out.shape, out.stride(-1)) == (outs.dtype, outs.shape, 1)
    return out.copy_(outs)


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    num_splits: int,
) -> tuple[Tensor, Tensor]:
    """Sequences one after the other, [tokens, heads, d]: outputs, and log-sum-exps [heads, tokens].

    Nothing may lie behind the last sequence: FlashAttention 3 multiplies by zero what its last tile holds of that, and
    NaN stays NaN.
    """
    assert num_splits in (0, 1)
    sizes = []
    for ends, most, x in ((cu_seqlens_q, max_seqlen_q, q), (cu_seqlens_k, max_seqlen_k, k)):
        sizes.append(ends.diff().tolist())
        assert (ends.dtype, int(ends[0]), int(ends[-1]), max(sizes[-1])) == (torch.int32, 0, len(x), most)
    split = (x.split(sizes[i]) for x, i in ((q, 0), (k, 1), (v, 1)))
    parts = [attention(*each, softmax_scale, causal) for each in zip(*split, strict=True)]
    return torch.cat([outs for outs, _ in parts]), torch.cat([logs for _, logs in parts], dim=1)


def authors_kvcache(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, return_softmax_lse: bool
) -> tuple[Tensor, Tensor]:
    """Of flash_attn_interface: batches [sequences, tokens, heads, d], log-sum-exps [sequences, heads, tokens]."""
    assert return_softmax_lse
    parts = (attention(*x, softmax_scale, causal) for x in zip(q, k, v, strict=True))
    outs, logs = (torch.stack(x) for x in zip(*parts, strict=True))
    return outs, logs


def sglang_kvcache(*args: Tensor, out: Tensor | None = None, **options: Any) -> Any:
    """Of sgl_kernel: it takes `out`, and returns more than it is asked for."""
    outs, logs = authors_kvcache(*args, **options)
    return _written(outs, out), logs, torch.empty(0), torch.empty(0)


def authors_varlen(*args: Tensor, return_attn_probs: bool = False, **options: Any) -> Any:
    """Of flash_attn_interface."""
    outs, logs = varlen(*args, **options)
    return (outs, logs) if return_attn_probs else outs


def sglang_varlen(*args: Tensor, out: Tensor | None = None, return_softmax_lse: bool = False, **options: Any) -> Any:
    """Of sgl_kernel: it takes `out`, and returns more than it is asked for."""
    outs, logs = varlen(*args, **options)
    outs = _written(outs, out)
    return (outs, logs, torch.empty(0), torch.empty(0)) if return_softmax_lse else outs


def vllm_varlen(*args: Tensor, fa_version: int = 2, **options: Any) -> Any:
    """Of vLLM, which has other versions too."""
    assert fa_version == 3
    return sglang_varlen(*args, **options)[:2]


MODULES = {
    SGLANG: SimpleNamespace(flash_attn_varlen_func=sglang_varlen, flash_attn_with_kvcache=sglang_kvcache),
    AUTHORS: SimpleNamespace(flash_attn_varlen_func=authors_varlen, flash_attn_with_kvcache=authors_kvcache),
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
