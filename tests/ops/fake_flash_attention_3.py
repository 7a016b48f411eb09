"""Stands in for FlashAttention 3, which needs a GPU: the functions that its two packages have, with the arguments
that are used here, computed in float64."""

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.ops.attend.flash_attention_3 import SGLANG, VLLM, Library


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


def paged(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, most: int, tokens: Tensor, table: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Sequences of queries one after the other, over pages [pages, tokens, kv_heads, d] that a table names.

    What a page holds behind the tokens that are read is multiplied by zero, and NaN stays NaN.
    """
    assert (ends.dtype, tokens.dtype, table.dtype) == (torch.int32,) * 3
    assert (int(ends[0]), int(ends[-1]), int(ends.diff().max())) == (0, len(q), most)
    parts = []
    for own, count, pages in zip(q.split(ends.diff().tolist()), tokens.tolist(), table.long(), strict=True):
        held = pages[: -(-count // k.shape[1])]
        assert k[held].isfinite().all()
        assert v[held].isfinite().all()
        parts.append(attention(own, *(x[held].flatten(0, 1)[:count] for x in (k, v)), scale, causal))
    return torch.cat([outs for outs, _ in parts]), torch.cat([logs for _, logs in parts], dim=1)


def sglang_kvcache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    causal: bool,
    return_softmax_lse: bool,
    out: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 0,
    page_table: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    num_splits: int = 0,
) -> Any:
    """Of sgl_kernel: batches [sequences, tokens, heads, d] and log-sum-exps [sequences, heads, tokens], or with a page
    table sequences one after the other and [heads, tokens]. It returns more than it is asked for."""
    assert return_softmax_lse
    assert num_splits in (0, 1)
    if page_table is not None:
        options = cu_seqlens_q, max_seqlen_q, cache_seqlens, page_table, softmax_scale, causal
        outs, logs = paged(q, k, v, *options)
    else:
        parts = (attention(*x, softmax_scale, causal) for x in zip(q, k, v, strict=True))
        outs, logs = (torch.stack(x) for x in zip(*parts, strict=True))
    return _written(outs, out), logs, torch.empty(0), torch.empty(0)


def sglang_varlen(*args: Tensor, out: Tensor | None = None, return_softmax_lse: bool = False, **options: Any) -> Any:
    """Of sgl_kernel: it takes `out`, and returns more than it is asked for."""
    outs, logs = varlen(*args, **options)
    outs = _written(outs, out)
    return (outs, logs, torch.empty(0), torch.empty(0)) if return_softmax_lse else outs


def vllm_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fa_version: int = 2,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    **options: Any,
) -> Any:
    """Of vLLM, which has other versions too."""
    assert fa_version == 3
    if block_table is None:
        return sglang_varlen(q, k, v, **options)[:2]
    assert options["max_seqlen_k"] == int(seqused_k.max())
    given = options["cu_seqlens_q"], options["max_seqlen_q"], seqused_k, block_table
    outs, logs = paged(q, k, v, *given, options["softmax_scale"], options["causal"])
    return _written(outs, options["out"]), logs


MODULES = {
    SGLANG: SimpleNamespace(flash_attn_varlen_func=sglang_varlen, flash_attn_with_kvcache=sglang_kvcache),
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
