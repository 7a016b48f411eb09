"""The inputs of a decode step, from SGLang's tensors, in one launch. PyTorch's operators would take a dozen."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.ops.launch import launcher
from kvfold.ops.sizes import power_of_two


class DecodeInputs(NamedTuple):
    """One row per request, and padding up to the size of the CUDA graph."""

    locations: Tensor  # int64[rows · queries], -1: padding
    query_starts: Tensor  # int32[rows + 1]
    starts: Tensor  # int32[rows]; 0 for padding
    lengths: Tensor  # int32[rows]


def decode_inputs(locations: Tensor, lengths: Tensor, page_size: int, counted: int = 1) -> DecodeInputs:
    """The new tokens go to `locations`, as many per request; those in page 0 are padding. `lengths` include `counted`
    of them."""
    rows = len(lengths)
    queries = len(locations) // rows
    places = torch.empty(rows * queries, dtype=torch.int64, device=lengths.device)
    stride = rows // 4 * 4 + 4  # a multiple of 16 bytes, since Triton compiles kernels anew for another alignment
    numbers = torch.empty(3, stride, dtype=torch.int32, device=lengths.device)
    width = power_of_two(rows + 1)
    kernel = launcher(_decode_inputs, lengths.device, PAGE=page_size, WIDTH=width, QUERIES=queries, COUNTED=counted)
    kernel((1, 1, 1), locations, lengths, places, numbers, rows, stride)
    return DecodeInputs(places, numbers[0, : rows + 1], *numbers[1:, :rows])


@triton.jit(do_not_specialize=["rows", "stride"])
def _decode_inputs(
    locations,
    lengths,
    places,
    numbers,
    rows,
    stride,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    COUNTED: tl.constexpr,
):
    row = tl.arange(0, WIDTH)
    live = row < rows
    real = tl.load(locations + row * QUERIES, mask=live, other=0) >= PAGE
    start = tl.load(lengths + row, mask=live, other=1).to(tl.int32) - COUNTED
    start = tl.where(real, start, 0)  # padding reads no page
    length = start + QUERIES
    for query in tl.static_range(QUERIES):
        place = row * QUERIES + query
        location = tl.load(locations + place, mask=live, other=0).to(tl.int64)
        tl.store(places + place, tl.where(real, location, -1), mask=live)
    tl.store(numbers + row, row * QUERIES, mask=row <= rows)
    tl.store(numbers + stride + row, start, mask=live)
    tl.store(numbers + 2 * stride + row, length, mask=live)
