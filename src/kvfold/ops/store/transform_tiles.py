"""Tiles of vectors, transformed: (x − mean)·A, or x − mean without a rotation.

Results are the parts that quantize_tiles.py packs. PACKING and operands are those of store_gpu.py.
"""

import triton
import triton.language as tl

from kvfold.ops.store.quantize_tiles import coded, within

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
def transformed(token, matrices, source, operands, tokens, PACKING: tl.constexpr, ROWS: tl.constexpr):
    """The transformed vectors of tokens: per segment, its parts. Rows of matrices are loaded here, if they are None."""
    head = tl.program_id(1).to(tl.int64)
    exists = token < tokens
    vectors = source.x + token.to(tl.int64) * source.token + head * source.head
    ys = ()
    if PACKING.rotated:
        ys = _rotated(vectors, matrices, operands, exists, head, PACKING, ROWS)
    else:
        for i in tl.static_range(len(PACKING.side.parts)):
            ys += (_loaded(vectors, operands, exists, head, PACKING, i),)
    return ys


@triton.jit
def _loaded(vectors, operands, exists, head, PACKING: tl.constexpr, SEGMENT: tl.constexpr):
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
            y += tl.load(operands.shift + head * PACKING.columns + column)[None, :]
        ys += (y,)
    return ys


@triton.jit
def _rotated(vectors, matrices, operands, exists, head, PACKING: tl.constexpr, ROWS: tl.constexpr):
    """(x − mean)·A: per segment, its parts; 0 in columns without a coordinate."""
    sums = ()
    for i in tl.static_range(len(PACKING.side.parts)):
        sums += (tl.zeros([vectors.shape[0], PACKING.side.parts[i] * PACKING.width[i]], tl.float32),)
    if matrices is None:
        for first in range(0, PACKING.side.head_dim, ROWS):
            x = _numbers(vectors, exists, first, PACKING, ROWS)
            sums = _products(x, load_matrices(operands, first, PACKING, ROWS), sums)
    else:
        sums = _products(_numbers(vectors, exists, 0, PACKING, ROWS), matrices, sums)
    ys = ()
    for i in tl.static_range(len(PACKING.side.parts)):
        factor = operands.factors[i]
        if factor.dtype.is_ptr():
            factor = tl.load(factor + tl.arange(0, sums[i].shape[1]))[None, :]
        if operands.shift is None:
            ys += (_split(sums[i] * factor, PACKING.side.parts[i]),)
        else:
            shift = tl.load(operands.shift + head * PACKING.columns + _columns(PACKING, i))[None, :]
            ys += (_split(tl.fma(sums[i], factor, shift), PACKING.side.parts[i]),)
    return ys


@triton.jit
def _numbers(vectors, exists, first, PACKING: tl.constexpr, ROWS: tl.constexpr):
    """Coordinates of vectors, from `first` on."""
    row = first + tl.arange(0, ROWS)
    mask = exists[:, None] & (row < PACKING.side.head_dim)[None, :]
    return tl.load(vectors[:, None] + row[None, :], mask=mask, other=0.0)


@triton.jit
def load_matrices(operands, first, PACKING: tl.constexpr, ROWS: tl.constexpr):
    """Rows of A from `first` on: per term, per segment."""
    row = first + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64) * operands.head
    matrices = ()
    for term in tl.static_range(len(operands.matrices)):
        columns = ()
        for i in tl.static_range(len(PACKING.side.parts)):
            entry = head + row[:, None] * PACKING.columns + _columns(PACKING, i)[None, :]
            columns += (tl.load(operands.matrices[term] + entry),)
        matrices += (columns,)
    return matrices


@triton.jit
def _products(x, matrices, sums):
    for term in tl.static_range(len(matrices)):
        more = ()
        for i in tl.static_range(len(sums)):
            more += (tl.dot(x.to(matrices[term][i].dtype), matrices[term][i], sums[i]),)
        sums = more
    return sums


@triton.jit
def _columns(PACKING: tl.constexpr, SEGMENT: tl.constexpr):
    return PACKING.column[SEGMENT] + tl.arange(0, PACKING.side.parts[SEGMENT] * PACKING.width[SEGMENT])


@triton.jit
def _split(y, PARTS: tl.constexpr):
    """Split columns into PARTS parts. A thread mostly has a column of every part, so nothing moves between threads."""
    ys = (y,)
    if PARTS > 1:
        if y.shape[1] == 2 * QUAD:  # neighbouring columns are in one thread
            first, second = tl.split(tl.reshape(y, [y.shape[0], QUAD, 2]))
        else:
            first, second = tl.split(tl.permute(tl.reshape(y, [y.shape[0], 2, y.shape[1] // 2]), [0, 2, 1]))
        ys = _split(first, PARTS // 2) + _split(second, PARTS // 2)
    return ys


@triton.jit
def _run(pointers, rows, LENGTH: tl.constexpr, WIDTH: tl.constexpr):
    """LENGTH numbers from each pointer on, filled up with zeros."""
    column = tl.arange(0, WIDTH)
    return tl.load(pointers[:, None] + column[None, :], mask=within(rows, LENGTH, WIDTH), other=0)
