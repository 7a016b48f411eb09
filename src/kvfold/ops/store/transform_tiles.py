"""Tiles of vectors, transformed: (x − mean)·A, or x − mean without a rotation.

Results are the parts that quantize_tiles.py packs. PACKING and operands are those of store_gpu.py.
"""

import triton
import triton.language as tl

from kvfold.ops.store.quantize_tiles import COMPILED, coded, within
from kvfold.ops.tiles import power_of_two

LINE = tl.constexpr(64)  # numbers of 16 bits in 128 bytes
QUAD = tl.constexpr(4)  # threads that share a row of an MMA's result; a thread has pairs of columns, QUAD pairs apart


def split_columns(parts: range, width: int, rotated: bool) -> list[tuple[int, int]]:
    """The part of every column, and the column's place in the part, as `_split` splits them."""
    if len(parts) == 1:
        return [(parts[0], place) for place in range(width)]
    middle = len(parts) // 2
    first, second = (split_columns(half, width, rotated) for half in (parts[:middle], parts[middle:]))
    if rotated and len(first) == QUAD.value:
        return [column for pair in zip(first, second, strict=True) for column in pair]
    return first + second


@triton.jit
def transformed(matrix, token, source, operands, tokens, PACKING: tl.constexpr, ROWS: tl.constexpr):
    """The transformed vectors of tokens: per segment, its parts. Rows of the matrix are loaded here, if it is None."""
    ys = ()
    if PACKING.rotated:
        ys = _rotated(matrix, token, source, operands, tokens, PACKING, ROWS)
    else:
        for i in tl.static_range(len(PACKING.side.parts)):
            ys += (_loaded(_vectors(token, source), operands, token < tokens, PACKING, i),)
    return ys


@triton.jit
def _vectors(token, source):
    """Pointers to the vectors of tokens."""
    return source.x + token.to(tl.int64) * source.token + tl.program_id(1).to(tl.int64) * source.head


@triton.jit
def _loaded(vectors, operands, exists, PACKING: tl.constexpr, SEGMENT: tl.constexpr):
    """x − mean: the parts of a segment; 0 in columns without a coordinate."""
    PARTS: tl.constexpr = PACKING.side.parts[SEGMENT]
    WIDTH: tl.constexpr = PACKING.width[SEGMENT]
    RUN: tl.constexpr = PACKING.side.run[SEGMENT]
    ys = ()
    for part in tl.static_range(PARTS):
        first = vectors + PACKING.side.start[SEGMENT] + part * RUN
        y = _run(first, exists, coded(PACKING.side.dims[SEGMENT], RUN, part), WIDTH).to(tl.float32)
        if operands.shift is not None:
            column = PACKING.column[SEGMENT] + part * WIDTH + tl.arange(0, WIDTH)
            y += tl.load(operands.shift + tl.program_id(1).to(tl.int64) * PACKING.columns + column)[None, :]
        ys += (y,)
    return ys


@triton.jit
def _rotated(matrix, token, source, operands, tokens, PACKING: tl.constexpr, ROWS: tl.constexpr):
    """(x − mean)·A: per segment, its parts; 0 in columns without a coordinate."""
    BLOCKS: tl.constexpr = len(PACKING.blocks)
    sums = ()
    shifts = ()
    for i in tl.static_range(BLOCKS):
        sums += (tl.zeros([token.shape[0], _block(PACKING, i).shape[0]], tl.float32),)
        if operands.shift is not None:  # loaded here, it arrives before it is needed
            column = tl.program_id(1).to(tl.int64) * PACKING.columns + _block(PACKING, i)
            shifts += (tl.load(operands.shift + column),)
    if matrix is None:
        for first in range(0, PACKING.side.head_dim, ROWS):
            x = _numbers(token, source, tokens, first, PACKING, ROWS)
            sums = _products(x, load_matrix(operands, first, PACKING, ROWS), sums)
    else:
        sums = _products(_numbers(token, source, tokens, 0, PACKING, ROWS), matrix, sums)
    ys = ()
    for i in tl.static_range(len(PACKING.side.parts)):
        y = _segment(sums[i % BLOCKS], PACKING, i, i % BLOCKS)
        factor = operands.factors[i]
        if factor.dtype.is_ptr():
            factor = tl.load(factor + tl.arange(0, y.shape[1]))[None, :]
        if operands.shift is None:
            y *= factor
        else:
            shift = tl.broadcast_to(shifts[i % BLOCKS][None, :], sums[i % BLOCKS].shape)
            y = tl.fma(y, factor, _segment(shift, PACKING, i, i % BLOCKS))
        ys += (_split(y, PACKING.side.parts[i]),)
    return ys


@triton.jit
def _block(PACKING: tl.constexpr, BLOCK: tl.constexpr):
    """The columns of a block."""
    COLUMNS: tl.constexpr = PACKING.blocks[BLOCK][1]
    return PACKING.blocks[BLOCK][0] + tl.arange(0, COLUMNS)


@triton.jit
def _products(x, matrix, sums):
    more = ()
    for i in tl.static_range(len(sums)):
        more += (tl.dot(x.to(matrix[i].dtype), matrix[i], sums[i]),)
    return more


@triton.jit
def _segment(block, PACKING: tl.constexpr, SEGMENT: tl.constexpr, BLOCK: tl.constexpr):
    """The columns of a segment."""
    return _columns(
        block, PACKING.column[SEGMENT] - PACKING.blocks[BLOCK][0], PACKING.side.parts[SEGMENT] * PACKING.width[SEGMENT]
    )


@triton.jit
def _columns(y, FIRST: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns from FIRST on, which is a multiple of COLUMNS."""
    if y.shape[1] > COLUMNS:
        first, second = _halves(y)
        if first.shape[1] > FIRST:
            y = _columns(first, FIRST, COLUMNS)
        else:
            y = _columns(second, FIRST - first.shape[1], COLUMNS)
    return y


@triton.jit
def _numbers(token, source, tokens, first, PACKING: tl.constexpr, ROWS: tl.constexpr):
    """ROWS coordinates of vectors, from `first` on."""
    row = first + tl.arange(0, ROWS)
    mask = (token < tokens)[:, None] & (row < PACKING.side.head_dim)[None, :]
    return tl.load(_vectors(token, source)[:, None] + row[None, :], mask=mask, other=0.0)


@triton.jit
def prefetch(token, source, tokens, PACKING: tl.constexpr):
    """Fetch vectors into the L2 cache."""
    if COMPILED:  # the interpreter knows no assembly
        LINES: tl.constexpr = power_of_two((PACKING.side.head_dim + LINE - 1) // LINE)
        vectors = _vectors(tl.minimum(token, tokens - 1), source)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l",
            [(vectors[:, None] + LINE * tl.arange(0, LINES)[None, :]).to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def load_matrix(operands, first, PACKING: tl.constexpr, ROWS: tl.constexpr):
    """ROWS rows from `first` on, per block of columns."""
    row = tl.program_id(1).to(tl.int64) * operands.head + (first + tl.arange(0, ROWS)) * PACKING.columns
    matrix = ()
    for i in tl.static_range(len(PACKING.blocks)):
        matrix += (tl.load(operands.matrix + row[:, None] + _block(PACKING, i)[None, :]),)
    return matrix


@triton.jit
def _halves(y):
    return tl.split(tl.permute(tl.reshape(y, [y.shape[0], 2, y.shape[1] // 2]), [0, 2, 1]))


@triton.jit
def _split(y, PARTS: tl.constexpr):
    """Split columns into PARTS parts. A thread mostly has a column of every part, so nothing moves between threads."""
    ys = (y,)
    if PARTS > 1:
        if y.shape[1] == 2 * QUAD:  # neighbouring columns are in one thread
            first, second = tl.split(tl.reshape(y, [y.shape[0], QUAD, 2]))
        else:
            first, second = _halves(y)
        ys = _split(first, PARTS // 2) + _split(second, PARTS // 2)
    return ys


@triton.jit
def _run(pointers, rows, LENGTH: tl.constexpr, WIDTH: tl.constexpr):
    """LENGTH numbers from each pointer on, filled up with zeros."""
    column = tl.arange(0, WIDTH)
    return tl.load(pointers[:, None] + column[None, :], mask=within(rows, LENGTH, WIDTH), other=0)
