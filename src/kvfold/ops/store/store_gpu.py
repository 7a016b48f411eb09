"""`store` in one launch, keys and values together. A CTA packs tiles of one KV head: keys, values, or both in turn.

transform_tiles.py and quantize_tiles.py compute. 16-bit floats are stored as int16, by their bits.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from kvfold.format.codec import Codec
from kvfold.ops import tiles
from kvfold.ops.attend.parts import sms
from kvfold.ops.cards import Card
from kvfold.ops.launch import Launcher
from kvfold.ops.pages import LayerPages
from kvfold.ops.pdl import AFTER, ALONE, release, wait
from kvfold.ops.rotate import head_stride, matrix_and_shift
from kvfold.ops.sizes import ceil_div, power_of_two
from kvfold.ops.store.quantize_tiles import (
    coded,
    quantized,
    sixteen_bits,
    storable,
    store_codes,
    store_parts,
    without_first,
)
from kvfold.ops.store.transform_tiles import QUAD, load_matrix, prefetch, split_columns, transformed
from kvfold.ops.tiles import EVEN, RAW, Side
from kvfold.quantizers import lloyd_max

NARROWEST = 16  # columns, the fewest that MMA takes


class _Tile(NamedTuple):
    """What a CTA takes."""

    tokens: int
    rows: int  # of a matrix per load, at most 128
    warps: int
    stages: int  # more than one: the next rows, or the next tile's vectors, are prefetched
    registers: int | None  # per thread, at most
    resident: int = 0  # CTAs per SM that take several tiles of keys, then of values; 0: a CTA takes one of either


class _Tiles(NamedTuple):
    """For many vectors: larger tiles read matrices less often."""

    plain: _Tile  # up to 128 coordinates, no open block
    block: _Tile  # up to 128 coordinates, which are also written raw
    long: _Tile


FEW = _Tile(16, 128, 4, 1, None)
FEW_LONG = _Tile(16, 32, 4, 3, None)  # vectors of more than 128 coordinates: with up to 66 KB
MANY_VECTORS = 1 << 13  # from this many vectors on, larger tiles have CTAs for nearly all SMs
MANY = {  # by `Card.products`
    # four CTAs per SM, with 48 KB of shared memory each; two CTAs per SM, with up to 101 KB
    "wgmma": _Tiles(_Tile(64, 128, 4, 1, 128, 4), _Tile(64, 128, 4, 2, 255, 2), _Tile(64, 32, 8, 3, None)),
    # two CTAs per SM, with up to 20 KB; more stages would take more registers than there are
    "mma": _Tiles(_Tile(64, 32, 4, 2, 255), _Tile(64, 32, 4, 2, 255), _Tile(64, 32, 8, 3, None)),
    # Two warps multiply with `mma`, not through tensor memory: sums in registers are packed where they are.
    "tcgen05": _Tiles(_Tile(32, 32, 2, 2, 255), _Tile(32, 32, 2, 2, 255), _Tile(32, 32, 4, 2, 255)),
}


class _Source(NamedTuple):
    """The keys or the values of a step."""

    x: Tensor  # [tokens, kv_heads, d]; the numbers of a vector are contiguous
    token: int  # strides
    head: int
    new: Tensor | None  # raw, as `store` returns it
    rows: Tensor | None  # see `Fresh`
    kept: Tensor | None
    begins: Tensor | None  # `Step.begins`, if there is a `Codec.first`


class _Operands(NamedTuple):
    """What transforms x: factors·x·matrix + shift. Columns are those of tiles (see `_prepare`)."""

    matrix: Tensor | None  # 16-bit [kv_heads or 1, rows, columns]; None: 1
    head: int  # stride from KV head to KV head
    factors: tuple[Tensor | float, ...] | None  # of columns, per segment; None without a matrix
    shift: Tensor | None  # float32[kv_heads, columns]; None: 0
    first: Tensor | None  # float32[kv_heads, d]: see `Codec.first`


class _Packing(NamedTuple):
    """How keys or values are computed and packed. Tuples have one entry per segment."""

    side: Side
    width: tuple[int, ...]  # columns per part
    column: tuple[int, ...]  # the first column of the segment's parts
    columns: int
    blocks: tuple[tuple[int, int], ...]  # of columns that are multiplied together: the first column, and how many
    rotated: bool
    bfloat: bool  # whether raw segments are bfloat16


class _Memory(NamedTuple):
    pool: Tensor
    words: Tensor  # the pool as 16-bit words
    ring: Tensor
    faults: Tensor
    levels: Tensor  # see lloyd_max.py
    boundaries: Tensor


def store(card: Card, pages: LayerPages, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """As `naive.store`, for 16-bit k and v.

    On cards that overlap, the kernel is launched before the previous one ends, and lets the next one begin.

    A vector that cannot be stored gets zeros as metadata. Then any codes decode to zeros.
    """
    _check(pages, k, v)
    new = pages.new_fresh() if pages.block else None
    tokens, kv_heads, _ = k.shape
    tile, kernel = pages.once(_launcher, card, k.dtype, tokens * kv_heads >= MANY_VECTORS)
    programs, sides = ceil_div(tokens, tile.tokens), 2
    at_once = tile.resident * sms(k.device) // kv_heads  # CTAs of a KV head
    if 0 < at_once < sides * programs:  # keys, then values; fewer CTAs if none of them gets more tiles for it
        programs, sides = ceil_div(programs, ceil_div(programs, at_once)), 1
    raw = (None, None) if new is None else new
    sources = (
        _source(pages, codec, x, side) for codec, x, side in zip((pages.key, pages.value), (k, v), raw, strict=True)
    )
    kernel((programs, kv_heads, sides), *sources, pages.step.locations, tokens)
    return new


def _check(pages: LayerPages, k: Tensor, v: Tensor) -> None:
    if k.dtype != v.dtype:
        raise ValueError(f"the kernel stores keys and values of one dtype, not {k.dtype} and {v.dtype}")
    if k.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"the kernel stores bfloat16 and float16, not {k.dtype}")
    tokens, kv_heads = pages.step.locations.shape[0], pages.pool.shape[1]
    for x, slot in ((k, pages.layout.key), (v, pages.layout.value)):
        expected = tokens, kv_heads, slot.dims
        if x.shape != expected:
            raise ValueError(f"{tuple(x.shape)} are not the {expected} [tokens, kv_heads, d] of the step")


def _launcher(pages: LayerPages, card: Card, dtype: torch.dtype, many: bool) -> tuple[_Tile, Launcher]:
    """For keys and values in this dtype, and what a CTA takes of them."""
    device, layout, overlap = pages.pool.device, pages.layout, AFTER if card.overlaps else ALONE
    # `wgmma` gives a row to one warp. `mma` gives it to two if there are 128 columns, and few columns to one.
    key, value = pages.once(_prepared, card.products == "wgmma", dtype)
    long = max(layout.key.dims, layout.value.dims) > 128
    if many:
        large = MANY[card.products]
        tile = large.long if long else large.block if pages.block else large.plain
    else:
        tile = FEW_LONG if long else FEW
    memory = _Memory(
        pages.pool,
        pages.pool.view(torch.int16),
        pages.ring.view(torch.int16),
        pages.faults,
        lloyd_max.level_table(device),
        lloyd_max.boundary_table(device),
    )
    return tile, Launcher(
        _store,
        key=key[0],
        KEY=key[1],
        value=value[0],
        VALUE=value[1],
        key_clip=pages.key.clip,
        value_clip=pages.value.clip,
        memory=memory,
        BFLOAT=pages.ring.dtype == torch.bfloat16,
        PAGE_SIZE=layout.page_size,
        PAGE_BYTES=layout.page_bytes,
        RING_TOKENS=pages.ring_tokens,
        RING_NUMBERS=pages.ring.shape[2],
        TOKENS=tile.tokens,
        ROWS=tile.rows,
        OVERLAP=overlap,
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=tile.registers,
        **overlap.launch,
    )


def _source(pages: LayerPages, codec: Codec, x: Tensor, new: Tensor | None) -> _Source:
    token, head, number = x.stride()
    if number != 1:
        x = x.clone(memory_format=torch.contiguous_format)
        token, head, _ = x.stride()
    begins = None if codec.first is None else pages.step.begins
    if new is None:
        return _Source(x, token, head, None, None, None, begins)
    return _Source(x, token, head, new.view(torch.int16), pages.fresh.rows, pages.fresh.kept, begins)


def _prepared(pages: LayerPages, together: bool, dtype: torch.dtype) -> list[tuple[_Operands, _Packing]]:
    """For keys and for values, whatever a CTA takes of them."""
    sides = (pages.key, tiles.key_side(pages.layout)), (pages.value, tiles.value_side(pages.layout))
    return [_prepare(codec, side, together, dtype, pages.pool.device) for codec, side in sides]


def _prepare(
    codec: Codec, side: Side, together: bool, dtype: torch.dtype, device: torch.device
) -> tuple[_Operands, _Packing]:
    """For the keys or the values of a layer, in this dtype. `together`: all segments are multiplied in one product."""
    transform, bfloat = codec.transform, codec.raw_dtype == torch.bfloat16
    rotated = transform.rotation is not None
    parts, runs = side.parts, side.run
    widths = tuple(
        max(NARROWEST // count, QUAD.value, power_of_two(run)) if rotated else power_of_two(run)
        for count, run in zip(parts, runs, strict=True)
    )
    columns = [count * width for count, width in zip(parts, widths, strict=True)]  # per segment
    # The largest segment is first. So each begins at a multiple of its columns.
    placed = sorted(range(len(columns)), key=lambda i: -columns[i])
    first = dict(zip(placed, accumulate((columns[i] for i in placed), initial=0), strict=False))
    order = [-1] * power_of_two(sum(columns))  # the coordinate of every column, -1: none
    for i, (count, run, width) in enumerate(zip(parts, runs, widths, strict=True)):
        for at, (part, place) in enumerate(split_columns(range(count), width, rotated), first[i]):
            if place < coded(side.dims[i], run, part):
                order[at] = side.start[i] + part * run + place
    matrix, factors, shift = matrix_and_shift(transform, side.head_dim, dtype, device)
    if matrix is not None:  # coordinate -1 is the padding, zero
        matrix = pad(matrix, (0, 1, 0, -side.head_dim % 128))[..., order].contiguous()
    if shift is not None:
        shift = pad(shift, (0, 1))[..., order].contiguous()
    per_segment = None
    if factors is not None:
        in_order = pad(factors, (0, 1))[order]
        per_segment = tuple(_one_or_all(in_order[first[i] : first[i] + n]) for i, n in enumerate(columns))
    operands = _Operands(matrix, 0 if matrix is None else head_stride((matrix,)), per_segment, shift, codec.first)
    column = tuple(first[i] for i in range(len(columns)))
    blocks = ((0, len(order)),) if together else tuple(zip(column, columns, strict=True))
    return operands, _Packing(side, widths, column, len(order), blocks, rotated, bfloat)


def _one_or_all(factors: Tensor) -> float | Tensor:
    """The factors of a segment; one number if they are the same. Columns without a coordinate have zeros."""
    different = set(factors.tolist()) - {0.0}
    return different.pop() if len(different) == 1 else factors.contiguous()


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["locations"])
def _store(
    k, v, locations, tokens, key, KEY: tl.constexpr, value, VALUE: tl.constexpr, key_clip, value_clip,
    memory, BFLOAT: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_BYTES: tl.constexpr,
    RING_TOKENS: tl.constexpr, RING_NUMBERS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A block of a ring has RING_NUMBERS numbers per KV head: the keys of RING_TOKENS tokens, then their values."""
    if tl.program_id(2) == 0:
        _store_side(
            k, key, key_clip, locations, memory, tokens, KEY, 0, RING_TOKENS, RING_NUMBERS, BFLOAT,
            PAGE_SIZE, PAGE_BYTES, TOKENS, ROWS, OVERLAP,
        )  # fmt: skip
    if tl.program_id(2) == tl.num_programs(2) - 1:
        _store_side(
            v, value, value_clip, locations, memory, tokens, VALUE, RING_TOKENS * KEY.side.head_dim,
            RING_TOKENS, RING_NUMBERS, BFLOAT, PAGE_SIZE, PAGE_BYTES, TOKENS, ROWS, OVERLAP,
        )  # fmt: skip
    wait(OVERLAP, "end")


@triton.jit
def _store_side(
    source, operands, clip, locations, memory, tokens, PACKING: tl.constexpr, FIRST: tl.constexpr,
    RING_TOKENS: tl.constexpr, RING_NUMBERS: tl.constexpr, BFLOAT: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAGE_BYTES: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Store a side. It begins at number FIRST of a block of a ring."""
    matrix = None
    if PACKING.rotated and PACKING.side.head_dim <= ROWS:  # it stays from tile to tile
        matrix = load_matrix(operands, 0, PACKING, ROWS)
    wait(OVERLAP, "start")  # after the matrix: no kernel writes it
    release(OVERLAP, "start")
    for tile in range(tl.program_id(0), tl.cdiv(tokens, TOKENS), tl.num_programs(0)):
        token = tile * TOKENS + tl.arange(0, TOKENS)
        location = tl.load(locations + token, mask=token < tokens, other=-1)
        ys = transformed(matrix, token, source, operands, tokens, PACKING, ROWS)
        prefetch(token + tl.num_programs(0) * TOKENS, source, tokens, PACKING)  # the next tile
        # Always true. With two stages, Triton begins to load the next tile before an `if`, but after anything else.
        if tile * TOKENS < tokens:
            _store_tile(
                ys, token, location, source, operands, clip, memory, tokens, PACKING, FIRST, RING_TOKENS,
                RING_NUMBERS, BFLOAT, PAGE_SIZE, PAGE_BYTES,
            )  # fmt: skip


@triton.jit
def _store_tile(
    ys, token, location, source, operands, clip, memory, tokens, PACKING: tl.constexpr, FIRST: tl.constexpr,
    RING_TOKENS: tl.constexpr, RING_NUMBERS: tl.constexpr, BFLOAT: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
):  # fmt: skip
    """Pack transformed vectors to their locations. With an open block, also write them raw."""
    SEGMENTS: tl.constexpr = len(PACKING.side.parts)
    head = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1)
    stored = location >= 0
    sound = stored
    if source.new is not None:
        for i in tl.static_range(SEGMENTS):
            sound = sound & storable(ys[i], BFLOAT)
    packed = ()  # per segment: packed codes or numbers, soundness, metadata
    for i in tl.static_range(SEGMENTS):
        y = ys[i]
        if operands.first is not None:
            begins = tl.load(source.begins + token, mask=stored, other=0) != 0
            y = without_first(y, operands.first + head * PACKING.side.head_dim, begins, PACKING, i)
        packed += (quantized(y, clip, memory.levels, memory.boundaries, PACKING, i),)
        sound = sound & packed[i][1]
    tl.store(memory.faults + location, 1, mask=stored & ~sound)

    page = location // PAGE_SIZE
    place = location % PAGE_SIZE
    bytes = memory.pool + (page * heads + head) * PAGE_BYTES
    words = memory.words + (page * heads + head) * (PAGE_BYTES // 2)
    for i in tl.static_range(SEGMENTS):
        if PACKING.side.rule[i] == RAW:
            floats = words + PACKING.side.codes[i] // 2 + place * (PACKING.side.code_stride[i] // 2)
            store_parts(sixteen_bits(packed[i][0], sound, PACKING.bfloat), floats, stored, PACKING, i)
        else:
            codes = bytes + PACKING.side.codes[i] + place * PACKING.side.code_stride[i]
            store_codes(packed[i][0], codes, stored, PACKING, i)
            if PACKING.side.rule[i] == EVEN:
                scales = bytes + PACKING.side.meta[i] + place * PACKING.side.meta_stride[i]
                tl.store(scales, tl.where(sound, packed[i][2], 0).to(tl.uint8), mask=stored)
            else:
                meta = words + PACKING.side.meta[i] // 2 + place * (PACKING.side.meta_stride[i] // 2)
                at = meta[:, None] + tl.arange(0, packed[i][2].shape[1])[None, :]
                tl.store(at, tl.where(sound[:, None], packed[i][2].to(tl.int16, bitcast=True), 0), mask=stored[:, None])

    if source.new is not None:
        exists = token < tokens
        row = token.to(tl.int64)
        if source.rows is not None:
            row = tl.load(source.rows + token, mask=exists, other=0)
        kept = tl.load(source.kept + token, mask=exists, other=-1)
        in_new = source.new + (row * heads + head) * PACKING.side.head_dim
        in_ring = memory.ring + (kept // RING_TOKENS * heads + head) * RING_NUMBERS
        in_ring += FIRST + kept % RING_TOKENS * PACKING.side.head_dim
        for i in tl.static_range(SEGMENTS):
            raw = sixteen_bits(ys[i], sound, BFLOAT)
            store_parts(raw, in_new + PACKING.side.start[i], exists, PACKING, i)
            store_parts(raw, in_ring + PACKING.side.start[i], kept >= 0, PACKING, i)
