"""Who gets FlashAttention 3, and what its packages are given. It needs a GPU itself: stand-ins compute in float64."""

import sys
from itertools import accumulate
from types import SimpleNamespace

import fake_flash_attention_3 as fakes
import pytest
import torch
from torch import Tensor

from kvfold.format.layout import PageLayout, affine_slot
from kvfold.ops.attend import flash_attention_3
from kvfold.ops.attend.flash_attention_3 import SGLANG, VLLM, Ends, Library, Paged, find
from kvfold.ops.dispatch import choose

GPU = torch.device("cuda")


SCALE = 0.3


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Of one query [q_heads, d] over k, v [tokens, kv_heads, d]: output, log-sum-exps."""
    outs, logs = [], []
    for head, query in enumerate(q.double()):
        keys, values = (x[:, head * k.shape[1] // len(q)].double() for x in (k, v))
        logits = SCALE * keys @ query
        outs.append(logits.softmax(0) @ values)
        logs.append(logits.logsumexp(0))
    return torch.stack(outs), torch.stack(logs)


def check(library: Library, q: Tensor, k: Tensor, v: Tensor, reach: Ends | Paged, read: list[list[int]]) -> None:
    """`read`: the tokens of each query."""
    room = torch.full((len(q) + 2, *q.shape[1:]), torch.nan)
    for out in (None, room[1:-1]):
        outs, logs = library.attend(q, k, v, SCALE, reach, out)
        assert (outs.shape, logs.shape) == (q.shape, q.shape[:2])
        assert out is None or torch.equal(out, outs)
        for i, tokens in enumerate(read):
            expected = attention(q[i], k[tokens], v[tokens])
            torch.testing.assert_close((outs[i].double(), logs[i].double()), expected, rtol=0, atol=1e-5)
    assert room[[0, -1]].isnan().all()


def randn(*counts: int) -> list[Tensor]:
    """Queries, keys and values of so many tokens."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, heads, 16, generator=generator) for n, heads in zip(counts, (6, 2, 2), strict=True)]


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("library", fakes.LIBRARIES, ids=lambda library: library.name)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("counts", "lengths"), [((7, 3, 5), (7, 11, 5)), ((3,), (11,)), ((5,), (5,))])
def test_packages_give_the_same(library, causal, counts, lengths):
    """Of sequences of different lengths, and of one sequence."""
    queries, tokens = ([0, *accumulate(each)] for each in (counts, lengths))
    reach = Ends(numbers(*queries), numbers(*tokens), max(counts), max(lengths), causal)
    read = [
        list(range(first, first + length - (count - 1 - i if causal else 0)))
        for first, count, length in zip(tokens, counts, lengths, strict=False)
        for i in range(count)
    ]
    check(library, *randn(sum(counts), *[sum(lengths)] * 2), reach, read)


@pytest.mark.parametrize("library", fakes.LIBRARIES, ids=lambda library: library.name)
def test_pages_are_read_in_the_order_of_the_table(library, monkeypatch):
    """Some by several sequences of queries, some by none. All but the last one of a sequence are full."""
    monkeypatch.setattr(flash_attention_3, "PAGE", 4)
    tables, counts, lengths = [[2, 0, 4], [2, 5], [1]], [3, 2, 4], [10, 8, 4]
    table = numbers(*[page for pages in tables for page in [*pages, 0, 0][:3]]).view(3, 3)
    reach = Paged(numbers(0, 3, 5, 9), 4, numbers(*lengths), 10, table)
    held = [[4 * page + i for page in pages for i in range(4)] for pages in tables]
    read = [
        tokens[: length - (count - 1 - i)]
        for tokens, count, length in zip(held, counts, lengths, strict=True)
        for i in range(count)
    ]
    check(library, *randn(9, 24, 24), reach, read)


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize(("n", "splits"), [(511, 0), (512, 1)])
def test_sequences_that_fill_the_gpu_together_are_not_split(n, splits, paged):
    given = []

    def recorded(q, *_, num_splits, **__):
        given.append(num_splits)
        return q, q[..., 0].T

    ends = Ends(numbers(0, 1, n), numbers(0, 4, 9), n - 1, 5, causal=True)
    pages = Paged(numbers(0, 1, n), n - 1, numbers(4, 5), 5, numbers(0, 0).view(2, 1))
    library = Library(SGLANG, SimpleNamespace(flash_attn_varlen_func=recorded, flash_attn_with_kvcache=recorded))
    library.attend(torch.empty(n, 32, 8), *torch.empty(2, 128, 8, 8), 1.0, pages if paged else ends)
    assert given == [splits]


@pytest.mark.parametrize(
    ("installed", "capability", "found"),
    [
        ((SGLANG, VLLM), (9, 0), SGLANG),
        ((VLLM,), (9, 0), VLLM),
        ((), (9, 0), None),
        ((SGLANG, VLLM), (8, 0), None),
        ((SGLANG, VLLM), (10, 0), None),
    ],
)
def test_what_is_installed_is_found_for_hopper(installed, capability, found, monkeypatch):
    fakes.install(monkeypatch, *installed)
    library = find(capability)
    assert (library and library.name) == found


def test_vllm_is_not_imported_and_must_have_version_3(monkeypatch):
    fakes.install(monkeypatch, VLLM)
    monkeypatch.setattr(fakes.MODULES[VLLM], "is_fa_version_supported", lambda version: version == 2)
    assert find((9, 0)) is None
    monkeypatch.undo()
    fakes.install(monkeypatch, VLLM)
    monkeypatch.delitem(sys.modules, "vllm")
    assert find((9, 0)) is None


@pytest.mark.parametrize(
    ("dims", "capability", "cap", "implementation", "reason"),
    [
        (128, (9, 0), False, "unpacked", "unpacked tokens are read by FlashAttention 3 of sgl_kernel.flash_attn"),
        (128, (8, 0), False, "unpacked", "unpacked tokens are read by attention of torch"),
        (128, (9, 0), True, "triton", "flash attention has no soft-cap"),
        (512, (9, 0), False, "triton", "heads have 512 dims, not a multiple of 8 up to 256"),
    ],
)
@pytest.mark.filterwarnings("ignore:the portable kernel decodes")
def test_choice(dims, capability, cap, implementation, reason, monkeypatch):
    fakes.install(monkeypatch, SGLANG)
    layout = PageLayout(affine_slot(dims, 4), affine_slot(dims, 4), 16)
    extend = choose.__wrapped__(layout, 4, GPU, capability, cap).extend
    assert (extend.implementation, extend.reason) == (implementation, reason)


def test_an_error_of_the_library_is_not_hidden():
    def refuse(*_, **__):
        raise RuntimeError("no kernel for this shape")

    library, ends = Library(SGLANG, SimpleNamespace(flash_attn_with_kvcache=refuse)), torch.tensor([0, 1])
    with pytest.raises(RuntimeError, match="no kernel for this shape"):
        library.attend(*torch.zeros(3, 1, 1, 8), 1.0, Ends(ends, ends, 1, 1, causal=True))
