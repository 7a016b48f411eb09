"""`store` in one launch, keys and values together. A program packs a block of tokens of one KV head.

A segment is computed in *parts*, runs of as many coordinates as its narrowest plane has bytes (see packing.py). Each is
a tensor [BLOCK, width], with width the power of two from the run up. All have the same layout, so that codes are packed
element by element. 16-bit floats are stored by their bits, as int16.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvfold.codec import Codec
from kvfold.ops import tiles
from kvfold.ops.pages import LayerPages
from kvfold.ops.rotate import head_stride, terms_and_shift
from kvfold.ops.sizes import ceil_div, power_of_two
from kvfold.ops.tiles import AFFINE, CODEBOOK, RAW, Side, bits_below
from kvfold.quantizers import lloyd_max
from kvfold.quantizers.affine import SMALLEST_SCALE
from kvfold.transforms import Transform

SMALLEST = tl.constexpr(SMALLEST_SCALE)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
ROUNDER = tl.constexpr(1.5 * 2**23)  # added to numbers below 2^22 it rounds them, half to even, into its low bits
SIXTEENTHS = tl.constexpr(1.5 * 2**19)  # rounds to multiples of 1/16
HALF_END = tl.constexpr(65520.0)  # from here on float16 rounds to Inf
HALF_BITS = tl.constexpr(0x477FF000)  # of that number
BFLOAT_BITS = tl.constexpr(0x7F7F8000)  # of the one from which on bfloat16 does
NARROWEST = 16  # columns that tensor cores take
GUESSED = tl.constexpr(24)  # ranks up to which limits are guessed


class Blocks(NamedTuple):
    """What a program takes."""

    tokens: int
    rows: int  # of a matrix at a time, at most 128; the next ones are on their way where there are stages for them
    warps: int
    stages: int
    registers: int | None  # of a thread at most


FEW = Blocks(16, 128, 4, 1, None)
FEW_TERMS = Blocks(16, 64, 4, 3, None)  # for matrices of several terms
MANY = Blocks(64, 128, 4, 1, 128)  # four programs on a multiprocessor
MANY_WIDE = Blocks(64, 32, 8, 3, None)  # of more than 128 coordinates
MANY_VECTORS = 1 << 13  # from which on larger blocks, which read matrices less often, leave little of a GPU idle
AS_IT_IS = Transform()


class _Source(NamedTuple):
    """The keys or values of a step."""

    x: Tensor  # [tokens, kv_heads, d], copied only where sequences and tokens are no one dimension
    token: int  # strides
    head: int


class Operands(NamedTuple):
    """A transform. Its columns are those of all parts here, and coordinates in turn.py."""

    matrices: tuple[Tensor, ...]  # 16-bit [kv_heads or 1, rows, columns], whose sum times factor is A; none: A = 1
    head: int  # stride of matrices
    shift: Tensor | None  # float32[kv_heads, columns]: −mean·A


class _Plan(NamedTuple):
    """How the keys or the values of a page are computed: numbers of each segment, then of the whole."""

    side: Side
    width: tuple[int, ...]  # columns of a part
    column: tuple[int, ...]  # the first of all its parts
    columns: int
    alike: bool  # whether all widths are the same
    factor: float
    rotated: bool
    clipped: bool
    bfloat: bool  # whether floats of raw segments are bfloat16


class _Memory(NamedTuple):
    shadow_of: Tensor  # see pages.py
    pool: Tensor
    entries: Tensor  # the pool in 16 bits
    shadows: Tensor
    new: Tensor | None  # [2, tokens, kv_heads, d]
    faults: Tensor
    levels: Tensor  # see tiles.py
    boundaries: Tensor


def store(pages: LayerPages, k: Tensor, v: Tensor, overlaps: bool = False) -> tuple[Tensor, Tensor] | None:
    """As `naive.store`, for 16-bit k and v. With `overlaps`, it is launched before the kernel before it ends, and waits
    for that; and the next may begin beside it.

    Where a vector cannot be stored, its metadata are zeros. Its codes may be any then, and decode to zero.
    """
    check(pages, k, v)
    new = torch.empty(2, *k.shape, dtype=pages.shadows.dtype, device=k.device) if pages.windows else None
    _launch(pages, pages.key.transform, k, pages.value.transform, v, new, overlaps)
    return None if new is None else (new[0], new[1])


def pack(pages: LayerPages, kv: Tensor, overlaps: bool = False) -> None:
    """`store` of what is transformed already, and copied (see turn.py): float32[2, tokens, kv_heads, d].

    With `overlaps`, it runs beside the kernel before it, which must have waited for these numbers, and does not end
    before that; and the next may begin beside it.
    """
    _launch(pages, AS_IT_IS, kv[0], AS_IT_IS, kv[1], None, overlaps, late=overlaps)


def check(pages: LayerPages, k: Tensor, v: Tensor) -> None:
    expected = (len(pages.step.locations), pages.pool.shape[1], pages.layout.key.dims)
    for x in (k, v):
        if x.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"the kernel stores bfloat16 and float16, not {x.dtype}")
        if x.shape != expected:
            raise ValueError(f"{tuple(x.shape)} are not the {expected} [tokens, kv_heads, d] of the step")


def _launch(
    pages: LayerPages,
    of_keys: Transform,
    k: Tensor,
    of_values: Transform,
    v: Tensor,
    new: Tensor | None,
    overlaps: bool,
    late: bool = False,
) -> None:
    (tokens, kv_heads, dims), step = k.shape, pages.step
    memory = _Memory(
        step.shadow_of,
        pages.pool,
        pages.pool.view(torch.int16),
        pages.shadows.view(torch.int16),
        None if new is None else new.view(torch.int16),
        pages.faults,
        lloyd_max.level_table(k.device),
        lloyd_max.boundary_table(k.device),
    )
    key, KEY = _prepared(pages.key, of_keys, tiles.key_side(pages.layout), k)
    value, VALUE = _prepared(pages.value, of_values, tiles.value_side(pages.layout), v)
    ranks = _clip_rank(pages.key), _clip_rank(pages.value)
    if tokens * kv_heads < MANY_VECTORS:
        blocks = FEW if max(len(key.matrices), len(value.matrices)) < 2 else FEW_TERMS
    else:
        blocks = MANY if dims <= 128 else MANY_WIDE
    _store[ceil_div(tokens, blocks.tokens), kv_heads, 2](
        _source(k), key, KEY, _source(v), value, VALUE, *ranks, step.locations, memory, tokens,
        pages.shadows.dtype == torch.bfloat16, pages.layout.page_size, pages.layout.page_bytes, blocks.tokens,
        blocks.rows, overlaps, late, num_warps=blocks.warps, num_stages=blocks.stages, maxnreg=blocks.registers,
        **({"launch_pdl": True} if overlaps else {}),
    )  # fmt: skip


def _source(x: Tensor) -> _Source:
    x = x if x.stride(-1) == 1 else x.contiguous()
    return _Source(x, x.stride(0), x.stride(1))


def _clip_rank(codec: Codec) -> int:
    """Which magnitude of a vector, from the largest down, is the limit of all; 0: none."""
    return 0 if codec.clip is None else codec.layout.dims - codec.kept + 1


def _prepared(codec: Codec, transform: Transform, side: Side, x: Tensor) -> tuple[Operands, _Plan]:
    clipped, bfloat = codec.clip is not None, codec.wide == torch.bfloat16
    return transform.once(_prepare, side, clipped, bfloat, x.dtype, x.device)


def _prepare(
    transform: Transform, side: Side, clipped: bool, bfloat: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Operands, _Plan]:
    """Of the keys or values of a layer, for x of this type."""
    rotated = transform.rotation is not None
    parts, runs = side.parts, side.run
    least = NARROWEST if rotated else 1
    widths = tuple(max(least // count, power_of_two(run)) for count, run in zip(parts, runs, strict=True))
    order = [  # the coordinate of every column, -1 where it has none
        start + part * run + column if column < coded(stored, run, part) else -1
        for start, stored, count, run, width in zip(side.start, side.dims, parts, runs, widths, strict=True)
        for part in range(count)
        for column in range(width)
    ]
    first = accumulate((count * width for count, width in zip(parts, widths, strict=True)), initial=0)
    terms, factor, shift = terms_and_shift(transform, side.head_dim, dtype, device)
    rows = -side.head_dim % 128
    matrices = tuple(pad(term, (0, 1, 0, rows))[..., order].contiguous() for term in terms)
    shift = None if shift is None else pad(shift, (0, 1))[..., order].contiguous()  # column -1 is zero
    numbers = (tuple(first)[:-1], len(order), len(set(widths)) == 1, factor, rotated, clipped, bfloat)
    return Operands(matrices, head_stride(matrices), shift), _Plan(side, widths, *numbers)


@triton.constexpr_function
def coded(dims, run, part):
    """Coordinates of a part: as many as codes, or fewer at the end, where zeros fill whole bytes."""
    return max(0, min(run, dims - part * run))


@triton.jit(do_not_specialize=["key_rank", "value_rank", "tokens"], do_not_specialize_on_alignment=["slots"])
def _store(
    k, key, KEY: tl.constexpr, v, value, VALUE: tl.constexpr, key_rank, value_rank, slots, memory, tokens,
    BFLOAT: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_BYTES: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        if not LATE:
            gdc_wait()
        gdc_launch_dependents()
    if tl.program_id(2) == 0:
        _store_side(k, key, key_rank, slots, memory, tokens, 0, KEY, BFLOAT, PAGE_SIZE, PAGE_BYTES, BLOCK, ROWS)
    else:
        _store_side(v, value, value_rank, slots, memory, tokens, 1, VALUE, BFLOAT, PAGE_SIZE, PAGE_BYTES, BLOCK, ROWS)
    if LATE:
        gdc_wait()


@triton.jit
def _store_side(
    source, operands, rank, slots, memory, tokens, WHICH: tl.constexpr, PLAN: tl.constexpr, BFLOAT: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_BYTES: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    SEGMENTS: tl.constexpr = len(PLAN.side.parts)
    head = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = token < tokens
    slot = tl.load(slots + token, mask=exists, other=-1)
    stored = slot >= 0

    vectors = source.x + token.to(tl.int64) * source.token + head * source.head
    ys = ()  # of each segment its parts
    if PLAN.rotated:
        ys = _rotated(vectors, operands, exists, head, PLAN, ROWS)
    else:
        for i in tl.static_range(SEGMENTS):
            ys += (_loaded(vectors, operands, exists, head, PLAN, i),)

    sound = stored
    if memory.new is not None:
        for i in tl.static_range(SEGMENTS):
            sound = sound & below(ys[i], BFLOAT)
    clipped = ys
    if PLAN.clipped:
        limit = _largest((_joined(ys),) if PLAN.alike else ys, stored, rank)[:, None]
        clipped = ()
        for i in tl.static_range(SEGMENTS):
            clipped += (_clamped(ys[i], limit),)
    quantized = ()
    for i in tl.static_range(SEGMENTS):
        quantized += (_quantized(clipped[i], memory.levels, memory.boundaries, PLAN, i),)
        sound = sound & quantized[i][1]
    tl.store(memory.faults + slot, 1, mask=stored & ~sound)

    page = slot // PAGE_SIZE
    place = slot % PAGE_SIZE
    codes = memory.pool + (page * heads + head) * PAGE_BYTES + PLAN.side.codes + place * PLAN.side.code_stride
    entries = memory.entries + (page * heads + head) * (PAGE_BYTES // 2)
    for i in tl.static_range(SEGMENTS):
        if PLAN.side.rule[i] == RAW:
            floats = entries + (PLAN.side.codes + PLAN.side.byte[i]) // 2 + place * (PLAN.side.code_stride // 2)
            _store_parts(sixteen_bits(quantized[i][0], sound, PLAN.bfloat), floats, stored, PLAN, i)
        else:
            _store_codes(quantized[i][0], codes + PLAN.side.byte[i], stored, PLAN, i)
            meta = entries + PLAN.side.meta + PLAN.side.entry[i] + place * PLAN.side.meta_stride
            at = meta[:, None] + tl.arange(0, quantized[i][2].shape[1])[None, :]
            tl.store(at, tl.where(sound[:, None], quantized[i][2].to(tl.int16, bitcast=True), 0), mask=stored[:, None])

    if memory.new is not None:
        shadow = tl.load(memory.shadow_of + page, mask=stored, other=-1)
        in_shadow = memory.shadows + (((shadow * heads + head) * 2 + WHICH) * PAGE_SIZE + place) * PLAN.side.head_dim
        in_new = memory.new + ((WHICH * tokens + token.to(tl.int64)) * heads + head) * PLAN.side.head_dim
        for i in tl.static_range(SEGMENTS):
            wide = sixteen_bits(ys[i], sound, BFLOAT)
            _store_parts(wide, in_new + PLAN.side.start[i], exists, PLAN, i)
            _store_parts(wide, in_shadow + PLAN.side.start[i], shadow >= 0, PLAN, i)


@triton.jit
def _loaded(vectors, operands, exists, head, PLAN: tl.constexpr, SEGMENT: tl.constexpr):
    """x − mean: the parts of a segment, 0 in columns without a coordinate."""
    PARTS: tl.constexpr = PLAN.side.parts[SEGMENT]
    WIDTH: tl.constexpr = PLAN.width[SEGMENT]
    RUN: tl.constexpr = PLAN.side.run[SEGMENT]
    ys = ()
    for part in tl.static_range(PARTS):
        first = vectors + PLAN.side.start[SEGMENT] + part * RUN
        y = _run(first, exists, coded(PLAN.side.dims[SEGMENT], RUN, part), WIDTH).to(tl.float32)
        if operands.shift is not None:
            column = PLAN.column[SEGMENT] + part * WIDTH + tl.arange(0, WIDTH)
            y += tl.load(operands.shift + head * PLAN.columns + column)[None, :]
        ys += (y,)
    return ys


@triton.jit
def _rotated(vectors, operands, exists, head, PLAN: tl.constexpr, ROWS: tl.constexpr):
    """(x − mean)·A: of each segment its parts, 0 in columns without a coordinate."""
    sums = ()
    shifts = ()
    for i in tl.static_range(len(PLAN.side.parts)):
        sums += (tl.zeros([vectors.shape[0], PLAN.side.parts[i] * PLAN.width[i]], tl.float32),)
        if operands.shift is not None:
            shifts += (tl.load(operands.shift + head * PLAN.columns + _columns(PLAN, i))[None, :],)
    for first in range(0, PLAN.side.head_dim, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = exists[:, None] & (row < PLAN.side.head_dim)[None, :]
        x = tl.load(vectors[:, None] + row[None, :], mask=mask, other=0.0)
        more = ()
        for i in tl.static_range(len(PLAN.side.parts)):
            more += (_plus_product(sums[i], x, operands, head, row, PLAN, i),)
        sums = more
    ys = ()
    for i in tl.static_range(len(PLAN.side.parts)):
        if operands.shift is None:
            ys += (_split(sums[i] * PLAN.factor, PLAN.side.parts[i]),)
        else:
            ys += (_split(sums[i] * PLAN.factor + shifts[i], PLAN.side.parts[i]),)
    return ys


@triton.jit
def _plus_product(y, x, operands, head, row, PLAN: tl.constexpr, SEGMENT: tl.constexpr):
    """Add what these rows of the matrices give in the columns of a segment."""
    entry = head * operands.head + row[:, None] * PLAN.columns + _columns(PLAN, SEGMENT)[None, :]
    for term in tl.static_range(len(operands.matrices)):
        matrix = tl.load(operands.matrices[term] + entry)
        y = tl.dot(x.to(matrix.dtype), matrix, y)
    return y


@triton.jit
def _columns(PLAN: tl.constexpr, SEGMENT: tl.constexpr):
    return PLAN.column[SEGMENT] + tl.arange(0, PLAN.side.parts[SEGMENT] * PLAN.width[SEGMENT])


@triton.jit
def _split(y, PARTS: tl.constexpr):
    """Into PARTS runs of columns. Threads mostly have all of them in registers, and nothing moves."""
    ys = (y,)
    if PARTS > 1:
        first, second = tl.split(tl.permute(tl.reshape(y, [y.shape[0], 2, y.shape[1] // 2]), [0, 2, 1]))
        ys = _split(first, PARTS // 2) + _split(second, PARTS // 2)
    return ys


@triton.jit
def _run(pointers, rows, LENGTH: tl.constexpr, WIDTH: tl.constexpr):
    """LENGTH numbers from each pointer on, then zeros."""
    column = tl.arange(0, WIDTH)
    return tl.load(pointers[:, None] + column[None, :], mask=_within(rows, LENGTH, WIDTH), other=0)


@triton.jit
def _within(rows, LENGTH: tl.constexpr, WIDTH: tl.constexpr):
    mask = rows[:, None]
    if LENGTH < WIDTH:
        mask = mask & (tl.arange(0, WIDTH) < LENGTH)[None, :]
    return mask


@triton.jit
def _joined(ys):
    """The parts of all segments."""
    joined = ()
    for i in tl.static_range(len(ys)):
        joined += ys[i]
    return joined


@triton.jit
def _largest(ys, stored, rank):
    """The rank-th largest magnitude of each vector. Magnitudes order like the integers of their bits.

    A guess first: rank times the largest that is below the last, which is right where exactly rank magnitudes reach it.
    Among ties it is not: there the largest number that so many reach is found bit by bit, from the top down.
    """
    limit = tl.full(stored.shape, 1 << 31, tl.uint32)
    if rank <= GUESSED:
        for _ in range(rank):
            limit = limit - 1 - _nearest_below(ys, limit - 1)
    known = (_reached(ys, limit) == rank) | ~stored
    limit = tl.where(known, limit, 0)
    for i in range(31 * (1 - tl.min(known.to(tl.int32), axis=0))):
        tried = limit | (tl.full(limit.shape, 1, tl.uint32) << (30 - i))
        limit = tl.where((_reached(ys, tried) >= rank) & ~known, tried, limit)
    return limit.to(tl.float32, bitcast=True)


@triton.jit
def _reached(ys, limit):
    """How many magnitudes of each vector reach its limit."""
    count = tl.zeros_like(limit).to(tl.int32)
    for i in tl.static_range(len(ys)):
        reached = (_magnitude(ys[i][0]) >= limit[:, None]).to(tl.int32)
        for part in tl.static_range(1, len(ys[i])):
            reached += (_magnitude(ys[i][part]) >= limit[:, None]).to(tl.int32)
        count += tl.sum(reached, axis=1)
    return count


@triton.jit
def _nearest_below(ys, end):
    """How far below `end` the largest magnitude is; what lies above it seems far, as unsigned numbers wrap around."""
    nearest = tl.full(end.shape, 0xFFFFFFFF, tl.uint32)
    for i in tl.static_range(len(ys)):
        distance = end[:, None] - _magnitude(ys[i][0])
        for part in tl.static_range(1, len(ys[i])):
            distance = tl.minimum(distance, end[:, None] - _magnitude(ys[i][part]))
        nearest = tl.minimum(nearest, tl.min(distance, axis=1))
    return nearest


@triton.jit
def _magnitude(y):
    return y.to(tl.uint32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _clamped(ys, limit):
    clamped = ()
    for part in tl.static_range(len(ys)):  # NaN stays
        clamped += (tl.where(ys[part] > limit, limit, tl.where(ys[part] < -limit, -limit, ys[part])),)
    return clamped


@triton.jit
def _quantized(ys, levels, boundaries, PLAN: tl.constexpr, SEGMENT: tl.constexpr):
    """Codes (of raw segments: numbers), whether 16 bits can hold all, and the metadata float16[BLOCK, entries]."""
    if PLAN.side.rule[SEGMENT] == AFFINE:
        segment = _affine(ys, PLAN, SEGMENT)
    elif PLAN.side.rule[SEGMENT] == CODEBOOK:
        segment = _codebook(ys, levels, boundaries, PLAN, SEGMENT)
    else:
        segment = (ys, below(ys, PLAN.bfloat))
    return segment


@triton.jit
def _affine(ys, PLAN: tl.constexpr, SEGMENT: tl.constexpr):
    """As `affine.quantize`, with a product for the quotient, which alone can be on the wrong side of a tie between two
    codes. Where y itself is not rounded, it is corrected by what is left of y − low after the next multiple of 1/16 of
    the scale. That is exact near ties, which are such multiples, and these have 23 bits at most."""
    TOP: tl.constexpr = (1 << PLAN.side.bits[SEGMENT]) - 1.0
    RUN: tl.constexpr = PLAN.side.run[SEGMENT]
    least = ys[0]
    most = ys[0]
    total = ys[0]
    for part in tl.static_range(1, len(ys)):
        least = tl.minimum(least, ys[part])
        most = tl.maximum(most, ys[part])
        total += ys[part]
    if ys[0].shape[1] > RUN:
        within = (tl.arange(0, ys[0].shape[1]) < RUN)[None, :]
        least = tl.where(within, least, float("inf"))
        most = tl.where(within, most, float("-inf"))
    low = tl.min(least, axis=1)
    scale = tl.div_rn(tl.max(most, axis=1) - low, TOP)
    sound = (scale < HALF_END) & (tl.abs(low) < HALF_END)
    if not PLAN.rotated:  # which would make all numbers NaN where one is: minima and maxima need not be
        sound = sound & (tl.abs(tl.sum(total, axis=1)) < float("inf"))
    scale = scale.to(tl.float16)
    low = low.to(tl.float16)
    step = tl.maximum(scale.to(tl.float32), SMALLEST)
    inverse = (1.0 / step)[:, None]
    codes = ()
    for part in tl.static_range(len(ys)):
        above = ys[part] - low.to(tl.float32)[:, None]
        code = above * inverse
        if not PLAN.rotated:
            near = code + SIXTEENTHS - SIXTEENTHS
            code = near + (above - near * step[:, None]) * inverse
        code = tl.minimum(tl.maximum(code, 0.0), TOP) + ROUNDER
        codes += (code.to(tl.int32, bitcast=True),)
    return codes, sound, tl.join(scale, low)


@triton.jit
def _codebook(ys, levels, boundaries, PLAN: tl.constexpr, SEGMENT: tl.constexpr):
    """As `codebook.quantize`."""
    BITS: tl.constexpr = PLAN.side.bits[SEGMENT]
    CODES: tl.constexpr = 1 << BITS
    squares = ys[0] * ys[0]
    for part in tl.static_range(1, len(ys)):
        squares += ys[part] * ys[part]
    norm = tl.sqrt_rn(tl.sum(squares, axis=1))
    factor = tl.div_rn(PLAN.side.dims[SEGMENT] ** 0.5, tl.maximum(norm, TINY))[:, None]
    codes = ()
    squares = tl.zeros_like(ys[0])
    for part in tl.static_range(len(ys)):
        code = _nearest_level(ys[part] * factor, boundaries, BITS)
        within = (tl.arange(0, ys[0].shape[1]) < coded(PLAN.side.dims[SEGMENT], PLAN.side.run[SEGMENT], part))[None, :]
        level = tl.where(within, tl.load(levels + CODES + code), 0.0)
        squares += level * level
        codes += (tl.where(within, code, 0),)
    norm = tl.div_rn(norm, tl.sqrt_rn(tl.sum(squares, axis=1)))
    return codes, norm < HALF_END, norm.to(tl.float16)[:, None]


@triton.jit
def _nearest_level(y, boundaries, BITS: tl.constexpr):
    code = tl.zeros_like(y).to(tl.int32)
    for i in tl.static_range(BITS):
        step = (1 << BITS) >> (i + 1)
        boundary = tl.load(boundaries + (1 << BITS) - 1 + code + step)
        code = tl.where(y <= boundary, code, code + step)  # NaN, of a vector of length 0, goes to the last code
    return code


@triton.jit
def _store_codes(codes, slots, rows, PLAN: tl.constexpr, SEGMENT: tl.constexpr):
    """Pack the codes of a segment from these pointers on; the inverse of `tiles.unpack`."""
    for plane in tl.static_range(4):
        if PLAN.side.bits[SEGMENT] & (8 >> plane):
            _store_plane(codes, slots, rows, PLAN, SEGMENT, 8 >> plane)


@triton.jit
def _store_plane(codes, slots, rows, PLAN: tl.constexpr, SEGMENT: tl.constexpr, WIDTH: tl.constexpr):
    """Byte j of run r of a plane has code j of part r in its low bits, then that of part r + RUNS, ..."""
    BELOW: tl.constexpr = bits_below(PLAN.side.bits[SEGMENT], WIDTH)
    # above all bits of a code are some that no byte gets
    MASK: tl.constexpr = (1 << (BELOW + WIDTH)) - 1 if PLAN.side.bits[SEGMENT] > BELOW + WIDTH else -1
    RUN: tl.constexpr = PLAN.side.run[SEGMENT]
    RUNS: tl.constexpr = len(codes) * WIDTH // 8
    byte = slots[:, None] + BELOW * PLAN.side.eighth[SEGMENT] + tl.arange(0, codes[0].shape[1])[None, :]
    for i in tl.static_range(RUNS):
        packed = (codes[i] & MASK) >> BELOW
        for j in tl.static_range(1, 8 // WIDTH):
            packed += ((codes[i + j * RUNS] & MASK) >> BELOW) << (j * WIDTH)
        tl.store(byte + i * RUN, packed.to(tl.uint8), mask=_within(rows, RUN, codes[0].shape[1]))


@triton.jit
def _store_parts(ys, pointers, rows, PLAN: tl.constexpr, SEGMENT: tl.constexpr):
    """All coordinates of a segment, from each pointer on."""
    column = tl.arange(0, ys[0].shape[1])[None, :]
    for part in tl.static_range(len(ys)):
        mask = _within(rows, coded(PLAN.side.dims[SEGMENT], PLAN.side.run[SEGMENT], part), ys[0].shape[1])
        tl.store(pointers[:, None] + part * PLAN.side.run[SEGMENT] + column, ys[part], mask=mask)


@triton.jit
def below(ys, BFLOAT: tl.constexpr):
    """Whether 16 bits can hold all numbers of each vector."""
    most = _magnitude(ys[0])
    for part in tl.static_range(1, len(ys)):
        most = tl.maximum(most, _magnitude(ys[part]))
    return tl.max(most, axis=1) < (BFLOAT_BITS if BFLOAT else HALF_BITS)


@triton.jit
def sixteen_bits(ys, rows, BFLOAT: tl.constexpr):
    """float32 -> the bits of bfloat16, rounded by hand since Triton's interpreter truncates, or of float16; 0 in other
    rows."""
    rounded = ()
    for part in tl.static_range(len(ys)):
        if BFLOAT:
            bits = ys[part].to(tl.int32, bitcast=True)
            number = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
        else:
            number = ys[part].to(tl.float16).to(tl.int16, bitcast=True)
        rounded += (tl.where(rows[:, None], number, 0),)
    return rounded
