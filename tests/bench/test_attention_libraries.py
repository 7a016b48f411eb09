"""The libraries that attention is compared with, as their documentation describes them: they need a GPU themselves."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.bench import attention_libraries
from kvfold.bench.attention_libraries import FP8, library_calls, missing
from kvfold.bench.kernel_cases import Case

CPU = torch.device("cpu")
SMALL = {"page": 16, "head_dim": 64, "q_heads": 4, "kv_heads": 2}
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
pytestmark = [no_gpu, pytest.mark.filterwarnings("ignore:cuDNN is left out")]


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """One sequence: q [new, q_heads, d], k and v [tokens, kv_heads, d]. With `causal`, the last query sees all."""
    q, k, v = (x.double() for x in (q, k, v))
    out = torch.empty_like(q)
    for i, head in ((i, head) for i in range(len(q)) for head in range(q.shape[1])):
        seen, kv_head = len(k) - len(q) + i + 1 if causal else len(k), head * k.shape[1] // q.shape[1]
        weights = (k[:seen, kv_head] @ q[i, head] / q.shape[2] ** 0.5).softmax(0)
        out[i, head] = weights @ v[:seen, kv_head]
    return out


def flash_attn(reads_fp8: bool, wrong: float = 1.0) -> Any:
    """flash_attn and flash_attn_interface: q [batch, new, q_heads, d], caches [batch, tokens, kv_heads, d]."""

    def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, causal: bool = False) -> Tensor:
        assert q.dtype == k_cache.dtype == v_cache.dtype
        assert q.dtype in (torch.bfloat16, torch.float16, *([FP8] if reads_fp8 else []))
        assert k_cache.stride(-1) == v_cache.stride(-1) == 1
        rows = zip(q, k_cache, v_cache, strict=True)
        return wrong * torch.stack([attention(*row, causal) for row in rows]).bfloat16()

    return SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts modules in the place of all libraries outside of PyTorch; those without a module cannot be imported."""

    def put(**modules: Any) -> None:
        attention_libraries._module.cache_clear()
        for name in ("flash_attn", "flash_attn_interface", "sgl_kernel", "sgl_kernel.flash_attn"):
            monkeypatch.setitem(sys.modules, name, modules.get(name))

    yield put
    attention_libraries._module.cache_clear()


ALL = {
    "flash_attn": flash_attn(False),
    "flash_attn_interface": flash_attn(True),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize(("op", "text"), [("decode", "2x50"), ("decode", "1x48"), ("extend", "2x28+9")])
def test_all_libraries_attend_to_the_same(
    monkeypatch: pytest.MonkeyPatch, install: Any, op: str, text: str, dtype: torch.dtype
):
    made, random = [], torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: made.append(random(*shape, **options)) or made[-1])
    install(**ALL)
    case = Case.parse(op, text, **SMALL)
    calls = library_calls(case, CPU, dtype)
    sixteen = [] if dtype == FP8 else ["FlashAttention", "FlashAttention 2"]
    assert list(calls) == [*sixteen, "FlashAttention 3"]
    q, *states = made
    for number, kv in enumerate(states):
        k, v = kv.transpose(2, 3)  # [batch, tokens, kv_heads, d]
        expected = torch.stack([attention(*row, True) for row in zip(q.transpose(1, 2), k, v, strict=True)])
        for own in calls.values():
            assert len(own) == len(states) == 2
            got = own[number]()
            assert isinstance(got, Tensor)
            error = (got.double().reshape(expected.shape) - expected).norm() / expected.norm()
            assert error < (0.01 if dtype == torch.bfloat16 else 0.1)


def test_what_is_not_installed_is_named_and_left_out(install: Any):
    install()
    assert missing() == ["FlashAttention 2", "FlashAttention 3"]
    assert list(library_calls(Case.parse("decode", "1x20", **SMALL), CPU, torch.bfloat16)) == ["FlashAttention"]
    assert not library_calls(Case.parse("decode", "1x20", **SMALL), CPU, FP8)
    install(**{"sgl_kernel": SimpleNamespace(), "sgl_kernel.flash_attn": flash_attn(True)})
    assert missing() == ["FlashAttention 2"]
    assert list(library_calls(Case.parse("decode", "1x20", **SMALL), CPU, FP8)) == ["FlashAttention 3"]


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (flash_attn(False, wrong=1.1), "FlashAttention 2 is left out: it is wrong by 0."),
        (SimpleNamespace(), "FlashAttention 2 is left out: .* no attribute 'flash_attn_with_kvcache'"),
    ],
)
def test_a_library_that_is_wrong_or_fails_is_left_out(install: Any, module: Any, reason: str):
    install(flash_attn=module)
    with pytest.warns(UserWarning, match=reason):
        calls = library_calls(Case.parse("decode", "1x20", **SMALL), CPU, torch.bfloat16)
    assert list(calls) == ["FlashAttention"]


def test_without_a_mask_a_library_is_wrong(install: Any):
    causal = flash_attn(False).flash_attn_with_kvcache
    install(flash_attn=SimpleNamespace(flash_attn_with_kvcache=lambda *inputs, **_: causal(*inputs)))
    with pytest.warns(UserWarning, match="FlashAttention 2 is left out: it is wrong by"):
        library_calls(Case.parse("extend", "1x20+9", **SMALL), CPU, torch.bfloat16)
