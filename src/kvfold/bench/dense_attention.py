"""The baseline of decode steps: attention of cuDNN or FlashAttention over dense 16-bit keys and values."""

import re
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention": SDPBackend.FLASH_ATTENTION}  # the fastest first


def attend_dense(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """One query per sequence, q [sequences, q_heads, 1, d], over k, v [sequences, kv_heads, tokens, d]."""
    if k.shape[2] == 1:  # cuDNN has no kernel for a single token; its value is the output
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    with sdpa_kernel(BACKENDS[dense_backend(q.shape[1], k.shape[1], q.shape[3], q.dtype, q.device)]):
        return scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)


@lru_cache
def dense_backend(q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> str:
    """The first of `BACKENDS` that has a kernel for one query per sequence."""
    q, k = (
        torch.zeros(1, heads, n, head_dim, dtype=dtype, device=device) for heads, n in ((q_heads, 1), (kv_heads, 64))
    )
    for name, backend in BACKENDS.items():
        with sdpa_kernel(backend):
            if _runs(partial(scaled_dot_product_attention, q, k, k, enable_gqa=True)):
                return name
    raise ValueError(f"neither cuDNN nor FlashAttention has a kernel for {q_heads} and {kv_heads} heads of {head_dim}")


def _runs(call: Callable[[], object]) -> bool:
    """Whether a call of attention finds a kernel."""
    try:
        call()
    except RuntimeError as error:
        if not re.search("No available kernel|No viable backend", str(error)):
            raise
        return False
    return True
