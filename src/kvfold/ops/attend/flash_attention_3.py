"""FlashAttention 3, as SGLang, vLLM or its authors package it. It is for Hopper.

Its causal mask ends with the last query and the last token, whatever their numbers. So it needs none of the shapes that
cuDNN is given.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple

from torch import Tensor

from kvfold.ops.cards import HOPPER

MANY_ROWS = 2**14  # queries times query heads: 128 for nearly every SM
SGLANG, AUTHORS, VLLM = "sgl_kernel.flash_attn", "flash_attn_interface", "vllm.vllm_flash_attn"


class Ends(NamedTuple):
    """Where sequences begin and end that lie one after the other."""

    queries: Tensor  # int32[sequences + 1]
    tokens: Tensor  # int32[sequences + 1]
    most_queries: int  # of a sequence
    most_tokens: int


class Library(NamedTuple):
    name: str
    module: Any

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, ends: Ends, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention of q [n, q_heads, d] over k, v [tokens, kv_heads, d]: outputs, or `out`, and log-sum-exps [n,
        q_heads].

        `causal`: the last query of a sequence reads all of its tokens, every other query one token less than the next.
        A query that reads none has an output that means nothing.
        """
        options: dict[str, Any] = {"softmax_scale": scale, "causal": causal}
        if len(ends.queries) == 2 and self.name != VLLM:  # one sequence: up to twice as fast without ends
            return self._attend_alone(q, k, v, options, out)
        # 0: it chooses, by the longest sequence alone. Where all of them fill the GPU, splits would only take memory.
        options["num_splits"] = 1 if q.shape[0] * q.shape[1] >= MANY_ROWS else 0
        options |= {"cu_seqlens_q": ends.queries, "max_seqlen_q": ends.most_queries}
        options |= {"cu_seqlens_k": ends.tokens, "max_seqlen_k": ends.most_tokens}
        if self.name == AUTHORS:
            outs, logs = self.module.flash_attn_varlen_func(q, k, v, return_attn_probs=True, **options)
            return outs if out is None else out.copy_(outs), logs.T  # it has no argument for `out`
        if self.name == VLLM:
            options["fa_version"] = 3
        outs, logs, *_ = self.module.flash_attn_varlen_func(q, k, v, return_softmax_lse=True, out=out, **options)
        return outs, logs.T

    def _attend_alone(
        self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if self.name == SGLANG:
            options["out"] = None if out is None else out.unsqueeze(0)
        batch = (x.unsqueeze(0) for x in (q, k, v))
        outs, logs, *_ = self.module.flash_attn_with_kvcache(*batch, return_softmax_lse=True, **options)
        if self.name == AUTHORS and out is not None:
            out.copy_(outs[0])
        return outs[0], logs[0].T


def find(capability: tuple[int, int]) -> Library | None:
    """What is installed for a GPU of this compute capability, if anything is."""
    return next(_installed(), None) if capability[0] == HOPPER[0] else None


def _installed() -> Iterator[Library]:
    with suppress(ImportError):
        yield Library(SGLANG, import_module(SGLANG))
    with suppress(ImportError):
        module = import_module(AUTHORS)
        if "return_attn_probs" in signature(module.flash_attn_varlen_func).parameters:  # old versions lack it
            yield Library(AUTHORS, module)
    if "vllm" in sys.modules:  # only there: importing vLLM changes settings of torch
        with suppress(ImportError):
            module = import_module(VLLM)
            if module.is_fa_version_supported(3):
                yield Library(VLLM, module)
