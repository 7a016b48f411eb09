"""FlashAttention 3, as SGLang or vLLM package it. It is for Hopper.

Its causal mask ends with the last query and the last token, whatever their numbers.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

from torch import Tensor

from kvfold.ops.cards import HOPPER

MANY_ROWS = 2**14  # queries times query heads: 128 for nearly every SM
SGLANG, VLLM = "sgl_kernel.flash_attn", "vllm.vllm_flash_attn"
PAGE = 128  # tokens: from this size on, it loads pages by TMA


class Ends(NamedTuple):
    """Where sequences begin and end that lie one after the other.

    `causal`: the last query of a sequence reads all of its tokens, every other query one token less than the next.
    """

    queries: Tensor  # int32[sequences + 1]
    tokens: Tensor  # int32[sequences + 1]
    most_queries: int  # of a sequence
    most_tokens: int
    causal: bool


class Paged(NamedTuple):
    """Causal sequences of queries that lie one after the other, and the pages of PAGE tokens that each of them reads.

    All that pages hold must be finite: what is behind the last token is multiplied by zero.
    """

    queries: Tensor  # int32[sequences + 1]
    most_queries: int  # of a sequence
    tokens: Tensor  # int32[sequences]
    most_tokens: int  # of a sequence
    table: Tensor  # int32[sequences, pages]


class Library(NamedTuple):
    name: str
    module: Any

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, reach: Ends | Paged, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention of q [n, q_heads, d] over k, v [tokens, kv_heads, d]: outputs, or `out`, and log-sum-exps [n,
        q_heads]. Every query reads at least one token."""
        options: dict[str, Any] = {"softmax_scale": scale, "out": out, "return_softmax_lse": True}
        if isinstance(reach, Paged):
            return self._attend_paged(q, k, v, options, reach)
        options["causal"] = reach.causal
        if len(reach.queries) == 2 and self.name != VLLM:  # one sequence: up to twice as fast without ends
            options["out"] = None if out is None else out.unsqueeze(0)
            batch = (x.unsqueeze(0) for x in (q, k, v))
            outs, logs, *_ = self.module.flash_attn_with_kvcache(*batch, **options)
            return outs[0], logs[0].T
        options |= {"cu_seqlens_q": reach.queries, "max_seqlen_q": reach.most_queries, "num_splits": _splits(q)}
        options |= {"cu_seqlens_k": reach.tokens, "max_seqlen_k": reach.most_tokens}
        if self.name == VLLM:
            options["fa_version"] = 3
        outs, logs, *_ = self.module.flash_attn_varlen_func(q, k, v, **options)
        return outs, logs.T

    def _attend_paged(
        self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], paged: Paged
    ) -> tuple[Tensor, Tensor]:
        k, v = (x.unflatten(0, (-1, PAGE)) for x in (k, v))
        options |= {"causal": True, "num_splits": _splits(q)}
        options |= {"cu_seqlens_q": paged.queries, "max_seqlen_q": paged.most_queries}
        if self.name == VLLM:
            options |= {"block_table": paged.table, "seqused_k": paged.tokens, "max_seqlen_k": paged.most_tokens}
            outs, logs, *_ = self.module.flash_attn_varlen_func(q, k, v, fa_version=3, **options)
        else:
            options |= {"page_table": paged.table, "cache_seqlens": paged.tokens}
            outs, logs, *_ = self.module.flash_attn_with_kvcache(q, k, v, **options)
        return outs, logs.T


def _splits(q: Tensor) -> int:
    """0: it chooses, by the longest sequence alone. Where all of them fill the GPU, splits would only take memory."""
    return 1 if q.shape[0] * q.shape[1] >= MANY_ROWS else 0


def find(capability: tuple[int, int]) -> Library | None:
    """What is installed for a GPU of this compute capability, if anything is."""
    return next(_installed(), None) if capability[0] == HOPPER[0] else None


def _installed() -> Iterator[Library]:
    with suppress(ImportError):
        yield Library(SGLANG, import_module(SGLANG))
    if "vllm" in sys.modules:  # only there: importing vLLM changes settings of torch
        with suppress(ImportError):
            module = import_module(VLLM)
            if module.is_fa_version_supported(3):
                yield Library(VLLM, module)
