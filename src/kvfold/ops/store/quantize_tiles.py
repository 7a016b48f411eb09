"""Tiles of transformed vectors to bytes of codes and metadata: quantize, pack.

A segment is computed in *parts*: runs of as many coordinates as its narrowest plane has bytes (see packing.py). A part
is a tensor [TOKENS, width]. Its width is the length of the run, rounded up to a power of two. All parts of a segment
have one layout. So codes are packed element by element.
"""

import torch
import triton
import triton.language as tl

from kvfold.ops.tiles import AFFINE, CODEBOOK, DROPPED, EVEN, LEAST, SMALLEST, bits_below
from kvfold.quantizers import even, lloyd_max
from kvfold.quantizers.affine import SMALLEST_SCALE

SMALLEST_INTERVAL = tl.constexpr(SMALLEST_SCALE)
UNSTORABLE = tl.constexpr(even.UNSTORABLE)
FINE = tl.constexpr(even.FINE)
BY_LARGEST = tl.constexpr(even.BY_LARGEST)
BELOW_HALF = tl.constexpr((1 << even.DROPPED - 1) - 1)  # of the lowest bit of a scale
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
ROUNDER = tl.constexpr(1.5 * 2**23)  # added to numbers below 2^22, it rounds them, half to even, into its low bits
SIXTEENTHS = tl.constexpr(1.5 * 2**19)  # rounds to multiples of 1/16
HALF_END = tl.constexpr(65520.0)  # from here on, float16 rounds to Inf
HALF_BITS = tl.constexpr(0x477FF000)  # the bits of HALF_END
BFLOAT_BITS = tl.constexpr(0x7F7F8000)  # the bits of the number from which on bfloat16 rounds to Inf
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)  # not run by Triton's interpreter
SIGN = tl.constexpr(-(2**31))
STEEP_BITS = tl.constexpr((120 + 127) << 23)
STEEP = tl.constexpr(2.0**120)  # differences of numbers from 2^-96 on, times this, are at least 1

LEVELS = tl.constexpr({bits: lloyd_max.levels(bits) for bits in range(1, lloyd_max.MAX_BITS + 1)})
BOUNDARIES = tl.constexpr({bits: tuple(lloyd_max.boundaries(bits).tolist()) for bits in LEVELS.value})


@triton.constexpr_function
def coded(dims, run, part):
    """How many coordinates a part has. The last parts may have fewer coordinates than codes: other codes are zeros."""
    return max(0, min(run, dims - part * run))


@triton.jit
def within(rows, LENGTH: tl.constexpr, WIDTH: tl.constexpr):
    mask = rows[:, None]
    if LENGTH < WIDTH:
        mask = mask & (tl.arange(0, WIDTH) < LENGTH)[None, :]
    return mask


@triton.jit
def _square(ys):
    """The squared length of vectors."""
    squares = ys[0] * ys[0]
    for part in tl.static_range(1, len(ys)):
        squares = tl.fma(ys[part], ys[part], squares)
    return tl.sum(squares, axis=1)


@triton.jit
def _spread(ys):
    """√(Σy⁴/Σy²)"""
    squares = tl.zeros_like(ys[0])
    fourths = squares
    for part in tl.static_range(len(ys)):
        square = ys[part] * ys[part]
        squares += square
        fourths = tl.fma(square, square, fourths)
    fourth, square = tl.split(tl.sum(tl.join(fourths, squares), axis=1))  # both at once
    return tl.sqrt(fourth) * tl.rsqrt(tl.maximum(square, TINY))


@triton.jit
def quantized(ys, clip, levels, boundaries, PACKING: tl.constexpr, SEGMENT: tl.constexpr):
    """Packed codes (see `_packed`; raw segments: numbers), whether their type can hold all, and metadata: float16
    [TOKENS, entries] or, for evenly spaced levels, bytes [TOKENS].
    """
    if PACKING.side.rule[SEGMENT] == AFFINE:
        segment = _affine(ys, clip, PACKING, SEGMENT)
    elif PACKING.side.rule[SEGMENT] == CODEBOOK:
        segment = _codebook(ys, levels, boundaries, PACKING, SEGMENT)
    elif PACKING.side.rule[SEGMENT] == EVEN:
        segment = _even(ys, PACKING, SEGMENT)
    else:
        segment = (ys, storable(ys, PACKING.bfloat))
    return segment


@triton.jit
def _affine(ys, clip, PACKING: tl.constexpr, SEGMENT: tl.constexpr):
    """As `affine.quantize`, but multiplies by 1/scale instead of dividing.

    The product alone may round to the wrong side of a tie between two codes. Where y is not rotated, and so has no
    error of its own, this is corrected. `near` is the code rounded to 1/16. The rest y − low − near·scale is added to
    it, in units of the scale. Ties are multiples of 1/16. Near them this is exact: near·scale has 23 bits at most.
    """
    TOP: tl.constexpr = (1 << PACKING.side.bits[SEGMENT]) - 1.0
    RUN: tl.constexpr = PACKING.side.run[SEGMENT]
    least = ys[0]
    most = ys[0]
    total = ys[0]
    for part in tl.static_range(1, len(ys)):
        least = tl.minimum(least, ys[part])
        most = tl.maximum(most, ys[part])
        total += ys[part]
    if ys[0].shape[1] > RUN:
        inside = (tl.arange(0, ys[0].shape[1]) < RUN)[None, :]
        least = tl.where(inside, least, float("inf"))
        most = tl.where(inside, most, float("-inf"))
    opposite, high = tl.split(tl.max(tl.join(-least, most), axis=1))  # both at once
    low = -opposite
    if clip is not None:
        limit = clip * _spread(ys)
        low = tl.where(low < -limit, -limit, low)
        high = tl.where(high > limit, limit, high)
    scale = (high - low) * (1 / TOP) if PACKING.rotated else tl.div_rn(high - low, TOP)
    sound = (scale < HALF_END) & (tl.abs(low) < HALF_END)
    if not PACKING.rotated:  # a rotation spreads NaN over the vector; without one, minima and maxima may not see it
        sound = sound & (tl.abs(tl.sum(total, axis=1)) < float("inf"))
    scale = scale.to(tl.float16)
    low = low.to(tl.float16)
    interval = tl.maximum(scale.to(tl.float32), SMALLEST_INTERVAL)
    inverse = (1.0 / interval)[:, None]
    codes = ()
    per_top = inverse * (1 / TOP)
    first = low.to(tl.float32)[:, None] * per_top
    for part in tl.static_range(len(ys)):
        if PACKING.rotated:
            code = _unit(tl.fma(ys[part], per_top, -first)) * TOP + ROUNDER
        else:
            above = ys[part] - low.to(tl.float32)[:, None]
            near = above * inverse + SIXTEENTHS - SIXTEENTHS
            code = near + (above - near * interval[:, None]) * inverse
            code = tl.minimum(tl.maximum(code, 0.0), TOP) + ROUNDER
        codes += (code.to(tl.int32, bitcast=True),)
    return _packed(codes, PACKING, SEGMENT), sound, tl.join(scale, low)


@triton.jit
def _codebook(ys, levels, boundaries, PACKING: tl.constexpr, SEGMENT: tl.constexpr):
    """As `codebook.quantize`, with roots and quotients that may be off by a bit or two of 24."""
    BITS: tl.constexpr = PACKING.side.bits[SEGMENT]
    DIMS: tl.constexpr = PACKING.side.dims[SEGMENT]
    square_of_norm = _square(ys)
    factor = (tl.rsqrt(tl.maximum(square_of_norm, TINY)) * DIMS**0.5)[:, None]
    if counted(BITS) == BITS - 1:
        packed, squares = _counted(ys, factor, PACKING, SEGMENT)
    else:
        codes = ()
        squares = tl.zeros_like(ys[0])
        for part in tl.static_range(len(ys)):
            code, squares = _searched(ys[part], factor, squares, levels, boundaries, BITS)
            if has_gaps(PACKING, SEGMENT):
                code = tl.where(_inside(PACKING, SEGMENT, part), code, 0)
            codes += (code,)
        packed = _packed(codes, PACKING, SEGMENT)
    norm = tl.sqrt(square_of_norm / (tl.sum(squares, axis=1) + DIMS * more_square(BITS, 0)))
    return packed, norm < HALF_END, norm.to(tl.float16)[:, None]


@triton.constexpr_function
def has_gaps(packing, segment):
    """Whether some columns of a segment have no coordinate."""
    return packing.side.parts[segment] * packing.width[segment] > packing.side.dims[segment]


@triton.jit
def _inside(PACKING: tl.constexpr, SEGMENT: tl.constexpr, PART: tl.constexpr):
    """Which columns of a part have a coordinate."""
    WIDTH: tl.constexpr = PACKING.width[SEGMENT]
    return (tl.arange(0, WIDTH) < coded(PACKING.side.dims[SEGMENT], PACKING.side.run[SEGMENT], PART))[None, :]


@triton.jit
def _counted(ys, factor, PACKING: tl.constexpr, SEGMENT: tl.constexpr):
    """Packed codes of the levels nearest to y·factor, and the squares of these levels, each less the smallest, summed
    over parts.

    Let s be the sign of y, and k the number of boundaries below its magnitude. The code is 2^(BITS-1) + k, or
    2^(BITS-1) - 1 - k if s = -1. Twice a code is s times a number, plus a constant. So is twice the code without its
    highest bit, which is the sign. So a byte of several codes is computed as a sum of products. In every byte the
    constants add up to 255.
    """
    BITS: tl.constexpr = PACKING.side.bits[SEGMENT]
    WIDTH: tl.constexpr = lowest_plane(BITS)
    FIRST: tl.constexpr = 1 if WIDTH == BITS else 1 - (1 << WIDTH)
    RUNS: tl.constexpr = len(ys) * WIDTH // 8
    squares = tl.zeros_like(ys[0])
    signs = tl.full(ys[0].shape, ROUNDER + 255, tl.float32)
    bytes = ()
    for run in tl.static_range(RUNS):
        byte = tl.full(ys[0].shape, ROUNDER + 255, tl.float32)
        for j in tl.static_range(8 // WIDTH):
            steep, count, squares = _count(ys[run + j * RUNS], factor, squares, BITS, BITS - 1, FIRST, 1 << (WIDTH * j))
            if has_gaps(PACKING, SEGMENT):  # there, code 0
                inside = _inside(PACKING, SEGMENT, run + j * RUNS)
                steep = tl.where(inside, steep, -STEEP)
                count = tl.where(inside, count, ((1 << WIDTH) - 1) * (1 << (WIDTH * j)) / STEEP)
            byte = tl.fma(steep, count, byte)
            if WIDTH < BITS:
                signs = tl.fma(steep, (1 << (run + j * RUNS)) / STEEP, signs)
        bytes += (byte.to(tl.int32, bitcast=True) >> 1,)
    planes = (bytes,)
    if WIDTH < BITS:
        planes += ((signs.to(tl.int32, bitcast=True) >> 1,),)
    return planes, squares


@triton.constexpr_function
def lowest_plane(bits):
    """The width of the plane of a code's lowest bits, if it is the only plane or the next has the sign alone."""
    return bits if bits & (bits - 1) == 0 else bits - 1


@triton.jit
def _even(ys, PACKING: tl.constexpr, SEGMENT: tl.constexpr):
    """As `even.quantize`, but multiplies by 1/step instead of dividing. Under a scale of 0, codes may be any."""
    BITS: tl.constexpr = PACKING.side.bits[SEGMENT]
    TOP: tl.constexpr = (1 << BITS) - 1.0
    DIMS: tl.constexpr = PACKING.side.dims[SEGMENT]
    GAPS: tl.constexpr = PACKING.side.parts[SEGMENT] * PACKING.width[SEGMENT] - DIMS
    square = _square(ys)
    size = _largest(ys) if BITS >= BY_LARGEST else tl.sqrt(square * (1 / DIMS))
    per_step = 1 / tl.maximum(size * multiple(BITS, 0), TINY)
    product, of_levels = _products(ys, per_step, TOP)
    best = product * (product / (of_levels - GAPS / 4))  # levels without a coordinate are 1/2 or -1/2
    for i in tl.static_range(1, steps(BITS)):
        tried = 1 / tl.maximum(size * multiple(BITS, i), TINY)
        with_tried, of_levels = _products(ys, tried, TOP)
        cosine = with_tried * (with_tried / (of_levels - GAPS / 4))
        per_step = tl.where(cosine > best, tried, per_step)
        product = tl.where(cosine > best, with_tried, product)
        best = tl.maximum(cosine, best)
    scale = tl.where(square > 0, square / product, square)
    # the nearest 8-bit scale, ties to even
    bits = scale.to(tl.int32, bitcast=True)
    nearest = ((bits + BELOW_HALF + ((bits >> DROPPED) & 1)) >> DROPPED) - LEAST
    stored = tl.where(nearest < SMALLEST, 0, nearest)
    if BITS >= FINE:
        per_step = 1 / ((stored + LEAST) << DROPPED).to(tl.float32, bitcast=True)
    codes = ()
    for part in tl.static_range(len(ys)):
        codes += (_rounded(ys[part], per_step, TOP).to(tl.int32, bitcast=True),)
    return _packed(codes, PACKING, SEGMENT), (scale < float("inf")) & (stored < UNSTORABLE), stored


@triton.jit
def _largest(ys):
    """The largest magnitude."""
    largest = tl.abs(ys[0])
    for part in tl.static_range(1, len(ys)):
        largest = tl.maximum(largest, tl.abs(ys[part]))
    return tl.max(largest, axis=1)


@triton.jit
def _products(ys, per_step, TOP: tl.constexpr):
    """Products of y with the nearest levels, and of these levels with themselves. `per_step` is 1/step."""
    with_y = tl.zeros_like(ys[0])
    squares = tl.zeros_like(ys[0])
    for part in tl.static_range(len(ys)):
        level = _rounded(ys[part], per_step, TOP) - ROUNDER - TOP / 2
        with_y = tl.fma(ys[part], level, with_y)
        squares = tl.fma(level, level, squares)
    return tl.split(tl.sum(tl.join(with_y, squares), axis=1))  # both at once


@triton.jit
def _rounded(y, per_step, TOP: tl.constexpr):
    """ROUNDER plus the codes up to TOP of the nearest levels."""
    return _unit(y * (per_step * (1 / TOP))[:, None] + 0.5) * TOP + ROUNDER


@triton.constexpr_function
def steps(bits):
    """How many steps are tried."""
    return len(even.STEPS[bits])


@triton.constexpr_function
def multiple(bits, i):
    return even.STEPS[bits][i]


@triton.jit
def _unit(x):
    """Between 0 and 1. Such clamping costs nothing: it is part of the instruction that computes x."""
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _count(
    y, factor, squares, BITS: tl.constexpr, COUNTED: tl.constexpr, FIRST: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """STEEP with the sign of y. (FIRST + 2·k)·UNIT/STEEP: k boundaries are below |y·factor|, of those that the first
    COUNTED bits of a magnitude's code tell apart. And, if these are all its bits, `squares` plus the square of the
    nearest level, less the smallest such square.

    k is a sum of 0 and 1. Levels are symmetric. On a boundary other than 0, k is that of the smaller magnitude. For NaN
    it is any.
    """
    y = tl.fma(y, factor, -TINY)  # a little below: 0 belongs to the lower level
    steep = (y.to(tl.int32, bitcast=True) & SIGN | STEEP_BITS).to(tl.float32, bitcast=True)
    count = tl.full(y.shape, FIRST * UNIT / STEEP, tl.float32)
    for i in tl.static_range(1, 1 << COUNTED):
        above = _unit(tl.fma(y, steep, -STEEP * boundary(BITS, i << (BITS - 1 - COUNTED))))
        count = tl.fma(above, 2 * UNIT / STEEP, count)
        if BITS == COUNTED + 1:
            squares = tl.fma(above, more_square(BITS, i), squares)
    return steep, count, squares


@triton.jit
def _searched(y, factor, squares, levels, boundaries, BITS: tl.constexpr):
    """The code of the level nearest to y·factor, and `squares` as for `_count`. The first bits of the code are counted.
    A binary search through the table finds the others.
    """
    COUNTED: tl.constexpr = counted(BITS)
    steep, count, _ = _count(y, factor, squares, BITS, COUNTED, 1, 1)
    twice = tl.fma(steep, count, ROUNDER + (2 << COUNTED) - 1).to(tl.int32, bitcast=True)
    code = ((twice >> 1) & ((2 << COUNTED) - 1)) << (BITS - 1 - COUNTED)
    y = tl.fma(y, factor, -TINY)
    for i in tl.static_range(COUNTED + 1, BITS):
        half = (1 << BITS) >> (i + 1)
        code = tl.where(y <= tl.load(boundaries + (1 << BITS) - 1 + code + half), code, code + half)
    level = tl.load(levels + (1 << BITS) + code)
    return code, squares + tl.fma(level, level, -more_square(BITS, 0))


@triton.constexpr_function
def counted(bits):
    """How many bits of a magnitude's code are found by counting."""
    return min(bits - 1, 4)


@triton.constexpr_function
def boundary(bits, code):
    """Below the level of a magnitude's code."""
    return BOUNDARIES.value[bits][(1 << bits - 1) + code - 1]


@triton.constexpr_function
def more_square(bits, code):
    """The square of a magnitude's level, less that of the magnitude below."""
    levels, middle = LEVELS.value[bits], 1 << bits - 1
    return levels[middle + code] ** 2 - (levels[middle + code - 1] ** 2 if code else 0)


@triton.jit
def _packed(codes, PACKING: tl.constexpr, SEGMENT: tl.constexpr):
    """The codes of all parts, packed: per plane, its runs of bytes. Bits from 2^8 on are any.

    Byte j of run r of a plane holds code j of part r in its low bits, then code j of part r + RUNS, ...
    """
    planes = ()
    for plane in tl.static_range(4):
        if PACKING.side.bits[SEGMENT] & (8 >> plane):
            planes += (_packed_plane(codes, PACKING.side.bits[SEGMENT], 8 >> plane),)
    return planes


@triton.jit
def _packed_plane(codes, BITS: tl.constexpr, WIDTH: tl.constexpr):
    LOW: tl.constexpr = bits_below(BITS, WIDTH)
    # mask off the other planes of a code; the bits of ROUNDER are so high that no byte gets them
    MASK: tl.constexpr = ((1 << WIDTH) - 1) << LOW if BITS != WIDTH else -1
    RUNS: tl.constexpr = len(codes) * WIDTH // 8
    runs = ()
    for i in tl.static_range(RUNS):
        byte = codes[i] & MASK
        for j in tl.static_range(1, 8 // WIDTH):
            byte += (codes[i + j * RUNS] & MASK) << (j * WIDTH)
        runs += (byte >> LOW,)
    return runs


@triton.jit
def store_codes(planes, slots, rows, PACKING: tl.constexpr, SEGMENT: tl.constexpr):
    """Store packed codes of a segment, from these pointers on; the inverse of `tiles.load_codes`."""
    RUN: tl.constexpr = PACKING.side.run[SEGMENT]
    WIDTH: tl.constexpr = PACKING.width[SEGMENT]
    byte = slots[:, None] + tl.arange(0, WIDTH)[None, :]
    for plane in tl.static_range(len(planes)):
        for i in tl.static_range(len(planes[plane])):
            tl.store(byte, planes[plane][i].to(tl.uint8), mask=within(rows, RUN, WIDTH))
            byte += RUN


@triton.jit
def store_parts(ys, pointers, rows, PACKING: tl.constexpr, SEGMENT: tl.constexpr):
    """All coordinates of a segment, from each pointer on."""
    column = tl.arange(0, ys[0].shape[1])[None, :]
    for part in tl.static_range(len(ys)):
        mask = within(rows, coded(PACKING.side.dims[SEGMENT], PACKING.side.run[SEGMENT], part), ys[0].shape[1])
        tl.store(pointers[:, None] + part * PACKING.side.run[SEGMENT] + column, ys[part], mask=mask)


@triton.jit
def without_first(ys, first, rows, PACKING: tl.constexpr, SEGMENT: tl.constexpr):
    """The parts of a segment, in `rows` less `Codec.first` of the head. There are few such rows, and mostly none."""
    RUN: tl.constexpr = PACKING.side.run[SEGMENT]
    if tl.max(rows.to(tl.int32), axis=0) > 0:
        left = ()
        for part in tl.static_range(len(ys)):
            mask = within(rows, coded(PACKING.side.dims[SEGMENT], RUN, part), PACKING.width[SEGMENT])
            column = PACKING.side.start[SEGMENT] + part * RUN + tl.arange(0, PACKING.width[SEGMENT])
            left += (ys[part] - tl.load((first + column)[None, :], mask=mask, other=0.0),)
        ys = left
    return ys


@triton.jit
def storable(ys, BFLOAT: tl.constexpr):
    """Per vector, whether 16 bits can hold all its numbers."""
    most = tl.abs(ys[0])
    for part in tl.static_range(1, len(ys)):
        most = tl.maximum(most, tl.abs(ys[part]), propagate_nan=tl.PropagateNan.ALL)
    bits = most.to(tl.int32, bitcast=True)  # order like magnitudes; those of NaN are largest
    return tl.max(bits, axis=1) < (BFLOAT_BITS if BFLOAT else HALF_BITS)


@triton.jit
def sixteen_bits(ys, rows, BFLOAT: tl.constexpr):
    """float32 -> the bits of bfloat16 or float16, 0 except in `rows`."""
    rounded = ()
    for part in tl.static_range(len(ys)):
        if BFLOAT and COMPILED:
            number = ys[part].to(tl.bfloat16).to(tl.int16, bitcast=True)
        elif BFLOAT:  # the interpreter would truncate
            bits = ys[part].to(tl.int32, bitcast=True)
            number = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
        else:
            number = ys[part].to(tl.float16).to(tl.int16, bitcast=True)
        rounded += (tl.where(rows[:, None], number, 0),)
    return rounded
