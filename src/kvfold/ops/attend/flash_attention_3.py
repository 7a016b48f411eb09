"""FlashAttention 3, as SGLang, vLLM or its authors package it. It is for Hopper.

Its causal mask ends with the last query and the last token, whatever their numbers. So it needs none of the shapes that
cuDNN is given.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

HOPPER = 9  # major compute capability
SGLANG, AUTHORS, VLLM = "sgl_kernel.flash_attn", "flash_attn_interface", "vllm.vllm_flash_attn"


class Library(NamedTuple):
    name: str
    module: Any

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention of q [n, q_heads, d] over k, v [1, kv_heads, tokens, d]: outputs, or `out`, and log-sum-exps [n,
        q_heads].

        `causal`: the last query reads all tokens, every other query one token less than the next.
        """
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        options: dict[str, Any] = {"softmax_scale": scale, "causal": causal, "return_softmax_lse": True}
        if self.name == VLLM:  # it takes sequences one after the other, and where each begins and ends
            options |= {"fa_version": 3, "out": out}
            for side, tokens in (("q", len(q)), ("k", k.shape[1])):
                ends = torch.arange(0, tokens + 1, tokens, dtype=torch.int32, device=q.device)
                options |= {f"cu_seqlens_{side}": ends, f"max_seqlen_{side}": tokens}
            outs, logs = self.module.flash_attn_varlen_func(q, k[0], v[0], **options)
            return outs, logs.T
        if self.name == SGLANG:
            options["out"] = None if out is None else out.unsqueeze(0)
        outs, logs, *_ = self.module.flash_attn_with_kvcache(q.unsqueeze(0), k, v, **options)
        if self.name == AUTHORS and out is not None:  # it has no argument for that
            out.copy_(outs[0])
        return outs[0], logs[0].T


def find(capability: tuple[int, int]) -> Library | None:
    """What is installed for a GPU of this compute capability, if anything is."""
    return next(_installed(), None) if capability[0] == HOPPER else None


def _installed() -> Iterator[Library]:
    for name in (SGLANG, AUTHORS):
        with suppress(ImportError):
            yield Library(name, import_module(name))
    if "vllm" in sys.modules:  # only there: importing vLLM changes settings of torch
        with suppress(ImportError):
            module = import_module(VLLM)
            if module.is_fa_version_supported(3):
                yield Library(VLLM, module)
