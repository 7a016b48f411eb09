"""Who gets FlashAttention 3, and what its packages are given. It needs a GPU itself: stand-ins compute in float64."""

import sys
from itertools import accumulate
from types import SimpleNamespace

import fake_flash_attention_3 as fakes
import pytest
import torch

from kvfold.format.layout import PageLayout, affine_slot
from kvfold.ops.attend.flash_attention_3 import AUTHORS, SGLANG, VLLM, Ends, Library, find
from kvfold.ops.dispatch import choose

GPU = torch.device("cuda")


@pytest.mark.parametrize("library", fakes.LIBRARIES, ids=lambda library: library.name)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("counts", "lengths"), [((7, 3, 5), (7, 11, 5)), ((3,), (11,)), ((5,), (5,))])
def test_packages_give_the_same(library, causal, counts, lengths):
    """Of sequences of different lengths, and of one sequence."""
    generator, scale, n = torch.Generator().manual_seed(0), 0.3, sum(counts)
    q, k, v = (torch.randn(s, generator=generator) for s in ((n, 6, 16), *[(sum(lengths), 2, 16)] * 2))
    room = torch.full((n + 2, 6, 16), torch.nan)
    firsts = [torch.tensor([0, *accumulate(each)], dtype=torch.int32) for each in (counts, lengths)]
    for out in (None, room[1:-1]):
        outs, logs = library.attend(q, k, v, scale, causal, Ends(*firsts, max(counts), max(lengths)), out)
        assert (outs.shape, logs.shape) == ((n, 6, 16), (n, 6))
        assert out is None or torch.equal(out, outs)
        assert room[[0, -1]].isnan().all()
        for row, head in ((row, head) for row in range(len(counts)) for head in range(6)):
            for i in range(counts[row]):
                query, first = firsts[0][row] + i, firsts[1][row]
                seen = slice(first, first + lengths[row] - (counts[row] - i - 1 if causal else 0))
                logits = scale * k[seen, head // 3].double() @ q[query, head].double()
                torch.testing.assert_close(logs[query, head].double(), logits.logsumexp(0), rtol=0, atol=1e-5)
                expected = logits.softmax(0) @ v[seen, head // 3].double()
                torch.testing.assert_close(outs[query, head].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("n", "splits"), [(511, 0), (512, 1)])
def test_sequences_that_fill_the_gpu_together_are_not_split(n, splits):
    given = []

    def recorded(q, *_, num_splits, **__):
        given.append(num_splits)
        return q, q[..., 0].T

    ends = Ends(torch.tensor([0, 1, n]), torch.tensor([0, 4, 9]), n - 1, 5)
    library = Library(SGLANG, SimpleNamespace(flash_attn_varlen_func=recorded))
    library.attend(torch.empty(n, 32, 8), *torch.empty(2, 9, 8, 8), 1.0, True, ends)
    assert given == [splits]


@pytest.mark.parametrize(
    ("installed", "capability", "found"),
    [
        ((SGLANG, AUTHORS, VLLM), (9, 0), SGLANG),
        ((AUTHORS, VLLM), (9, 0), AUTHORS),
        ((VLLM,), (9, 0), VLLM),
        ((), (9, 0), None),
        ((SGLANG, AUTHORS, VLLM), (8, 0), None),
        ((SGLANG, AUTHORS, VLLM), (10, 0), None),
    ],
)
def test_what_is_installed_is_found_for_hopper(installed, capability, found, monkeypatch):
    fakes.install(monkeypatch, *installed)
    library = find(capability)
    assert (library and library.name) == found


def test_an_old_version_of_the_authors_is_not_taken(monkeypatch):
    """It cannot be asked for log-sum-exps."""
    fakes.install(monkeypatch, AUTHORS)
    monkeypatch.setattr(fakes.MODULES[AUTHORS], "flash_attn_varlen_func", fakes.varlen)
    assert find((9, 0)) is None


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
        (128, (9, 0), False, "unpacked", "chunks are read by FlashAttention 3 of sgl_kernel.flash_attn"),
        (128, (8, 0), False, "unpacked", "chunks are read by flash attention of torch"),
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
        library.attend(*torch.zeros(3, 1, 1, 8), 1.0, True, Ends(ends, ends, 1, 1))
