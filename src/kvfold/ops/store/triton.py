"""`store` in one launch, keys and values together. A program packs a block of tokens of one KV head.

All is computed in the column order of tiles.py, in which the operands of transforms are laid out once for all steps.
16-bit floats are stored by their bits, as int16.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from kvfold.codec import Codec
from kvfold.ops import tiles
from kvfold.ops.pages import LayerPages
from kvfold.ops.tiles import AFFINE, CODEBOOK, RAW, Side, bits_below, coordinates
from kvfold.quantizers.affine import SMALLEST_SCALE
from kvfold.transforms import Transform

ROWS = tl.constexpr(32)  # coordinates that one round of a rotation takes
SMALLEST = tl.constexpr(SMALLEST_SCALE)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
ROUNDER = tl.constexpr(1.5 * 2**23)  # added and subtracted again it rounds numbers below 2^22, half to even
HALF_END = tl.constexpr(65520.0)  # from here on float16 rounds to Inf
BFLOAT_END = tl.constexpr(2.0**128 - 2.0**119)  # and bfloat16
MANY = 1 << 14  # vectors, from which on larger blocks leave no part of a GPU idle


class _Source(NamedTuple):
    """The keys or values of a step."""

    x: Tensor  # [sequences, n, kv_heads, d]
    sequence: int  # strides
    token: int
    head: int


class _Operands(NamedTuple):
    """A transform, in the column order of all segments."""

    matrices: tuple[Tensor, ...]  # 16-bit [kv_heads or 1, rows, columns], whose sum times factor is A; none: A = 1
    head: int  # stride of matrices
    factor: float
    shift: Tensor | None  # float32[kv_heads, columns]: mean·A
    columns: int


class _Memory(NamedTuple):
    slots: Tensor  # see pages.py
    shadow_of: Tensor
    pool: Tensor
    entries: Tensor  # the pool in 16 bits
    shadows: Tensor
    new: Tensor | None  # [2, sequences, n, kv_heads, d]
    faults: Tensor | None
    levels: Tensor  # see tiles.py
    boundaries: Tensor


def store(pages: LayerPages, k: Tensor, v: Tensor, faults: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
    """As `naive.store`, for 16-bit k and v.

    Nothing waits for the device, so what cannot be stored raises no error: no byte of that token's key (or value) of
    that KV head is written, and `faults` int32[1], where given, becomes 1.
    """
    sequences, n, kv_heads, dims = k.shape
    batch, sides = pages.step.batch, (tiles.key_side(pages.layout), tiles.value_side(pages.layout))
    expected = (len(batch.slots), pages.pool.shape[1], sides[0].head_dim)
    for x in (k, v):
        if x.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"the kernel stores bfloat16 and float16, not {x.dtype}")
        if (x.shape[:2].numel(), *x.shape[2:]) != expected:
            raise ValueError(f"{tuple(x.shape)} are not the {expected} [tokens, kv_heads, d] of the step")
    wide, device = pages.shadows.dtype, k.device
    new = torch.empty(2, sequences, n, kv_heads, dims, dtype=wide, device=device) if pages.windows else None
    block = 16 if k.shape[:3].numel() < MANY else 32
    memory = _Memory(
        batch.slots,
        batch.shadow_of,
        pages.pool,
        pages.pool.view(torch.int16),
        pages.shadows.view(torch.int16),
        None if new is None else new.view(torch.int16),
        faults,
        tiles.level_table(device),
        tiles.boundary_table(device),
    )
    _store[triton.cdiv(sequences * n, block), kv_heads, 2](
        _source(k), pages.key.transform.once(_operands, sides[0], k.dtype, device),
        _source(v), pages.value.transform.once(_operands, sides[1], v.dtype, device),
        memory, sequences * n, n, *sides, _clipped(pages.key), _clipped(pages.value),
        pages.key.wide == torch.bfloat16, pages.value.wide == torch.bfloat16, wide == torch.bfloat16,
        pages.layout.page_size, pages.layout.page_bytes, block, num_warps=4 if dims <= 128 else 8, num_stages=2,
    )  # fmt: skip
    return None if new is None else (new[0], new[1])


def _clipped(codec: Codec) -> int:
    """How many coordinates of a vector are the limit of its magnitudes or beyond it; 0: nothing is clipped."""
    dims = codec.layout.dims
    beyond = 0 if codec.clip is None else dims - math.ceil(codec.clip * dims)
    return beyond + 1 if beyond else 0


def _source(x: Tensor) -> _Source:
    x = x if x.stride(-1) == 1 else x.contiguous()
    return _Source(x, x.stride(0), x.stride(1), x.stride(2))


def _operands(transform: Transform, side: Side, dtype: torch.dtype, device: torch.device) -> _Operands:
    """Of the keys or values of a layer, for x of this type."""
    order = _column_order(side).to(device)
    matrices: tuple[Tensor, ...] = ()
    factor, shift = 1.0, transform.mean
    if transform.rotation is not None:
        terms, factor = transform.rotation.terms(side.head_dim, dtype, device)
        if shift is not None:  # by the terms too, so that what they leave out of A meets x − mean and not x
            matrix = factor * torch.stack(terms).double().sum(dim=0)
            shift = (shift.double().unsqueeze(-2) @ matrix).squeeze(-2).float()
        rows = -side.head_dim % ROWS.value
        kept = torch.float32 if device.type == "cpu" else dtype  # Triton's interpreter cannot multiply bfloat16
        matrices = tuple(pad(term, (0, 1, 0, rows))[..., order].to(kept).contiguous() for term in terms)
    stride = matrices[0].stride(0) if matrices and len(matrices[0]) > 1 else 0
    shift = None if shift is None else pad(shift, (0, 1))[..., order].contiguous()  # column -1 is zero
    return _Operands(matrices, stride, factor, shift, len(order))


def _column_order(side: Side) -> Tensor:
    """What `tiles.coordinates` says of all segments, -1 where a column has no coordinate."""
    order = []
    for start, dims, eighth, columns in zip(side.start, side.dims, side.eighth, side.columns, strict=True):
        within = (torch.arange(8) * eighth + torch.arange(columns).unsqueeze(1)).flatten()
        exists = (torch.arange(columns * 8) // 8 < eighth) & (within < dims)
        order.append(torch.where(exists, start + within, -1))
    return torch.cat(order)


@triton.jit(do_not_specialize=["tokens", "n"])
def _store(
    k, key, v, value, memory, tokens, n, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_CLIPPED: tl.constexpr, VALUE_CLIPPED: tl.constexpr,
    KEY_BFLOAT: tl.constexpr, VALUE_BFLOAT: tl.constexpr, NEW_BFLOAT: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.program_id(2) == 0:
        _store_side(
            k, key, memory, tokens, n, KEY, 0, KEY_CLIPPED, KEY_BFLOAT, NEW_BFLOAT, PAGE_SIZE, PAGE_BYTES, BLOCK
        )
    else:
        _store_side(
            v, value, memory, tokens, n, VALUE, 1, VALUE_CLIPPED, VALUE_BFLOAT, NEW_BFLOAT, PAGE_SIZE, PAGE_BYTES, BLOCK
        )


@triton.jit
def _store_side(
    source, operands, memory, tokens, n, SIDE: tl.constexpr, WHICH: tl.constexpr,
    CLIPPED: tl.constexpr, RAW_BFLOAT: tl.constexpr, NEW_BFLOAT: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    SEGMENTS: tl.constexpr = len(SIDE.start)
    HEAD_DIM: tl.constexpr = SIDE.head_dim
    CODES: tl.constexpr = SIDE.codes
    CODE_STRIDE: tl.constexpr = SIDE.code_stride
    META: tl.constexpr = SIDE.meta
    META_STRIDE: tl.constexpr = SIDE.meta_stride
    head = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1)
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(memory.slots + token, mask=token < tokens, other=-1)
    stored = slot >= 0
    page = slot // PAGE_SIZE
    place = slot % PAGE_SIZE

    vectors = source.x + token // n * source.sequence + token % n * source.token + head * source.head  # [BLOCK]
    ys = ()  # of each segment float32[BLOCK, columns·8], 0 in columns without a coordinate
    at = 0
    for i in tl.static_range(SEGMENTS):
        ys += (_transformed(operands, vectors, stored, head, at, SIDE, i, BLOCK),)
        at += SIDE.columns[i] * 8

    sound = stored
    clipped = ys
    if memory.new is not None:
        for i in tl.static_range(SEGMENTS):
            sound = sound & _below(ys[i], BFLOAT_END if NEW_BFLOAT else HALF_END)
    if CLIPPED:
        limit = _largest(ys, CLIPPED, SIDE, BLOCK)[:, None]
        clipped = ()
        for i in tl.static_range(SEGMENTS):  # NaN stays
            clipped += (tl.where(ys[i] > limit, limit, tl.where(ys[i] < -limit, -limit, ys[i])),)
    quantized = ()
    for i in tl.static_range(SEGMENTS):
        quantized += (_quantized(clipped[i], memory.levels, memory.boundaries, SIDE, i, RAW_BFLOAT),)
        sound = sound & quantized[i][3]
    if memory.faults is not None:
        tl.store(memory.faults + tl.zeros_like(token), 1, mask=stored & ~sound)

    first_byte = (page * heads + head) * PAGE_BYTES
    code_byte = first_byte + CODES + place * CODE_STRIDE
    entry = memory.entries + first_byte // 2 + META + place * META_STRIDE
    for i in tl.static_range(SEGMENTS):
        if SIDE.rule[i] == RAW:
            coordinate, exists = coordinates(SIDE, i)
            first = memory.entries + (code_byte + SIDE.byte[i]) // 2 - SIDE.start[i]
            mask = sound[:, None] & exists[None, :]
            tl.store(first[:, None] + coordinate[None, :], quantized[i][0], mask=mask)
        else:
            _store_codes(quantized[i][0], memory.pool + code_byte, sound, SIDE, i, BLOCK)
            tl.store(entry + SIDE.entry[i], quantized[i][1].to(tl.int16, bitcast=True), mask=sound)
        if SIDE.rule[i] == AFFINE:
            tl.store(entry + SIDE.entry[i] + 1, quantized[i][2].to(tl.int16, bitcast=True), mask=sound)

    if memory.new is not None:
        shadow = tl.load(memory.shadow_of + page, mask=sound, other=-1)
        in_shadow = memory.shadows + (((shadow * heads + head) * 2 + WHICH) * PAGE_SIZE + place) * HEAD_DIM
        in_new = memory.new + ((WHICH * tokens + token) * heads + head) * HEAD_DIM
        for i in tl.static_range(SEGMENTS):
            coordinate, exists = coordinates(SIDE, i)
            y = tl.where(sound[:, None], _sixteen_bits(ys[i], NEW_BFLOAT), 0)
            tl.store(in_new[:, None] + coordinate[None, :], y, mask=(token < tokens)[:, None] & exists[None, :])
            tl.store(in_shadow[:, None] + coordinate[None, :], y, mask=(shadow >= 0)[:, None] & exists[None, :])


@triton.jit
def _transformed(operands, vectors, stored, head, at, SIDE: tl.constexpr, SEGMENT: tl.constexpr, BLOCK: tl.constexpr):
    """(x − mean)·A in the columns of a segment, which begin at column `at` of the operands."""
    HEAD_DIM: tl.constexpr = SIDE.head_dim
    column = at + tl.arange(0, SIDE.columns[SEGMENT] * 8)
    if len(operands.matrices) == 0:
        coordinate, exists = coordinates(SIDE, SEGMENT)
        mask = stored[:, None] & exists[None, :]
        y = tl.load(vectors[:, None] + coordinate[None, :], mask=mask, other=0.0).to(tl.float32)
    else:
        y = tl.zeros([BLOCK, SIDE.columns[SEGMENT] * 8], tl.float32)
        for first in range(0, HEAD_DIM, ROWS):
            row = first + tl.arange(0, ROWS)
            x = tl.load(vectors[:, None] + row[None, :], mask=stored[:, None] & (row < HEAD_DIM)[None, :], other=0.0)
            entry = head * operands.head + row[:, None] * operands.columns + column[None, :]
            for term in tl.static_range(len(operands.matrices)):
                matrix = tl.load(operands.matrices[term] + entry)
                y = tl.dot(x.to(matrix.dtype), matrix, y)
        y = y * operands.factor
    if operands.shift is not None:
        y = y - tl.load(operands.shift + head * operands.columns + column)[None, :]
    return y


@triton.jit
def _largest(ys, RANK: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The RANK-th largest magnitude of each vector: the largest number that so many reach, found bit by bit from the
    top down, as magnitudes order like the integers of their bits."""
    limit = tl.zeros([BLOCK], tl.int32)
    for i in range(31):
        tried = limit | (1 << (30 - i))
        reached = tl.zeros([BLOCK], tl.int32)
        for segment in tl.static_range(len(SIDE.start)):
            magnitude = ys[segment].to(tl.int32, bitcast=True) & 0x7FFFFFFF
            reached += tl.sum((magnitude >= tried[:, None]).to(tl.int32), axis=1)
        limit = tl.where(reached >= RANK, tried, limit)
    return limit.to(tl.float32, bitcast=True)


@triton.jit
def _quantized(y, levels, boundaries, SIDE: tl.constexpr, SEGMENT: tl.constexpr, BFLOAT: tl.constexpr):
    """Codes (of raw segments: the floats), two float16 entries of metadata, and whether 16 bits can hold all that."""
    if SIDE.rule[SEGMENT] == AFFINE:
        segment = _affine(y, SIDE, SEGMENT)
    elif SIDE.rule[SEGMENT] == CODEBOOK:
        segment = _codebook(y, levels, boundaries, SIDE, SEGMENT)
    else:
        sound = _below(y, BFLOAT_END if BFLOAT else HALF_END)
        segment = (_sixteen_bits(y, BFLOAT), sound, sound, sound)
    return segment


@triton.jit
def _affine(y, SIDE: tl.constexpr, SEGMENT: tl.constexpr):
    """As `affine.quantize`."""
    TOP: tl.constexpr = (1 << SIDE.bits[SEGMENT]) - 1.0
    _, exists = coordinates(SIDE, SEGMENT)
    low = tl.min(tl.where(exists[None, :], y, float("inf")), axis=1)
    high = tl.max(tl.where(exists[None, :], y, float("-inf")), axis=1)
    scale = tl.div_rn(high - low, TOP)
    sound = _below(y, float("inf")) & (scale < HALF_END) & (tl.abs(low) < HALF_END)
    scale = scale.to(tl.float16)
    low = low.to(tl.float16)
    code = tl.div_rn(y - low.to(tl.float32)[:, None], tl.maximum(scale.to(tl.float32), SMALLEST)[:, None])
    code = tl.minimum(tl.maximum(code, 0.0), TOP) + ROUNDER - ROUNDER
    return code.to(tl.int32), scale, low, sound


@triton.jit
def _codebook(y, levels, boundaries, SIDE: tl.constexpr, SEGMENT: tl.constexpr):
    """As `codebook.quantize`."""
    BITS: tl.constexpr = SIDE.bits[SEGMENT]
    CODES: tl.constexpr = 1 << BITS
    _, exists = coordinates(SIDE, SEGMENT)
    norm = tl.sqrt_rn(tl.sum(y * y, axis=1))
    unit = y * tl.div_rn(SIDE.dims[SEGMENT] ** 0.5, tl.maximum(norm, TINY))[:, None]
    code = tl.zeros_like(y).to(tl.int32)
    for i in tl.static_range(BITS):
        step = CODES >> (i + 1)
        boundary = tl.load(boundaries + CODES - 1 + code + step)
        code = tl.where(unit <= boundary, code, code + step)  # NaN, of a vector of length 0, goes to the last code
    level = tl.where(exists[None, :], tl.load(levels + CODES + code), 0.0)
    norm = tl.div_rn(norm, tl.sqrt_rn(tl.sum(level * level, axis=1)))
    entry = norm.to(tl.float16)
    return tl.where(exists[None, :], code, 0), entry, entry, norm < HALF_END


@triton.jit
def _store_codes(codes, slots, sound, SIDE: tl.constexpr, SEGMENT: tl.constexpr, BLOCK: tl.constexpr):
    """Pack codes int32[BLOCK, columns·8] of a segment into slots at these pointers; the inverse of `tiles.unpack`."""
    for plane in tl.static_range(4):
        if SIDE.bits[SEGMENT] & (8 >> plane):
            _store_plane(codes, slots, sound, SIDE, SEGMENT, 8 >> plane, BLOCK)


@triton.jit
def _store_plane(
    codes, slots, sound, SIDE: tl.constexpr, SEGMENT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    EIGHTH: tl.constexpr = SIDE.eighth[SEGMENT]
    COLUMNS: tl.constexpr = SIDE.columns[SEGMENT]
    BELOW: tl.constexpr = bits_below(SIDE.bits[SEGMENT], WIDTH)
    shifts = tl.arange(0, 8 // WIDTH) * WIDTH
    part = tl.reshape((codes >> BELOW) & ((1 << WIDTH) - 1), [BLOCK, COLUMNS, 8 // WIDTH, WIDTH])
    packed = tl.sum(part << shifts[None, None, :, None], axis=2)  # bits that do not meet: a sum is an or
    j = tl.arange(0, COLUMNS)
    byte = SIDE.byte[SEGMENT] + (BELOW + tl.arange(0, WIDTH)[None, :]) * EIGHTH + j[:, None]
    mask = sound[:, None, None] & (j < EIGHTH)[None, :, None]
    tl.store(slots[:, None, None] + byte[None], packed.to(tl.uint8), mask=mask)


@triton.jit
def _below(y, END: tl.constexpr):
    """Whether all magnitudes of each vector are below END and none is NaN."""
    return tl.min((tl.abs(y) < END).to(tl.int32), axis=1) > 0


@triton.jit
def _sixteen_bits(y, BFLOAT: tl.constexpr):
    """float32 -> the bits of bfloat16, rounded by hand since Triton's interpreter truncates, or of float16."""
    if BFLOAT:
        bits = y.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    else:
        rounded = y.to(tl.float16).to(tl.int16, bitcast=True)
    return rounded
