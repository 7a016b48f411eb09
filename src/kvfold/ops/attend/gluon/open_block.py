"""The open block in the Gluon kernels. The first CTAs of a sequence read its raw tokens, about a tile each, before they
read packed ones. The raw tokens of a CTA are a part of their own, behind the parts of packed tokens.

In both products, heads are columns. Rows are tokens in the first and coordinates in the second. Their order is free, so
lanes load 16 bytes at once from rings to the registers from which MMA reads them. Shared memory is not needed.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kvfold.ops.attend.gluon.decode_tiles import (
    UNSEEN,
    exp2,
    log2,
    packed_to,
    row_of,
    store_weights,
    transposed,
    wait_by,
)


class RingBlock(NamedTuple):
    """A block of a ring. A ring has one or several."""

    tokens: int
    numbers: int  # per KV head: keys, then values


@gluon.constexpr_function
def raw_parts(block):
    """How many CTAs share the raw tokens of a sequence, at most."""
    return -(-block // 64)


@gluon.jit
def own_raw(starts, split, splits, shortest, length, BLOCK: gl.constexpr, DIMS: gl.constexpr, PAGE: gl.constexpr,
            PAGE_WORDS: gl.constexpr):  # fmt: skip
    """The raw tokens of a CTA. Returns

    - how many splits read any, the first ones, and as how many packed tiles that counts, by their bytes;
    - the first and the end of this CTA's.

    `shortest` and `length` are those of the sequence up to the first query and with the last one. Queries before
    `starts` are padding.
    """
    if BLOCK == 0:
        return 0, 0, 0, 0
    else:
        WORDS: gl.constexpr = PAGE_WORDS // PAGE  # of a packed token; a raw one has DIMS
        oldest = shortest
        if starts is not None:
            oldest = gl.maximum(shortest, gl.load(starts + gl.program_id(2)) + 1)
        begin = gl.maximum(packed_to(oldest, BLOCK), 0)
        readers = gl.minimum(splits, raw_parts(BLOCK))
        share = (gl.maximum(length - begin, 0) + readers - 1) // readers
        first = begin + split * share
        return readers, share * DIMS // (64 * WORDS), first, gl.minimum(first + share, length)


@gluon.jit
def read_raw(q, outs, weights, ring, rings, ring_stride, ring_blocks, scale, first, end, shortest, live, q_stride,
             stride, RING: gl.constexpr, BLOCK: gl.constexpr, DIMS: gl.constexpr, RATIO: gl.constexpr,
             QUERIES: gl.constexpr, HEADS: gl.constexpr, OVERLAP: gl.constexpr, TOGETHER: gl.constexpr):  # fmt: skip
    """Let the queries of a CTA read the raw tokens from `first` to `end`, as a part at `outs` and `weights`. TOGETHER
    numbers are loaded at once, or those of 16 tokens: 4096 numbers are 64 registers of each lane."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    HEAD: gl.constexpr = gl.SliceLayout(0, MMA)
    COLUMNS: gl.constexpr = max(8, HEADS)
    TOKENS: gl.constexpr = max(16, TOGETHER // DIMS)
    wait_by(OVERLAP, "end")
    queries = _queries(q, scale, live, q_stride, DIMS, RATIO, QUERIES, COLUMNS, MMA)
    rings += gl.program_id(2).to(gl.int64) * ring_stride
    lengths = shortest + gl.arange(0, COLUMNS, HEAD) // RATIO  # up to each query
    borders = packed_to(lengths, BLOCK)
    highest = gl.full([COLUMNS], UNSEEN, gl.float32, HEAD)
    total = gl.zeros([COLUMNS], gl.float32, HEAD)
    out = gl.zeros([DIMS, COLUMNS], gl.float32, MMA)
    places = ring_blocks * RING.tokens
    for start in range(first, end, TOKENS):
        last, at = end - 1 - start, start % places
        k = _load(ring, rings, at, last, places, RING, DIMS, TOKENS, gl.DotOperandLayout(0, MMA, 8))
        values = ring + RING.tokens * DIMS
        v = _load(values, rings, at, last, places, RING, DIMS, TOKENS, _value_layout(TOKENS, DIMS))
        logits = mma_v2(k, queries, gl.zeros([TOKENS, COLUMNS], gl.float32, MMA))
        token = start + gl.arange(0, TOKENS, gl.SliceLayout(1, MMA))
        seen = (token[:, None] >= borders[None, :]) & (token[:, None] < gl.minimum(lengths, end)[None, :])
        logits = gl.where(seen, logits, UNSEEN)
        now = gl.maximum(highest, gl.max(logits, 0))
        fade, highest = exp2(highest - now), now
        weight = exp2(logits - now[None, :])
        total = total * fade + gl.sum(weight, 0)
        # rows: bits 0 to 2 of a coordinate, where a lane has neighbours, change places with bits 3 to 5
        v = gl.permute(gl.reshape(v, [TOKENS, DIMS // 64, 8, 8]), [1, 3, 2, 0])
        v = gl.convert_layout(gl.reshape(v, [DIMS, TOKENS]), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)
        weight = transposed(gl.reshape(weight, [TOKENS // 8, 8, COLUMNS]), MMA)
        out = mma_v2(v, weight, out * fade[None, :])

    out = gl.permute(gl.reshape(out, [DIMS // 64, 8, 8, COLUMNS]), [0, 2, 1, 3])
    out = gl.reshape(out, [DIMS, COLUMNS])
    LAYOUT: gl.constexpr = out.type.layout
    coordinate = gl.arange(0, DIMS, gl.SliceLayout(1, LAYOUT))
    head = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    back = gl.convert_layout(gl.where(total > 0.0, 1.0 / total, 0.0), gl.SliceLayout(0, LAYOUT), assert_trivial=True)
    at = row_of(head, stride * DIMS, RATIO, QUERIES, DIMS)
    gl.store(outs + (at[None, :] + coordinate[:, None]), out * back[None, :], mask=(head < live)[None, :])
    store_weights(weights, highest, total, live, stride, RATIO, QUERIES, COLUMNS)


@gluon.jit
def _queries(q, scale, live, stride, DIMS: gl.constexpr, RATIO: gl.constexpr, QUERIES: gl.constexpr,
             COLUMNS: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """The second operand of logits."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    coordinate = gl.arange(0, DIMS, gl.SliceLayout(1, OPERAND))
    head = gl.arange(0, COLUMNS, gl.SliceLayout(0, OPERAND))
    at = row_of(head, stride, RATIO, QUERIES, DIMS)[None, :] + coordinate[:, None]
    x = gl.load(q + at, mask=(head < live)[None, :], other=0.0)
    return (x.to(gl.float32) * scale).to(gl.float16)


@gluon.jit
def _load(ring, rings, at, last, places, RING: gl.constexpr, DIMS: gl.constexpr, TOKENS: gl.constexpr,
          LAYOUT: gl.constexpr):  # fmt: skip
    """Vectors of a side from place `at` of a ring with `places` places on, float16[token, coordinate]. Behind the
    `last` one, it stands in."""
    place = at + gl.minimum(gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT)), last)
    place = gl.where(place < places, place, place - places)
    block = gl.load(rings + place // RING.tokens) * gl.num_programs(1) + gl.program_id(1)
    vector = block * RING.numbers + place % RING.tokens * DIMS
    coordinate = gl.arange(0, DIMS, gl.SliceLayout(0, LAYOUT))
    return _halves(gl.load(ring + vector[:, None] + coordinate[None, :]))


@gluon.jit
def _halves(x):
    """Numbers as float16. Of bfloat16, a register holds two neighbours."""
    if x.dtype == gl.bfloat16:
        x = gl.inline_asm_elementwise(
            "{ .reg .b32 a, b; shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000; cvt.rn.f16x2.f32 $0, b, a; }",
            "=r,r", [x], dtype=gl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return x


@gluon.constexpr_function
def _value_layout(tokens, dims):
    """[token, coordinate]: a lane has 8 neighbours of the tokens whose weights it holds."""
    registers = [[0, 1], [0, 2], [0, 4], [1, 0]] + [[8 << i, 0] for i in range(log2(tokens // 8))]
    registers += [[0, 64 << i] for i in range(log2(dims // 64))]
    lanes = [[2, 0], [4, 0], [0, 8], [0, 16], [0, 32]]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [tokens, dims])
