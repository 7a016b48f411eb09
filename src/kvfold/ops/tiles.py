"""What the Triton kernels of all ops share: how they see a slot, and how the codes of many slots become a tile.

A segment is divided into *parts*: runs of as many coordinates as its narrowest plane has bytes (see packing.py). Wider
planes are several runs of this many bytes.

The columns of a tile hold the first two coordinates of every part, then the next two of every part, and so on. So a
thread keeps all codes of the bytes that it loads, and computes with two codes at a time. Queries are loaded, and
outputs stored, in this column order.
"""

from functools import lru_cache
from typing import NamedTuple

import triton
import triton.language as tl

from kvfold.format.layout import ODD_BYTES, PageLayout, SlotLayout
from kvfold.ops import sizes
from kvfold.ops.segments import RULES, segment_rows
from kvfold.quantizers import even

AFFINE = tl.constexpr(RULES["affine"])
CODEBOOK = tl.constexpr(RULES["codebook"])
RAW = tl.constexpr(RULES["raw"])
CHANNEL = tl.constexpr(RULES["channel"])
EVEN = tl.constexpr(RULES["even"])
LEAST = tl.constexpr(even.LEAST)
DROPPED = tl.constexpr(even.DROPPED)
SMALLEST = tl.constexpr(1 << even.MANTISSA)  # the byte of the smallest scale; below it, bytes stand for 0


class Side(NamedTuple):
    """The keys or the values of a page, for kernels. Tuples have one entry per segment (see `SegmentRow`)."""

    start: tuple[int, ...]
    dims: tuple[int, ...]
    eighth: tuple[int, ...]  # stored codes / 8
    parts: tuple[int, ...]
    run: tuple[int, ...]  # codes per part
    width: tuple[int, ...]  # columns of a part in a tile
    bits: tuple[int, ...]
    rule: tuple[int, ...]
    boosted: tuple[int, ...]
    codes: tuple[int, ...]  # bytes, as all places and strides
    code_stride: tuple[int, ...]
    meta: tuple[int, ...]
    meta_stride: tuple[int, ...]
    head_dim: int


def unsupported(slot: SlotLayout) -> str | None:
    """Why kernels neither write nor read slots of this layout, or None. The portable `attend` may still read them."""
    return slot.more_than_a_token or _odd(slot)


def unsupported_side(layout: PageLayout) -> tuple[str, str] | None:
    """The side of a page that is `unsupported`, and why. None if both are supported."""
    for side, slot in (("keys", layout.key), ("values", layout.value)):
        if reason := unsupported(slot):
            return side, reason
    return None


def unreadable(layout: PageLayout) -> str | None:
    """Why the portable `attend` does not read pages of this layout either, or None."""
    for side, slot in (("keys", layout.key), ("values", layout.value)):
        reasons = [unsupported(head) for head in slot.heads] or [_odd(slot)]
        if any(head.has_raw for head in slot.heads) and slot.code_bytes % 2:
            reasons.append(ODD_BYTES)
        if slot.per_page and layout.page_size % 16:  # a tile lies in one page, and MMA takes 16 tokens at least
            reasons.append(f"{layout.page_size} tokens of a page that is quantized as a whole are no multiple of 16")
        if reason := next(filter(None, reasons), None):
            return f"there is no kernel for these {side}: {reason}"
    return None


def _odd(slot: SlotLayout) -> str | None:
    for segment in slot.segments:
        if segment.padded_dims % 8:
            return f"{segment.dims} coordinates of a segment are no multiple of 8"
        if segment.boosted % 8:
            return f"{segment.boosted} boosted coordinates are no multiple of 8"
    return slot.misaligned


def key_side(layout: PageLayout) -> Side:
    return _side(layout, 0)


def value_side(layout: PageLayout) -> Side:
    return _side(layout, 1)


@lru_cache
def _side(layout: PageLayout, side: int) -> Side:
    slot = (layout.key, layout.value)[side]
    if reason := unsupported(slot):
        raise ValueError(f"no kernel reads or writes this slot, as {reason}: {slot}")
    return _numbers(layout, side)


@lru_cache
def attended_sides(layout: PageLayout) -> list[tuple[Side, Side]]:
    """Keys and values for the portable `attend`: one pair for all KV heads, or one per KV head if layouts differ."""
    if reason := unreadable(layout):
        raise ValueError(f"{reason}: {layout}")
    heads = len(layout.key.heads or layout.value.heads or (layout.key,))
    return [(_numbers(layout, 0, head), _numbers(layout, 1, head)) for head in range(heads)]


def _numbers(layout: PageLayout, side: int, head: int = 0) -> Side:
    rows, columns = segment_rows(layout, side, head), []
    for segment in rows:
        count = max(1, 8 // (segment.bits & -segment.bits))
        run = segment.stored // count
        # MMA takes 16 columns at least; and Triton 3.6 multiplies wrongly if several parts have fewer than 32 together
        width = max((32 if count > 1 else 16) // count, sizes.power_of_two(run))
        columns.append((segment.stored // 8, count, run, width))
    start, dims, _, *others = zip(*rows, strict=True)
    head_dim = (layout.key, layout.value)[side].dims
    return Side._make((start, dims, *zip(*columns, strict=True), *others, head_dim))


@triton.jit
def coordinates(SIDE: tl.constexpr, SEGMENT: tl.constexpr):
    """The coordinate of every column of a segment, and whether the column has one."""
    PARTS: tl.constexpr = SIDE.parts[SEGMENT]
    column = tl.arange(0, PARTS * SIDE.width[SEGMENT])
    j = column
    if PARTS > 1:  # with one part, the compiler should see that columns are consecutive
        j = column // (2 * PARTS) * 2 + column % 2
    within = column // 2 % PARTS * SIDE.run[SEGMENT] + j
    return SIDE.start[SEGMENT] + within, (j < SIDE.run[SEGMENT]) & (within < SIDE.dims[SEGMENT])


@triton.jit
def load_codes(slots, SIDE: tl.constexpr, SEGMENT: tl.constexpr):
    """The codes of a segment as float16[TOKENS, parts·width]. `slots` points to each token's codes of the segment."""
    PARTS: tl.constexpr = SIDE.parts[SEGMENT]
    parts = ()
    for part in tl.static_range(PARTS):
        x = _part(slots, SIDE, SEGMENT, part, SIDE.bits[SEGMENT])
        parts += (tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]),)
    x = _interleaved(parts)
    return tl.reshape(x, [x.shape[0], x.shape[1] * 2])


@triton.jit
def _part(slots, SIDE: tl.constexpr, SEGMENT: tl.constexpr, PART: tl.constexpr, BITS: tl.constexpr):
    """The codes of a part, summed over the planes of BITS. Parts share bytes, which the compiler loads once."""
    WIDTH: tl.constexpr = BITS & -BITS
    codes = _plane(slots, SIDE, SEGMENT, PART, WIDTH)
    if BITS > WIDTH:
        codes += _part(slots, SIDE, SEGMENT, PART, BITS - WIDTH)
    return codes


@triton.jit
def _plane(slots, SIDE: tl.constexpr, SEGMENT: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr):
    """What one plane adds to the codes of a part.

    A byte that is ORed into the low bits of the float16 number 1024 gives 1024 + byte. So bits are neither shifted nor
    converted.
    """
    RUN: tl.constexpr = SIDE.run[SEGMENT]
    RUNS: tl.constexpr = SIDE.parts[SEGMENT] * WIDTH // 8
    BELOW: tl.constexpr = bits_below(SIDE.bits[SEGMENT], WIDTH)
    SHIFT: tl.constexpr = PART // RUNS * WIDTH
    UNIT: tl.constexpr = 2.0 ** (BELOW - SHIFT)
    j = tl.arange(0, SIDE.width[SEGMENT])
    byte = slots[:, None] + (BELOW * SIDE.eighth[SEGMENT] + PART % RUNS * RUN + j)[None, :]
    packed = tl.load(byte, mask=(j < RUN)[None, :], other=0).to(tl.int16) | 0x6400
    x = (packed & (0x6400 | (((1 << WIDTH) - 1) << SHIFT))).to(tl.float16, bitcast=True)
    if UNIT > 1:  # float16 may not hold 1024·UNIT
        return (x - 1024.0) * UNIT
    else:
        return x * UNIT - 1024 * UNIT


@triton.jit
def _interleaved(parts):
    """Parts [TOKENS, pairs, 2] -> [TOKENS, parts·pairs, 2]: the first pair of every part, then the second, …"""
    x = parts[0]
    if len(parts) > 1:
        x = tl.join(_interleaved(parts[::2]), _interleaved(parts[1::2]))
        x = tl.reshape(tl.permute(x, [0, 1, 3, 2]), [x.shape[0], x.shape[1] * 2, 2])
    return x


@triton.jit
def load_scales(page, offset, exists, SIDE: tl.constexpr, SEGMENT: tl.constexpr):
    """The scales of evenly spaced levels: float32 (see quantizers/even.py). `page` points to pages
    of bytes."""
    stored = tl.load(page + SIDE.meta[SEGMENT] + offset * SIDE.meta_stride[SEGMENT], mask=exists, other=0).to(tl.int32)
    return tl.where(stored < SMALLEST, 0.0, ((stored + LEAST) << DROPPED).to(tl.float32, bitcast=True))


@triton.constexpr_function
def middle(bits):
    """The middle of evenly spaced levels."""
    return (2**bits - 1) / 2


@triton.jit
def pick_codes(slots, mask, number, BITS: tl.constexpr, EIGHTH: tl.constexpr):
    """The codes with these numbers [columns] out of 8·EIGHTH codes per pointer of `slots`: int32[tokens, columns]."""
    codes = tl.zeros(mask.shape, tl.int32)
    for plane in tl.static_range(4):
        if BITS & (8 >> plane):
            codes |= _picked_plane(slots, mask, number, BITS, EIGHTH, 8 >> plane)
    return codes


@triton.jit
def _picked_plane(slots, mask, number, BITS: tl.constexpr, EIGHTH: tl.constexpr, WIDTH: tl.constexpr):
    """The bits of one plane, at their place in the codes."""
    BELOW: tl.constexpr = bits_below(BITS, WIDTH)
    PART: tl.constexpr = WIDTH * EIGHTH  # codes that share a shift; also the bytes of the plane
    packed = tl.load(slots[:, None] + (BELOW * EIGHTH + number % PART)[None, :], mask=mask, other=0).to(tl.int32)
    return ((packed >> (number // PART * WIDTH)[None, :]) & ((1 << WIDTH) - 1)) << BELOW


@triton.constexpr_function
def bits_below(bits, width):
    """How many bits of a code lie in the planes before the plane of this width."""
    return bits // (2 * width) * (2 * width)


# SGLang replaces `triton.next_power_of_2` by a function that kernels cannot call
power_of_two = triton.constexpr_function(sizes.power_of_two)
