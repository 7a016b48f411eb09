"""The inputs of a decode step, from SGLang's tensors, in one launch. PyTorch's operators would take a dozen."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.ops.sizes import power_of_two


class DecodeInputs(NamedTuple):
    """One row per request, and padding up to the size of the CUDA graph."""

    locations: Tensor  # int64[rows], -1: padding
    query_starts: Tensor  # int32[rows + 1]
    starts: Tensor  # int32[rows], as are all below
    lengths: Tensor
    kept_starts: Tensor  # the same for windows: 0 for padding, which needs none
    kept_lengths: Tensor


def decode_inputs(locations: Tensor, lengths: Tensor, requests: Tensor, known: Tensor, page_size: int) -> DecodeInputs:
    """The new tokens go to `locations`; those in page 0 are padding. `lengths` include the new tokens. They are also
    written to `known`, at the rows `requests`."""
    rows = len(lengths)
    places = torch.empty(rows, dtype=torch.int64, device=lengths.device)
    stride = rows // 4 * 4 + 4  # a multiple of 16 bytes, since Triton compiles kernels anew for another alignment
    numbers = torch.empty(5, stride, dtype=torch.int32, device=lengths.device)
    width = power_of_two(rows + 1)
    _decode_inputs[(1,)](
        locations, lengths, requests, known, places, numbers, rows, stride, PAGE=page_size, WIDTH=width
    )
    return DecodeInputs(places, numbers[0, : rows + 1], *numbers[1:, :rows])


@triton.jit(do_not_specialize=["rows", "stride"])
def _decode_inputs(
    locations, lengths, requests, known, places, numbers, rows, stride, PAGE: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.arange(0, WIDTH)
    live = row < rows
    location = tl.load(locations + row, mask=live, other=0).to(tl.int64)
    length = tl.load(lengths + row, mask=live, other=1).to(tl.int32)
    tl.store(known + tl.load(requests + row, mask=live, other=0), length, mask=live)
    real = location >= PAGE
    tl.store(places + row, tl.where(real, location, -1), mask=live)
    kept = tl.where(real, length, 0)
    tl.store(numbers + row, row, mask=row <= rows)
    tl.store(numbers + stride + row, length - 1, mask=live)
    tl.store(numbers + 2 * stride + row, length, mask=live)
    tl.store(numbers + 3 * stride + row, tl.maximum(kept - 1, 0), mask=live)
    tl.store(numbers + 4 * stride + row, kept, mask=live)
