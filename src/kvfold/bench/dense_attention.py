"""The baseline of decoding: attention of cuDNN or FlashAttention over dense 16-bit keys and values."""

import math
import re
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from kvfold.bench.cuda_graphs import Calls, copies
from kvfold.bench.kernel_cases import Case

BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention": SDPBackend.FLASH_ATTENTION}  # the fastest first


def dense_calls(case: Case, device: torch.device) -> dict[str, Calls]:
    """Calls of attention over dense keys and values in the shape of a case, per backend.

    - `decode`: cuDNN, or FlashAttention if cuDNN has no kernel.
    - `extend`: both, as far as they have a kernel. FlashAttention masks what a query must not see. cuDNN has no mask
      for this: each of its queries sees the average number of tokens.
    """
    shape = (case.batch, case.kv_heads, case.context, case.head_dim)
    q = torch.randn(case.batch, case.q_heads, case.new, case.head_dim, dtype=case.torch_dtype, device=device)
    states = [
        torch.randn(2, *shape, dtype=case.torch_dtype, device=device)
        for _ in range(copies(4 * math.prod(shape), device))
    ]
    mask = causal_lower_right(case.new, case.context) if case.new > 1 else None
    average = case.context - case.new // 2

    def attend(backend: SDPBackend, kv: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            if backend == SDPBackend.FLASH_ATTENTION:
                return scaled_dot_product_attention(q, kv[0], kv[1], attn_mask=mask, enable_gqa=True)
            return scaled_dot_product_attention(q, kv[0, :, :, :average], kv[1, :, :, :average], enable_gqa=True)

    calls: dict[str, Calls] = {}
    for name, backend in BACKENDS.items():
        if calls and case.op == "decode":
            break
        if _runs(partial(attend, backend, states[0])):
            calls[name] = [partial(attend, backend, kv) for kv in states]
    if not calls:
        raise ValueError(f"neither cuDNN nor FlashAttention has a kernel to compare with: {case}")
    return calls


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
