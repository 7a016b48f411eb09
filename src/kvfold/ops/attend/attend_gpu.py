"""`attend` on any GPU: one kernel for decode, chunked prefill and the verification of drafted tokens.

A CTA takes a tile of queries (`QueryTiles`) and one part of the packed tokens that they read. Another kernel reads
the open block. All parts are merged by log-sum-exp. Grids depend on sizes alone; lengths are read on the device.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.format import open_block
from kvfold.ops.attend import open_block_kernel
from kvfold.ops.attend.parts import (
    LOG2_E,
    MAX_ROWS,
    UNSEEN,
    Cap,
    QueryTiles,
    capped,
    empty,
    lacking,
    learned_sinks,
    merge,
    raw_from,
    soft_cap,
    softmax,
    tile_rows,
)
from kvfold.ops.launch import launcher
from kvfold.ops.pages import LayerPages, Logits
from kvfold.ops.rotate import dual
from kvfold.ops.tiles import (
    AFFINE,
    CHANNEL,
    CODEBOOK,
    EVEN,
    attended_sides,
    coordinates,
    load_codes,
    load_scales,
    middle,
    pick_codes,
    power_of_two,
)
from kvfold.quantizers import lloyd_max


def attend(
    pages: LayerPages, q: Tensor, new: tuple[Tensor, Tensor] | None, logits: Logits, out: Tensor | None = None
) -> Tensor:
    """Queries [tokens, q_heads, d] -> outputs [tokens, q_heads, d], float32 or in `out`. Keys and values may differ in
    d.

    `new` is what `store` returned for the same step.
    """
    dims = pages.layout.value.dims
    if not q.numel():
        return torch.empty(*q.shape[:2], dims, device=q.device)
    rotated = dual(pages.key.transform, q)
    last = pages.step.table.shape[1] * pages.layout.page_size - 1  # the last position in the page table
    tokens = open_block.raw_from(last, pages.block)  # the most that a query reads packed
    packed = QueryTiles(pages, rotated).splits(tokens, q.device) if tokens > 0 else 0
    outs, weights = empty(packed + (0 if new is None else open_block_kernel.splits(pages, rotated)), rotated, dims)
    cap = soft_cap(pages, q, logits)
    if packed:
        _attend_packed(pages, rotated, logits, cap, outs[:packed], weights[:packed])
    if new is not None:
        open_block_kernel.attend(pages, rotated, new, logits, outs[packed:], weights[packed:], cap)
    return merge(outs, weights, pages.value.transform, out, sinks=learned_sinks(pages, q, logits))


def _attend_packed(
    pages: LayerPages, q: Tensor, logits: Logits, cap: Cap | None, outs: Tensor, weights: Tensor
) -> None:
    """Let transformed queries [tokens, q_heads, d] read the packed tokens, in parts."""
    step, layout = pages.step, pages.layout
    centroids = [None if x is None else x.contiguous() for x in (pages.key.centroids, pages.value.centroids)]
    has_centroids = any(x is not None for x in centroids)
    tiles = QueryTiles(pages, q, MAX_ROWS // 2 if has_centroids else MAX_ROWS)  # they take shared memory, too
    # if metadata belong to pages, a tile lies in one page; more than 32 tokens would take too many registers
    tokens = math.gcd(32, layout.page_size) if layout.per_page else tiles.tokens
    sides = attended_sides(layout)
    heads = tiles.kv_heads // len(sides)
    for i, (key, value) in enumerate(sides):
        # levels and centroids are looked up; if prefetched, they would fill shared memory
        looked_up = CODEBOOK.value in key.rule + value.rule or has_centroids
        kernel = launcher(
            _attend,
            q.device,
            KEY=key,
            VALUE=value,
            KEY_CENTROIDS=0 if centroids[0] is None else centroids[0].shape[1],
            VALUE_CENTROIDS=0 if centroids[1] is None else centroids[1].shape[1],
            HEAD=i * heads,
            BLOCK=pages.block,
            PAGE=layout.page_size,
            PAGE_BYTES=layout.page_bytes,
            KV_HEADS=tiles.kv_heads,
            Q_HEADS=q.shape[1],
            RATIO=tiles.ratio,
            QUERIES=tiles.queries,
            ROWS=tiles.rows,
            STRIDE=tokens,
            TOKENS=max(32, tokens),  # the product with values sums over 32 tokens at least (see tiles.py)
            num_warps=tiles.num_warps,
            num_stages=1 if looked_up else 3,
            maxnreg=None if looked_up or layout.per_page else tiles.registers,  # lookups and page metadata need more
        )
        kernel(
            (tiles.count, heads, len(outs)),
            q,
            outs,
            weights,
            pages.pool,
            pages.pool.view(torch.float16),
            pages.pool.view(pages.ring.dtype),
            lloyd_max.level_table(q.device),
            *centroids,
            pages.key.first,
            step.query_starts,
            step.lengths,
            step.table,
            logits.scale * LOG2_E.value,
            cap,
            tiles.per_sequence,
            q.shape[0],
            step.table.stride(0),
            *q.stride()[:2],
        )


@triton.jit(
    do_not_specialize=["query_tiles", "tokens", "table_stride"],
    do_not_specialize_on_alignment=["query_starts", "lengths", "table"],
)
def _attend(
    q,
    outs,
    weights,
    pool,
    pool_meta,  # the pool as float16
    pool_raw,  # the pool in the 16-bit dtype of raw segments
    levels,
    key_centroids,  # float32[kv_heads, centroids, d], or None
    value_centroids,
    key_first,  # float32[kv_heads, d], or None: see `Codec.first`
    query_starts,
    lengths,
    table,
    scale,  # of the logits, times log2(e)
    cap,
    query_tiles,  # per sequence
    tokens,
    table_stride,
    q_stride,
    q_head_stride,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_CENTROIDS: tl.constexpr,  # per KV head
    VALUE_CENTROIDS: tl.constexpr,
    HEAD: tl.constexpr,  # the first KV head
    BLOCK: tl.constexpr,  # tokens of the open block, 0: none
    PAGE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    RATIO: tl.constexpr,  # query heads per KV head, up to a power of two
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    STRIDE: tl.constexpr,  # tokens from tile to tile
    TOKENS: tl.constexpr,  # columns of a tile; the first STRIDE hold tokens
):
    head, split = HEAD + tl.program_id(1), tl.program_id(2)
    sequence, first = tl.program_id(0) // query_tiles, tl.program_id(0) % query_tiles * QUERIES
    if first >= tl.load(query_starts + sequence + 1) - tl.load(query_starts + sequence):
        return
    table += sequence.to(tl.int64) * table_stride
    query, q_head, live, position, _, last = tile_rows(
        query_starts, lengths, sequence, first, head, Q_HEADS, KV_HEADS, RATIO, QUERIES, ROWS
    )
    packed_to = raw_from(position, BLOCK)
    if cap is not None:
        lacked = lacking(cap, query.to(tl.int64) * Q_HEADS + q_head, live)
    qs, sums, means = (), (), ()
    of_first = tl.zeros([ROWS], tl.float32)  # what logits of the token at position 0 lack
    for i in tl.static_range(len(KEY.parts)):
        if key_first is not None:
            coordinate, real = coordinates(KEY, i)
            near = tl.load(key_first + head * KEY.head_dim + coordinate, mask=real, other=0.0)
            own = q + query.to(tl.int64) * q_stride + q_head * q_head_stride
            states = tl.load(own[:, None] + coordinate[None, :], mask=live[:, None] & real[None, :], other=0.0)
            of_first += tl.sum(states.to(tl.float32) * near[None, :], 1) * scale
        qs += (_queries(q + query.to(tl.int64) * q_stride + q_head * q_head_stride, live, scale, KEY, i),)
        sums += (tl.sum(qs[i].to(tl.float32), 1),)
    for i in tl.static_range(len(VALUE.parts)):
        means += (tl.zeros([ROWS, VALUE.parts[i] * VALUE.width[i]], tl.float32),)
    highest = tl.full([ROWS], UNSEEN, tl.float32)
    total = tl.zeros([ROWS], tl.float32)

    packed_end = raw_from(last, BLOCK)
    tiles = tl.cdiv(packed_end, STRIDE)
    share = tl.cdiv(tiles, tl.num_programs(2))
    for tile in range(split * share, tl.minimum((split + 1) * share, tiles)):
        tile_from = tile * STRIDE
        token = tile_from + tl.arange(0, TOKENS)
        exists = token < tl.minimum(packed_end, tile_from + STRIDE)
        if PAGE % STRIDE == 0:  # the tile lies in one page
            page = tl.load(table + tile_from // PAGE)
        else:
            page = tl.load(table + token // PAGE, mask=exists, other=0)
        page = page.to(tl.int64) * KV_HEADS + head
        offset = token % PAGE
        logits = tl.zeros([ROWS, TOKENS], tl.float32)
        for i in tl.static_range(len(KEY.parts)):
            x = _levels(pool, pool_meta, pool_raw, levels, page, offset, exists, KEY, i, PAGE_BYTES).to(tl.float16)
            meta = _meta(pool_meta, page, offset, KEY, i, PAGE_BYTES)
            if KEY.rule[i] == AFFINE:
                factor, shift = _pair(meta, exists)
                logits += tl.dot(qs[i], tl.trans(x)) * factor.to(tl.float32)[None, :]
                logits += sums[i][:, None] * shift.to(tl.float32)[None, :]
            elif KEY.rule[i] == CODEBOOK:
                factor = tl.load(meta, mask=exists, other=0.0).to(tl.float32)
                logits += tl.dot(qs[i], tl.trans(x)) * factor[None, :]
            elif KEY.rule[i] == EVEN:
                factor = load_scales(pool + page * PAGE_BYTES, offset, exists, KEY, i)
                logits += (tl.dot(qs[i], tl.trans(x)) - sums[i][:, None] * middle(KEY.bits[i])) * factor[None, :]
            else:
                logits = tl.dot(qs[i], tl.trans(x), logits)
            if key_centroids is not None:
                named = key_centroids + head * KEY_CENTROIDS * KEY.head_dim
                c = _centroids(named, pool_meta, page, offset, exists, KEY, i, PAGE_BYTES)
                logits = tl.dot(qs[i], tl.trans(c.to(tl.float16)), logits)
        if key_first is not None:
            logits += tl.where((token == 0)[None, :], of_first[:, None], 0.0)
        if cap is not None:
            logits = capped(logits, cap, lacked)
        seen = exists[None, :] & (token[None, :] < packed_to[:, None])
        weight, fade, highest, total = softmax(logits, seen, highest, total)
        updated = ()
        for i in tl.static_range(len(VALUE.parts)):
            x = _levels(pool, pool_meta, pool_raw, levels, page, offset, exists, VALUE, i, PAGE_BYTES)
            meta = _meta(pool_meta, page, offset, VALUE, i, PAGE_BYTES)
            if VALUE.rule[i] == AFFINE:
                factor, shift = _pair(meta, exists)
                if value_centroids is not None:  # round the sum, not x alone
                    x = x.to(tl.float32)
                x = tl.fma(x, factor[:, None], shift[:, None])
            elif VALUE.rule[i] == CODEBOOK:
                x = x * tl.load(meta, mask=exists, other=0.0).to(tl.float32)[:, None]
            elif VALUE.rule[i] == EVEN:
                factor = load_scales(pool + page * PAGE_BYTES, offset, exists, VALUE, i).to(tl.float16)
                x = (x - middle(VALUE.bits[i])) * factor[:, None]
            if value_centroids is not None:
                named = value_centroids + head * VALUE_CENTROIDS * VALUE.head_dim
                x = x + _centroids(named, pool_meta, page, offset, exists, VALUE, i, PAGE_BYTES)
            updated += (tl.dot(weight, x.to(tl.float16), means[i] * fade[:, None]),)
        means = updated

    place = (split.to(tl.int64) * tokens + query) * Q_HEADS + q_head
    tl.store(weights + place, tl.where(total > 0, highest + tl.log2(total), UNSEEN), mask=live)
    for i in tl.static_range(len(VALUE.parts)):
        coordinate, real = coordinates(VALUE, i)
        mean = means[i] / tl.where(total > 0, total, 1.0)[:, None]
        at = outs + place[:, None] * VALUE.head_dim + coordinate[None, :]
        tl.store(at, mean, mask=live[:, None] & real[None, :])


@triton.jit
def _queries(rows, live, scale, KEY: tl.constexpr, SEGMENT: tl.constexpr):
    """A segment of the queries at pointers `rows`, in the order of the tile's columns."""
    coordinate, real = coordinates(KEY, SEGMENT)
    states = tl.load(rows[:, None] + coordinate[None, :], mask=live[:, None] & real[None, :], other=0.0)
    return (states.to(tl.float32) * scale).to(tl.float16)


@triton.jit
def _levels(
    pool, pool_meta, pool_raw, levels, page, offset, exists,
    SIDE: tl.constexpr, SEGMENT: tl.constexpr, PAGE_BYTES: tl.constexpr,
):  # fmt: skip
    """A segment of a tile of packed tokens, [TOKENS, parts·width].

    - affine, even: codes; codebook: levels. The caller scales them by the token's metadata.
    - channel, raw: numbers. Metadata of `channel` belong to the page, and the tile lies in one page.
    """
    slots = pool + page * PAGE_BYTES + (SIDE.codes[SEGMENT] + offset * SIDE.code_stride[SEGMENT])
    if (SIDE.rule[SEGMENT] == AFFINE) | (SIDE.rule[SEGMENT] == EVEN):
        return load_codes(slots, SIDE, SEGMENT)
    elif SIDE.rule[SEGMENT] == CODEBOOK:
        return tl.load(levels + (1 << SIDE.bits[SEGMENT]) + load_codes(slots, SIDE, SEGMENT).to(tl.int32))
    elif SIDE.rule[SEGMENT] == CHANNEL:
        codes = load_codes(slots, SIDE, SEGMENT)
        if SIDE.boosted[SEGMENT]:
            codes += _boosts(pool, slots, exists, page, SIDE, SEGMENT, PAGE_BYTES).to(tl.float16)
        coordinate, real = coordinates(SIDE, SEGMENT)
        meta = pool_meta + page * (PAGE_BYTES // 2) + SIDE.meta[SEGMENT] // 2 + coordinate
        factor = tl.load(meta, mask=real, other=0.0)
        shift = tl.load(meta + SIDE.dims[SEGMENT], mask=real, other=0.0)
        return tl.fma(codes, factor[None, :], shift[None, :])
    else:
        coordinate, real = coordinates(SIDE, SEGMENT)
        first = SIDE.codes[SEGMENT] // 2 - SIDE.start[SEGMENT] + offset * (SIDE.code_stride[SEGMENT] // 2)
        rows = pool_raw + page * (PAGE_BYTES // 2) + first
        return tl.load(rows[:, None] + coordinate[None, :], mask=exists[:, None] & real[None, :], other=0.0)


@triton.jit
def _meta(pool_meta, page, offset, SIDE: tl.constexpr, SEGMENT: tl.constexpr, PAGE_BYTES: tl.constexpr):
    """Where the 16-bit metadata of a segment lie."""
    return pool_meta + page * (PAGE_BYTES // 2) + (SIDE.meta[SEGMENT] // 2 + offset * (SIDE.meta_stride[SEGMENT] // 2))


@triton.jit
def _pair(meta, exists):
    """Scale and offset per token, in one load."""
    return tl.split(tl.load(meta[:, None] + tl.arange(0, 2)[None, :], mask=exists[:, None], other=0.0))


@triton.jit
def _boosts(pool, slots, exists, page, SIDE: tl.constexpr, SEGMENT: tl.constexpr, PAGE_BYTES: tl.constexpr):
    """The upper bits of boosted coordinates, which have twice the bits: int32[TOKENS, parts·width], 0 for all others.

    A page names its boosted coordinates. Their upper bits follow the codes of all coordinates.
    """
    BITS: tl.constexpr = SIDE.bits[SEGMENT]
    BOOSTED: tl.constexpr = SIDE.boosted[SEGMENT]
    number = tl.arange(0, power_of_two(BOOSTED))
    names = pool + page * PAGE_BYTES + SIDE.meta[SEGMENT] + 4 * SIDE.dims[SEGMENT]
    named = tl.load(names + number, mask=number < BOOSTED, other=0).to(tl.int32)
    coordinate, _ = coordinates(SIDE, SEGMENT)
    match = (coordinate[:, None] == named[None, :]) & (number < BOOSTED)[None, :]
    behind = tl.sum(tl.where(match, number[None, :] + 1, 0), 1)  # 0: not named
    mask = exists[:, None] & (behind > 0)[None, :]
    high = slots + SIDE.eighth[SEGMENT] * BITS
    return pick_codes(high, mask, tl.maximum(behind - 1, 0), BITS, BOOSTED // 8) << BITS


@triton.jit
def _centroids(
    centroids, pool_meta, page, offset, exists, SIDE: tl.constexpr, SEGMENT: tl.constexpr, PAGE_BYTES: tl.constexpr
):  # fmt: skip
    """A segment of the centroids that packed tokens name, float32[TOKENS, parts·width]. `centroids`: of one KV head.

    The last entry of a slot's metadata names its centroid.
    """
    last = page * (PAGE_BYTES // 2) + SIDE.meta[0] // 2 + (offset + 1) * (SIDE.meta_stride[0] // 2) - 1
    number = tl.load(pool_meta + last, mask=exists, other=0.0).to(tl.int16, bitcast=True)
    coordinate, real = coordinates(SIDE, SEGMENT)
    pointers = (centroids + number.to(tl.int64) * SIDE.head_dim)[:, None] + coordinate[None, :]
    return tl.load(pointers, mask=exists[:, None] & real[None, :], other=0.0)
