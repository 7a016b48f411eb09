"""What the Gluon kernels take, and in which order the codebook kernel lays out what it decodes.


`levels.py` has tests of its own.
"""

import pytest
import torch
from torch import Tensor

from kvfold.layout import PageLayout, Segment, SlotLayout, affine_slot, codebook_slot, mixed_slot
from kvfold.ops.attend import gluon_codebooks as kernel
from kvfold.ops.attend import levels
from kvfold.ops.attend.gluon import unsupported
from kvfold.ops.dispatch import HOPPER, choose
from kvfold.recipes import parse

GPU = torch.device("cuda")
INT4, TQ3 = affine_slot(128, 4), codebook_slot([(128, 3)])


def layout(recipe: str, dims: int, page: int = 16) -> PageLayout:
    return PageLayout(*parse(recipe).layouts(dims, {}), page)


@pytest.mark.parametrize("dims", [64, 128, 256])
@pytest.mark.parametrize("ratio", [1, 4, 7, 8])
@pytest.mark.parametrize(
    "recipe",
    [*(f"{family}-k{bits}v{bits}" for family in ("tq", "gtq") for bits in (2, 3, 4)), "tq-k1v6", "gtq-k3v3:widths=two"],
)
def test_codebooks_are_decoded_on_hopper(recipe, dims, ratio):
    choice = choose(layout(recipe, dims), ratio, GPU, HOPPER).decode
    assert choice.implementation == "gluon"
    assert choice.reason == "affine integers or codebooks on Hopper or later"


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
        (affine_slot(96, 4), affine_slot(96, 4), 16, 4, "keys of 96 coordinates have 48 bytes of codes"),
        (SlotLayout((Segment(0, 64, 4), Segment(64, 128, 4, "codebook"))), TQ3, 16, 4, "keys are not codes of one set"),
    ],
)
def test_what_else_is_read_by_triton_and_why(key, value, page, ratio, reason):
    found = unsupported(PageLayout(key, value, page), ratio)
    assert found is not None
    assert found.startswith(reason)


# --- order. Tensors hold the number 64·coordinate + token of each code, at the label that the kernel gives it.


def joined(tensors: list[Tensor]) -> Tensor:
    """As in the kernel: a trailing dimension for each bit of a tensor's number, the lowest first."""
    while len(tensors) > 1:
        tensors = [torch.stack(tensors[i : i + 2], dim=-1) for i in range(0, len(tensors), 2)]
    return tensors[0]


@pytest.mark.parametrize("columns", [1, 2, 4, 8])
def test_order_of_keys(columns):
    """Places come in pairs to the PTX, whose outputs are pairs of parts of either."""
    by, lanes = levels.share(columns, levels.KEY_LANES), levels.KEY_LANES
    run, place, lane = torch.meshgrid(torch.arange(8), torch.arange(8), torch.arange(lanes), indexing="ij")
    halves = [
        64 * levels.coordinate.fn(step, number % 4, place % 2, lane, columns, lanes, by)
        + (8 * run + place // 2 * 2 + number // 4)
        for step in range(columns)
        for number in range(8)
    ]
    found = joined(halves).reshape(kernel.key_shape(len(halves))).permute(kernel.key_permutation(len(halves)))
    index, row = torch.arange(32 * columns), torch.arange(64)
    at = levels.coordinate.fn(index >> 5, (index >> 3) & 3, index & 1, (index >> 1) & 3, columns, lanes, by)
    token = row % 8 * 8 + row // 8  # rows are numbered 8·place + run
    assert torch.equal(found.reshape(64, -1), 64 * at + token.unsqueeze(1))
    assert sorted(at.tolist()) == index.tolist()


@pytest.mark.parametrize("columns", [2, 4, 8])
def test_order_of_values(columns):
    """Tokens of an even and an odd run come in pairs to the PTX, and its outputs are pairs of them."""
    by, lanes = levels.share(columns, levels.VALUE_LANES), levels.VALUE_LANES
    quarter, place, lane, odd = torch.meshgrid(*map(torch.arange, (4, 8, lanes, 2)), indexing="ij")
    halves = [
        64 * levels.coordinate.fn(step, number % 4, number // 4, lane, columns, lanes, by)
        + (16 * quarter + 8 * odd + place)
        for step in range(columns // 2)
        for number in range(8)
    ]
    found = joined(halves).permute(kernel.value_permutation(len(halves))).reshape(32 * columns, 64)
    index, column = torch.arange(32 * columns), torch.arange(64)
    at = levels.coordinate.fn(index >> 6, (index >> 3) & 3, (index >> 5) & 1, index & 7, columns, lanes, by)
    token = column % 8 * 8 + column // 8  # columns are numbered 8·place + run
    assert torch.equal(found, 64 * at.unsqueeze(1) + token)
    assert sorted(at.tolist()) == index.tolist()


@pytest.mark.parametrize(
    ("recipe", "dims", "implementation", "said"),
    [
        ("kivi-2", 128, "triton", "no kernel that stores these keys: whole pages .* many times slower"),
        ("kivi-2", 128, "triton", "several times slower than the one for Hopper: keys are not affine integers"),
        ("kitty-2", 128, "triton", "no kernel that stores these keys: whole pages .* many times slower"),
        ("int4:group=4", 128, "torch", "no kernel for these keys: 4 coordinates .* many times slower"),
        ("int2", 64, "triton", "several times slower than the one for Hopper: keys of 64 coordinates have 16 bytes"),
    ],
)
def test_what_is_slow_on_a_gpu_is_said(recipe, dims, implementation, said):
    choose.cache_clear()
    with pytest.warns(UserWarning, match=said):
        assert choose(layout(recipe, dims, 128), 4, GPU, HOPPER).decode.implementation == implementation
