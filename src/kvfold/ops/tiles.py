"""What the Triton kernels of all ops share: how they see a slot, and the codes of many slots as a tile.

A segment is `parts` runs of as many coordinates as its narrowest plane has bytes (see packing.py), and every plane is
runs of as many bytes. The columns of a tile are the first two coordinates of every part, then the next two, …: a thread
that has loaded bytes keeps all codes in them, and computes with two at a time. Queries are loaded, and outputs stored,
in the same order.
"""

from functools import lru_cache
from typing import NamedTuple

import triton
import triton.language as tl

from kvfold.layout import META_BYTES, ODD_BYTES, PageLayout, Rule, SlotLayout
from kvfold.ops import sizes

AFFINE = tl.constexpr(0)
CODEBOOK = tl.constexpr(1)
RAW = tl.constexpr(2)
CHANNEL = tl.constexpr(3)
_RULES: dict[Rule, int] = {"affine": 0, "codebook": 1, "raw": 2, "channel": 3}


class Side(NamedTuple):
    """The keys or the values of a page, for kernels: numbers of each segment, then of the whole."""

    start: tuple[int, ...]  # the first coordinate
    dims: tuple[int, ...]
    eighth: tuple[int, ...]  # of the codes that are stored
    parts: tuple[int, ...]
    run: tuple[int, ...]  # codes of a part
    width: tuple[int, ...]  # its columns in a tile
    bits: tuple[int, ...]
    rule: tuple[int, ...]
    boosted: tuple[int, ...]  # coordinates with twice the bits
    byte: tuple[int, ...]  # where its codes begin in the codes of a slot
    entry: tuple[int, ...]  # where its metadata begin in the metadata of a slot
    head_dim: int
    codes: int  # byte of a page at which the codes begin
    code_stride: int  # bytes
    meta: int  # 16-bit entry of a page at which the metadata begin
    meta_stride: int  # entries


def unsupported(slot: SlotLayout) -> str | None:
    """Why no kernel writes slots of this layout, and none reads them but, perhaps, the portable `attend`, or None."""
    return slot.more_than_a_token or _odd(slot)


def unsupported_side(layout: PageLayout) -> tuple[str, str] | None:
    """Whether it is the keys or the values of such pages that `unsupported` says no to, and why; None: neither."""
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
        if slot.per_page and layout.page_size % 16:  # a tile lies in one page, and tensor cores take 16 tokens at least
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
    return _side(layout.key, layout.offsets[0], layout.offsets[2])


def value_side(layout: PageLayout) -> Side:
    return _side(layout.value, layout.offsets[1], layout.offsets[3])


@lru_cache
def _side(slot: SlotLayout, codes: int, meta: int) -> Side:
    if reason := unsupported(slot):
        raise ValueError(f"no kernel reads or writes this slot, as {reason}: {slot}")
    return _numbers(slot, codes, meta)


@lru_cache
def attended_sides(layout: PageLayout) -> list[tuple[Side, Side]]:
    """Keys and values for the portable `attend`: of all KV heads, or of each, where they have layouts of their own."""
    if reason := unreadable(layout):
        raise ValueError(f"{reason}: {layout}")
    key, value, at = layout.key, layout.value, layout.offsets
    return [
        (_of_head(key, head, at[0], at[2]), _of_head(value, head, at[1], at[3]))
        for head in range(len(key.heads or value.heads or (key,)))
    ]


def _of_head(slot: SlotLayout, head: int, codes: int, meta: int) -> Side:
    side = _numbers(slot.heads[head] if slot.heads else slot, codes, meta)
    return side._replace(code_stride=slot.code_bytes, meta_stride=slot.meta_entries)


def _numbers(slot: SlotLayout, codes: int, meta: int) -> Side:
    rows = []
    for segment, place in zip(slot.segments, slot.places, strict=True):
        count = max(1, 8 // (segment.bits & -segment.bits))
        run = segment.padded_dims // count
        # tensor cores take 16 columns at least; those of several parts, which share bytes, Triton (3.6) multiplies
        # wrongly where they are fewer than 32
        width = max((32 if count > 1 else 16) // count, sizes.power_of_two(run))
        of_codes = (segment.start, segment.dims, segment.padded_dims // 8, count, run, width, segment.bits)
        rows.append((*of_codes, _RULES[segment.rule], segment.boosted, *place))
    start, dims, eighths, parts, runs, widths, bits, rule, boosted, at_byte, at_entry = zip(*rows, strict=True)
    return Side(
        start, dims, eighths, parts, runs, widths, bits, rule, boosted, at_byte, at_entry,
        slot.dims, codes, slot.code_bytes, meta // META_BYTES, slot.meta_entries,
    )  # fmt: skip


@triton.jit
def coordinates(SIDE: tl.constexpr, SEGMENT: tl.constexpr):
    """The coordinate of every column of a segment, and whether there is one."""
    PARTS: tl.constexpr = SIDE.parts[SEGMENT]
    column = tl.arange(0, PARTS * SIDE.width[SEGMENT])
    j = column
    if PARTS > 1:  # else they follow each other, and the compiler can tell
        j = column // (2 * PARTS) * 2 + column % 2
    within = column // 2 % PARTS * SIDE.run[SEGMENT] + j
    return SIDE.start[SEGMENT] + within, (j < SIDE.run[SEGMENT]) & (within < SIDE.dims[SEGMENT])


@triton.jit
def unpack(slots, SIDE: tl.constexpr, SEGMENT: tl.constexpr):
    """The codes of a segment, float16[TOKENS, parts·width], out of the codes of slots at pointers `slots`."""
    PARTS: tl.constexpr = SIDE.parts[SEGMENT]
    parts = ()
    for part in tl.static_range(PARTS):
        x = _part(slots + SIDE.byte[SEGMENT], SIDE, SEGMENT, part, SIDE.bits[SEGMENT])
        parts += (tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]),)
    x = _interleaved(parts)
    return tl.reshape(x, [x.shape[0], x.shape[1] * 2])


@triton.jit
def _part(slots, SIDE: tl.constexpr, SEGMENT: tl.constexpr, PART: tl.constexpr, BITS: tl.constexpr):
    """What the planes that make up BITS are in the codes of a part. Parts have bytes in common, which the compiler
    loads once."""
    WIDTH: tl.constexpr = BITS & -BITS
    codes = _plane(slots, SIDE, SEGMENT, PART, WIDTH)
    if BITS > WIDTH:
        codes += _part(slots, SIDE, SEGMENT, PART, BITS - WIDTH)
    return codes


@triton.jit
def _plane(slots, SIDE: tl.constexpr, SEGMENT: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr):
    """What the bits of one plane are in the codes of a part. In the low bits of the float16 1024 a byte adds its number
    to that, so that its bits need neither be shifted nor converted."""
    RUN: tl.constexpr = SIDE.run[SEGMENT]
    RUNS: tl.constexpr = SIDE.parts[SEGMENT] * WIDTH // 8
    BELOW: tl.constexpr = bits_below(SIDE.bits[SEGMENT], WIDTH)
    SHIFT: tl.constexpr = PART // RUNS * WIDTH
    UNIT: tl.constexpr = 2.0 ** (BELOW - SHIFT)
    j = tl.arange(0, SIDE.width[SEGMENT])
    byte = slots[:, None] + (BELOW * SIDE.eighth[SEGMENT] + PART % RUNS * RUN + j)[None, :]
    packed = tl.load(byte, mask=(j < RUN)[None, :], other=0).to(tl.int16) | 0x6400
    x = (packed & (0x6400 | (((1 << WIDTH) - 1) << SHIFT))).to(tl.float16, bitcast=True)
    if UNIT > 1:  # 1024 times that may be more than float16 holds
        return (x - 1024.0) * UNIT
    else:
        return x * UNIT - 1024 * UNIT


@triton.jit
def _interleaved(parts):
    """Parts [TOKENS, pairs, 2] -> [TOKENS, parts·pairs, 2]: the first pairs of all, then the second ones, …"""
    x = parts[0]
    if len(parts) > 1:
        x = tl.join(_interleaved(parts[::2]), _interleaved(parts[1::2]))
        x = tl.reshape(tl.permute(x, [0, 1, 3, 2]), [x.shape[0], x.shape[1] * 2, 2])
    return x


@triton.jit
def pick(slots, mask, number, BITS: tl.constexpr, EIGHTH: tl.constexpr):
    """Codes by `number` [columns], out of 8·EIGHTH codes at each of pointers `slots`: int32[tokens, columns]."""
    codes = tl.zeros(mask.shape, tl.int32)
    for plane in tl.static_range(4):
        if BITS & (8 >> plane):
            codes |= _picked_plane(slots, mask, number, BITS, EIGHTH, 8 >> plane)
    return codes


@triton.jit
def _picked_plane(slots, mask, number, BITS: tl.constexpr, EIGHTH: tl.constexpr, WIDTH: tl.constexpr):
    """The bits of one plane, at their place in the codes."""
    BELOW: tl.constexpr = bits_below(BITS, WIDTH)
    PART: tl.constexpr = WIDTH * EIGHTH  # codes of one shift, and bytes of the plane
    packed = tl.load(slots[:, None] + (BELOW * EIGHTH + number % PART)[None, :], mask=mask, other=0).to(tl.int32)
    return ((packed >> (number // PART * WIDTH)[None, :]) & ((1 << WIDTH) - 1)) << BELOW


@triton.constexpr_function
def bits_below(bits, width):
    """How many bits of a code lie in planes before that of `width`."""
    return bits // (2 * width) * (2 * width)


# Triton's own cannot be called in kernels where another package has replaced it, as SGLang does
power_of_two = triton.constexpr_function(sizes.power_of_two)
