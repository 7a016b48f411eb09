"""What `kvfold bench kernels` compares attention with: cuDNN and FlashAttention, over dense keys and values in 16
bits or in FP8. A library that gives wrong results is left out."""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple
from warnings import warn

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from kvfold.bench.cuda_graphs import Calls, copies
from kvfold.bench.expected_ops import relative_error
from kvfold.bench.kernel_cases import Case
from kvfold.ops.attend.flash_attention_3 import SGLANG

FP8 = torch.float8_e4m3fn
ALLOWED, ALLOWED_FP8 = 0.02, 0.2  # relative errors; FP8 rounds queries, keys, values and weights by up to 6 % each

Call = Callable[[], Tensor]  # returns [batch, new, q_heads, d], or the same numbers in another shape


class Library(NamedTuple):
    """`bind` gets the imported module, the case, queries [batch, q_heads, new, d] and the dtype of the cache. From it
    comes a function from keys and values [2, batch, kv_heads, context, d] to a call."""

    modules: tuple[str, ...]  # the first that can be imported
    bind: Callable[[Any, Case, Tensor, torch.dtype], Callable[[Tensor], Call]]
    reads_fp8: bool


def _cudnn(_: Any, case: Case, q: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Call]:
    """cuDNN's mask is for whole sequences. Later queries have none: each sees the average number of tokens."""
    whole = case.new == case.context > 1
    seen = case.context if whole else case.context - case.new // 2
    attend = partial(_sdpa, SDPBackend.CUDNN_ATTENTION, q, causal=whole)
    return lambda kv: partial(attend, kv[0, :, :, :seen], kv[1, :, :, :seen])


def _torch_flash(_: Any, case: Case, q: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Call]:
    mask = causal_lower_right(case.new, case.context) if case.new > 1 else None
    return lambda kv: partial(_sdpa, SDPBackend.FLASH_ATTENTION, q, kv[0], kv[1], mask)


def _sdpa(
    backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2)


def _flash_attn(module: Any, case: Case, q: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Call]:
    queries = q.transpose(1, 2).to(dtype)  # in FP8, queries have the dtype of keys

    def call(kv: Tensor) -> Call:
        k, v = kv.to(dtype).transpose(2, 3)
        return partial(module.flash_attn_with_kvcache, queries, k, v, causal=True)

    return call


LIBRARIES = {
    "cuDNN": Library(("torch",), _cudnn, False),
    "FlashAttention": Library(("torch",), _torch_flash, False),  # PyTorch's own copy
    "FlashAttention 2": Library(("flash_attn",), _flash_attn, False),
    "FlashAttention 3": Library(("flash_attn_interface", SGLANG), _flash_attn, True),
}


def missing() -> list[str]:
    """The libraries that are not installed."""
    return [name for name, library in LIBRARIES.items() if _module(library.modules) is None]


def library_calls(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, Calls]:
    """Calls of attention over dense keys and values of `dtype` in the shape of a case, per library that can run it."""
    imported = {
        name: (library, module)
        for name, library in LIBRARIES.items()
        if (library.reads_fp8 or dtype != FP8) and (module := _module(library.modules)) is not None
    }
    if not imported:
        return {}
    shape = (2, case.batch, case.kv_heads, case.context, case.head_dim)
    q = torch.randn(case.batch, case.q_heads, case.new, case.head_dim, dtype=case.torch_dtype, device=device)
    count = copies(math.prod(shape) * dtype.itemsize, device)
    states = [torch.randn(shape, dtype=case.torch_dtype, device=device) for _ in range(count)]
    calls: dict[str, Calls] = {}
    for name, (library, module) in imported.items():
        try:
            bound = library.bind(module, case, q, dtype)
            own = [bound(kv) for kv in states]
            out = own[0]()
            if name != "cuDNN" or case.new in (1, case.context):
                _check(out, case, q, states[0], ALLOWED_FP8 if dtype == FP8 else ALLOWED)
        except Exception as error:  # of any library: no kernel for this shape or GPU, or a wrong result
            warn(f"{name} is left out: {' '.join(str(error).split())}", stacklevel=2)
        else:
            calls[name] = [*own]
    return calls


def _check(out: Tensor, case: Case, q: Tensor, kv: Tensor, allowed: float) -> None:
    """Refuse a library that is wrong. Compared are the first and the last query of the first sequence."""
    rows = [0, case.new - 1]
    k, v = kv[:, 0].float()  # [kv_heads, context, d]
    queries = q[0, :, rows].float().unflatten(0, (case.kv_heads, -1)).flatten(1, 2)  # [kv_heads, ratio·2, d]
    logits = (queries @ k.transpose(1, 2) * case.head_dim**-0.5).unflatten(1, (-1, 2))
    seen = torch.tensor([case.history + 1, case.context], device=q.device)
    hidden = torch.arange(case.context, device=q.device) >= seen[:, None]
    weights = logits.masked_fill(hidden, -math.inf).softmax(-1)  # [kv_heads, ratio, 2, context]
    expected = (weights @ v.unsqueeze(1)).flatten(0, 1).transpose(0, 1)  # [2, q_heads, d]
    got = out.reshape(case.batch, case.new, case.q_heads, case.head_dim)[0, rows].float()
    error = relative_error(got, expected)
    if not error <= allowed:
        raise ValueError(f"it is wrong by {error:.2g}")


@lru_cache
def _module(names: tuple[str, ...]) -> Any:
    """The first of these modules that can be imported, or None."""
    for name in names:
        with suppress(ImportError):
            return import_module(name)
    return None
