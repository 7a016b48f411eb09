"""A page that a window reaches into has a shadow. Where it has none, every op refuses the step, and none reads around
it. Kernels for GPUs do so in Triton's interpreter, and on GPUs with TRITON_DEBUG=1."""

from collections.abc import Callable
from unittest.mock import patch

import emulated_gluon
import pytest
import torch
from test_attend import DEVICE, LAYER, World, codecs
from triton.runtime.errors import InterpreterError

from kvfold.format.codec import Codec
from kvfold.format.layout import affine_slot, channel_slot
from kvfold.ops import naive
from kvfold.ops.attend import attend_gpu as portable
from kvfold.ops.attend import attend_torch
from kvfold.ops.attend import unpacked_prefill as unpacked
from kvfold.ops.attend.gluon import decode_step as gluon
from kvfold.ops.cards import card_of
from kvfold.ops.pages import LayerPages

pytestmark = pytest.mark.usefixtures("_poisoned_memory")
if DEVICE == "cuda":
    pytest.skip("without TRITON_DEBUG=1 kernels assert in Triton's interpreter alone", allow_module_level=True)

PAGE, SINK, RECENT = 4, 6, 7
DECODE, EXTEND = (1, 1), (3, 9)
REFUSED = "a window .*reaches into a page that has no shadow"


def numba_attend(*arguments) -> torch.Tensor:
    return pytest.importorskip("kvfold.ops.attend.decode_cpu").attend(*arguments)


def gluon_attend(*arguments) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patched:
        emulated_gluon.use(patched)
        return gluon.attend(card_of((9, 0)), *arguments)


def unpacked_attend(*arguments) -> torch.Tensor:
    with patch.multiple(unpacked, MIN_QUERIES=3, MIN_TOKENS=4):
        return unpacked.attend(*arguments)


OPS = {
    "naive-decode": (naive.attend, AssertionError, DECODE),
    "naive-extend": (naive.attend, AssertionError, EXTEND),
    "torch-decode": (attend_torch.attend, RuntimeError, DECODE),
    "torch-extend": (attend_torch.attend, RuntimeError, EXTEND),
    "numba": (numba_attend, RuntimeError, DECODE),
    "portable-decode": (portable.attend, InterpreterError, DECODE),
    "portable-extend": (portable.attend, InterpreterError, EXTEND),
    "unpacked": (unpacked_attend, InterpreterError, EXTEND),
    "gluon": (gluon_attend, InterpreterError, DECODE),
}


def filled(counts: tuple[int, ...]) -> tuple[LayerPages, Callable]:
    """A step of sequences of 30 and 41 tokens, and a call of an `attend` for it."""
    world = World(codecs("int4", 64, 2), 2, page_size=PAGE, sink=SINK, recent=RECENT)
    world.fill(30, 41)
    pages, new = world.fill(*counts)
    q = world.queries()
    return pages, lambda attend: attend(pages, q, new, world.logits)


def lose(pages: LayerPages, row: int, token: int) -> None:
    """Take the shadow of a token's page away."""
    page = pages.step.table[row, token // PAGE]
    assert pages.step.shadow_of[page] >= 0
    pages.step.shadow_of[page] = -1


@pytest.mark.parametrize(("row", "token"), [(0, 0), (1, SINK - 1), (0, 29), (1, 41 - RECENT + 1)])
@pytest.mark.parametrize(("attend", "error", "counts"), OPS.values(), ids=OPS)
def test_a_missing_shadow_is_refused(attend, error, counts, row, token):
    """Of the first and last tokens of the sink, and of those that a query finds in its recent window."""
    pages, call = filled(counts)
    lose(pages, row, token)
    with pytest.raises(error, match=REFUSED):
        call(attend)


@pytest.mark.parametrize(("attend", "counts"), [(attend, counts) for attend, _, counts in OPS.values()], ids=OPS)
def test_shadows_that_no_window_needs_may_be_missing(attend, counts):
    """Of pages between the windows, and of those that hold tokens of the step alone."""
    pages, call = filled(counts)
    expected, shadow_of = call(attend), pages.step.shadow_of.clone()
    read = {
        int(pages.step.table[row, token // PAGE])
        for row, start in enumerate(pages.step.known.starts)
        for token in (*range(SINK), *range(start - RECENT + 1, start))
    }
    for page in set(range(len(shadow_of))) - read:
        pages.step.shadow_of[page] = -1
    assert counts == DECODE or not torch.equal(pages.step.shadow_of, shadow_of)
    pages.step._memory.clear()  # what was computed with other shadows
    assert torch.equal(call(attend), expected)


def test_a_page_that_is_quantized_as_a_whole_needs_the_shadow_of_its_first_tokens():
    world = World((Codec(channel_slot(16, 2)), Codec(affine_slot(16, 2))), kv_heads=1, page_size=PAGE)
    world.fill(6)
    world.cache.extend([3])
    pages = world.cache.pages(LAYER)
    lose(pages, 0, 5)
    with pytest.raises(RuntimeError, match=REFUSED):
        naive.store(pages, *world.randn(2, 3, 1, 16))
