"""The libraries that attention is compared with, as their documentation describes them: they need a GPU themselves."""

import sys
from itertools import pairwise
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


class Wrapper:
    """FlashInfer's wrappers: pages [pages, kv_heads, page, d], and pages of a request between two entries of indptr."""

    def __init__(self, workspace: Tensor, kv_layout: str = "NHD", use_tensor_cores: bool = False):
        assert (kv_layout, workspace.dtype) == ("HND", torch.uint8)

    def plan_pages(self, indptr: Tensor, indices: Tensor, last: Tensor, shape: tuple[int, ...], **dtypes: Any) -> None:
        assert {x.dtype for x in (indptr, indices, last)} == {torch.int32}
        self.pages = [indices[a:b].tolist() for a, b in pairwise(indptr)]
        self.last, self.shape, self.dtypes = last.tolist(), shape, dtypes

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
        q_heads, kv_heads, head_dim, page = self.shape
        assert self.dtypes == {"q_data_type": q.dtype, "kv_data_type": kv[0].dtype}
        assert q.shape[1:] == (q_heads, head_dim)
        assert kv[0].shape[1:] == (kv_heads, page, head_dim)
        outs = []
        for (begin, end), pages, last in zip(self.queries, self.pages, self.last, strict=True):
            tokens = (len(pages) - 1) * page + last
            k, v = (side[pages].transpose(1, 2).flatten(0, 1)[:tokens] for side in kv)
            outs.append(attention(q[begin:end], k, v, self.causal))
        return torch.cat(outs).to(q.dtype)


class DecodeWrapper(Wrapper):
    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        shape = num_qo_heads, num_kv_heads, head_dim, page_size
        self.plan_pages(indptr, indices, last_page_len, shape, q_data_type=q_data_type, kv_data_type=kv_data_type)
        self.queries, self.causal = [(i, i + 1) for i in range(len(self.pages))], False


class PrefillWrapper(Wrapper):
    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        shape = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        pages = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self.plan_pages(*pages, shape, q_data_type=q_data_type, kv_data_type=kv_data_type)
        self.queries, self.causal = list(pairwise(qo_indptr.tolist())), causal


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts modules in the place of all libraries outside of PyTorch; those without a module cannot be imported."""
    monkeypatch.setattr(attention_libraries, "WORKSPACE", 16)

    def put(**modules: Any) -> None:
        attention_libraries._module.cache_clear()
        for name in ("flash_attn", "flash_attn_interface", "sgl_kernel", "sgl_kernel.flash_attn", "flashinfer"):
            monkeypatch.setitem(sys.modules, name, modules.get(name))

    yield put
    attention_libraries._module.cache_clear()


ALL = {
    "flash_attn": flash_attn(False),
    "flash_attn_interface": flash_attn(True),
    "flashinfer": SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=DecodeWrapper, BatchPrefillWithPagedKVCacheWrapper=PrefillWrapper
    ),
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
    assert list(calls) == [*sixteen, "FlashAttention 3", "FlashInfer"]
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
    assert missing() == ["FlashAttention 2", "FlashAttention 3", "FlashInfer"]
    assert list(library_calls(Case.parse("decode", "1x20", **SMALL), CPU, torch.bfloat16)) == ["FlashAttention"]
    assert not library_calls(Case.parse("decode", "1x20", **SMALL), CPU, FP8)
    install(**{"sgl_kernel": SimpleNamespace(), "sgl_kernel.flash_attn": flash_attn(True)})
    assert missing() == ["FlashAttention 2", "FlashInfer"]
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
