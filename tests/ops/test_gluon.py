"""What the Gluon kernels take, in which order the codebook kernel lays out what it decodes, and the steps around them.

`level_lookup.py` has tests of its own.
"""

from functools import partial

import emulated_gluon
import numpy as np
import pytest
import torch
from test_levels import run
from torch import Tensor
from triton import knobs

from kvfold.bench import selftest
from kvfold.bench.selftest import Case, Tokens
from kvfold.format.codec import Codec
from kvfold.format.layout import PageLayout, Segment, SlotLayout, affine_slot, codebook_slot, mixed_slot
from kvfold.ops.attend.gluon import codebook_decode as kernel
from kvfold.ops.attend.gluon import decode_step as gluon
from kvfold.ops.attend.gluon import level_lookup as levels
from kvfold.ops.attend.gluon.decode_step import unsupported
from kvfold.ops.cards import HOPPER, card_of
from kvfold.ops.dispatch import AMPERE, Choice, Ops, choose
from kvfold.ops.store import store_gpu as store
from kvfold.recipes import parse

GPU = torch.device("cuda")
interpret = knobs.runtime.interpret
TOKENS = Tokens((90, 30), (1, 1))
INT4, TQ3 = affine_slot(128, 4), codebook_slot([(128, 3)])


def layout(recipe: str, dims: int, page: int = 16) -> PageLayout:
    return PageLayout(*parse(recipe).layouts(dims, dims, {}), page)


@pytest.mark.parametrize("dims", [64, 128, 256])
@pytest.mark.parametrize("ratio", [1, 4, 7, 8])
@pytest.mark.parametrize(
    "recipe",
    [
        *(f"int{bits}{group}" for bits in (2, 4, 8) for group in ("", ":group={half}")),
        *(f"{family}-k{bits}v{bits}" for family in ("tq", "gtq") for bits in (2, 3, 4)),
        "tq-k1v6",
        "gtq-k3v3:widths=two",
    ],
)
def test_integers_and_codebooks_are_decoded_by_the_fast_kernels(recipe, dims, ratio):
    recipe = recipe.format(half=dims // 2)
    choice = choose(layout(recipe, dims), ratio, GPU, AMPERE).decode
    assert choice.implementation == "gluon"
    assert choice.reason == "integers, evenly spaced levels or codebooks"


@pytest.mark.parametrize(
    ("key", "value", "page", "ratio", "reason"),
    [
        (TQ3, TQ3, 24, 4, "pages of 24 tokens are no multiple of 16"),
        (TQ3, TQ3, 16, 9, "9 query heads share a KV head, not 1 to 8"),
        (INT4, TQ3, 16, 4, "keys are not codes of one set of codebooks"),
        (TQ3, INT4, 16, 4, "values are not codes of one set of codebooks"),
        (SlotLayout(TQ3.segments, centroid=True), TQ3, 16, 4, "keys are not codes of one set of codebooks"),
        (mixed_slot([TQ3, codebook_slot([(64, 4), (64, 2)])]), TQ3, 16, 4, "keys are not codes of one set"),
        (TQ3, codebook_slot([(128, 7)]), 16, 4, "values have codes of 7 bits, not 1 to 6"),
        (
            codebook_slot([(96, 3), (32, 2)]),
            TQ3,
            16,
            4,
            "keys have a segment of 96 coordinates, not 32, 64, 128 or 256",
        ),
        (codebook_slot([(64, 3), (32, 2)]), codebook_slot([(32, 3)]), 16, 4, "keys have 96 coordinates, not 64"),
        (TQ3, codebook_slot([(64, 4), (64, 2)]), 16, 4, "values have 2 segments, not one"),
        (affine_slot(128, 3), INT4, 16, 4, "keys are not affine integers of 2, 4 or 8 bits"),
        (INT4, affine_slot(128, 4, 32), 16, 4, "values have 4 groups, not 1 or 2"),
        (INT4, affine_slot(64, 4), 16, 4, "keys have 128 coordinates and values 64, not equally many"),
        (affine_slot(96, 4), affine_slot(96, 4), 16, 4, "keys have 96 coordinates, not 64, 128 or 256"),
        (SlotLayout((Segment(0, 64, 4), Segment(64, 128, 4, "codebook"))), TQ3, 16, 4, "keys are not codes of one set"),
    ],
)
def test_what_else_is_read_by_triton_and_why(key, value, page, ratio, reason):
    found = unsupported(PageLayout(key, value, page), ratio)
    assert found is not None
    assert found.startswith(reason)


# --- the order of coordinates and tokens in the two products of the kernel for codebooks. It is free, but both operands
# must have the same one. Levels come from packed bytes by the kernel's own PTX, which test_levels.py runs; products are
# compared with those of what the codec decodes, of which the kernel rounds each number to 11 bits.

HALF = 2.0**-11


def tile(bits: int, dims: int) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes of 64 tokens, uint32[64, words], and what they decode to with a norm of 1, float64[64, dims]."""
    codec = Codec(codebook_slot([(dims, bits)]))
    codes, meta = codec.quantize(torch.randn(64, 1, dims, generator=torch.Generator().manual_seed(bits)))
    decoded = codec.dequantize(codes, torch.ones_like(meta)).squeeze(1)
    return codes.squeeze(1).numpy().view(np.uint32), decoded.double().numpy()


def lane_levels(words: np.ndarray, bits: int, columns: int, lanes: int, lane: int) -> np.ndarray:
    """What the steps of a lane make of pairs of tokens, whose words are uint32[pairs, 2, words]: float64[outputs,
    pairs, 2]."""
    column, u = lane % columns, lane // columns
    loaded = [words[..., w.first + column + u % w.width * columns] for w in levels.lane_words(bits, columns, lanes)]
    outputs = []
    for lookup in levels.lane_lookups(bits, columns, lanes):
        inputs = [loaded[i][:, token] for i in lookup.words for token in range(2)]
        inputs += [np.full(len(words), number, np.uint32) for number in (u, *lookup.constants) for _ in range(2)]
        outputs += run(lookup.program, inputs)
    return np.stack(outputs).view(np.float16).reshape(len(outputs), -1, 2) / levels.codebook(bits).scale


def joined(tensors: list[Tensor]) -> Tensor:
    """As in the kernel: a trailing dimension for each bit of a tensor's number, the lowest first."""
    while len(tensors) > 1:
        tensors = [torch.stack(tensors[i : i + 2], dim=-1) for i in range(0, len(tensors), 2)]
    return tensors[0]


@pytest.mark.parametrize(("columns", "bits"), [(1, 4), (2, 3), (4, 2), (8, 5), (4, 6), (2, 1)])
def test_logits_are_those_of_the_codec(columns, bits):
    """Tokens of a run come in pairs to the PTX, whose outputs are pairs of parts of either."""
    words, decoded = tile(bits, 32 * columns)
    lanes, by = levels.KEY_LANES, levels.share(columns, levels.KEY_LANES)
    found = [lane_levels(words.reshape(32, 2, -1), bits, columns, lanes, lane) for lane in range(lanes)]
    halves = [torch.from_numpy(half) for half in np.stack(found, axis=-1).reshape(-1, 8, 8, lanes)]  # run, place, lane
    keys = joined(halves).reshape(kernel.key_shape(len(halves))).permute(kernel.key_permutation(len(halves)))

    index, row = np.arange(32 * columns), np.arange(64)
    # the order in which queries are loaded, see `_queries`
    at = levels.coordinate.fn(index >> 5, (index >> 3) & 3, index & 1, (index >> 1) & 3, columns, lanes, by)
    queries = np.random.default_rng(0).standard_normal((32 * columns, 3))
    expected = decoded[row % 8 * 8 + row // 8]  # rows are numbered 8·place + run
    error = np.abs(keys.reshape(64, -1).numpy() @ queries[at] - expected @ queries)
    assert (error <= HALF * (np.abs(expected) @ np.abs(queries))).all()


@pytest.mark.parametrize(("columns", "bits"), [(2, 3), (4, 4), (8, 2), (4, 5), (2, 6), (4, 1)])
def test_outputs_are_those_of_the_codec(columns, bits):
    """Tokens of an even and an odd run come in pairs to the PTX, and its outputs are pairs of them."""
    words, decoded = tile(bits, 32 * columns)
    lanes, by = levels.VALUE_LANES, levels.share(columns, levels.VALUE_LANES)
    pairs = words.reshape(4, 2, 8, -1).swapaxes(1, 2).reshape(32, 2, -1)  # [quarter · place, run % 2]
    found = [lane_levels(pairs, bits, columns, lanes, lane) for lane in range(lanes)]
    halves = [torch.from_numpy(half) for half in np.stack(found, axis=-2).reshape(-1, 4, 8, lanes, 2)]
    values = joined(halves).permute(kernel.value_permutation(len(halves))).reshape(32 * columns, 64).numpy()

    index, column = np.arange(32 * columns), np.arange(64)
    # the order in which outputs are stored, see `_store_part`
    at = levels.coordinate.fn(index >> 6, (index >> 3) & 3, (index >> 5) & 1, index & 7, columns, lanes, by)
    weights = np.random.default_rng(0).random((64, 3))
    outputs = np.zeros((32 * columns, 3))
    outputs[at] = values @ weights[column % 8 * 8 + column // 8]  # columns are numbered 8·place + run
    error = np.abs(outputs - decoded.T @ weights)
    assert (error <= HALF * (np.abs(decoded).T @ weights)).all()


# --- a whole step: everything around the kernels, in Triton's interpreter, against the definitions


@pytest.mark.parametrize(
    "case",
    [
        Case("saw-int4", 64, 3, 16, TOKENS),  # queries are rotated by the kernel
        Case("saw-int4:block=64", 64, 1, 64, TOKENS),  # by a kernel of its own, as another one reads raw tokens
        Case("saw-int4:values=true", 64, 3, 16, TOKENS, sinks=True),
        Case("saw-int4:block=8", 64, 2, 16, TOKENS, sinks=True),
        Case("int4:block=1", 64, 2, 16, TOKENS, "float16"),
        Case("oscar-int2:block=20", 128, 2, 16, TOKENS),
        Case("int2:group=32,block=2", 64, 2, 16, TOKENS),
        Case("saw-int4:block=8,group=128", 256, 8, 16, TOKENS),
        Case("gtq-k3v3:block=2", 64, 3, 16, TOKENS),
        Case("tq-k4v2", 64, 1, 64, TOKENS),
    ],
    ids=lambda case: f"{case.recipe}{'-sinks' if case.sinks else ''}",
)
@torch.no_grad()
def test_a_step_stores_and_reads_what_the_definitions_do(case, monkeypatch):
    if not interpret:
        pytest.skip("the kernels around the fast ones are interpreted here; tests/gpu has them all")
    emulated_gluon.use(monkeypatch)
    card = card_of((9, 0))
    stored = Choice("triton", "interpreted", partial(store.store, card))
    read = partial(gluon.attend, card, stored=False)
    ops = Ops(stored, Choice("gluon", "emulated", partial(gluon.attend, card), read, gluon.QUERIES), stored)
    monkeypatch.setattr(selftest, "choose", lambda *_, **__: ops)
    layer = selftest.Layer(case, torch.device("cpu"))
    rows = [layer.step(), layer.attend("decode", ops.decode), layer.attend("read", Choice("", "", read))]
    for row in (*rows, layer.step(most=3), layer.attend("read", Choice("", "", read))):
        assert row.ok, row


@pytest.mark.parametrize(
    ("recipe", "dims", "implementation", "said"),
    [
        ("kivi-2", 128, "triton", "no kernel that stores these keys: whole pages .* many times slower"),
        ("kivi-2", 128, "triton", "several times slower than the fast one: keys are not affine integers"),
        ("kitty-2", 128, "triton", "no kernel that stores these keys: whole pages .* many times slower"),
        ("int4:group=4", 128, "torch", "no kernel for these keys: 4 coordinates .* many times slower"),
        ("int2", 32, "triton", "several times slower than the fast one: keys have 32 coordinates"),
    ],
)
def test_what_is_slow_on_a_gpu_is_said(recipe, dims, implementation, said):
    choose.cache_clear()
    with pytest.warns(UserWarning, match=said):
        assert choose(layout(recipe, dims, 128), 4, GPU, HOPPER).decode.implementation == implementation
