"""`attend` in Triton, for any GPU: decode, chunked prefill and verification in one kernel.

A program takes a block of one sequence's queries, the query heads of one KV head, and one part of the packed tokens
that they read. Windows are read by another kernel, and all parts are merged by log-sum-exp. Grids depend on sizes
alone; lengths are read on the device.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.ops.attend import windows
from kvfold.ops.attend.parts import UNSEEN, Blocks, block_rows, empty, exact_from, merge, softmax
from kvfold.ops.pages import LayerPages
from kvfold.ops.rotate import dual
from kvfold.ops.tiles import (
    AFFINE,
    CHANNEL,
    CODEBOOK,
    attended_sides,
    coordinates,
    pick,
    power_of_two,
    unpack,
)
from kvfold.quantizers import lloyd_max


def attend(
    pages: LayerPages, q: Tensor, new: tuple[Tensor, Tensor] | None, scale: float, out: Tensor | None = None
) -> Tensor:
    """Queries [tokens, q_heads, d] -> outputs of the same shape, float32 or in `out`.

    `new` is what `store` returned for the same step.
    """
    if not q.numel():
        return q.float()
    rotated = dual(pages.key.transform, q)
    last = pages.step.table.shape[1] * pages.layout.page_size - 1  # that a page table has room for
    tokens = pages.windows.exact_from(last) - pages.windows.sink  # and that a query reads packed, at most
    packed = Blocks(pages, rotated).splits(tokens, q.device) if tokens > 0 else 0
    outs, weights = empty(packed + (0 if new is None else windows.splits(pages, rotated)), rotated)
    if packed:
        _attend_packed(pages, rotated, scale, outs[:packed], weights[:packed])
    if new is not None:
        windows.attend(pages, rotated, new, scale, outs[packed:], weights[packed:])
    return merge(outs, weights, pages.value.transform, out)


def _attend_packed(pages: LayerPages, q: Tensor, scale: float, outs: Tensor, weights: Tensor) -> None:
    """Let transformed queries [tokens, q_heads, d] read what lies between their windows, in parts."""
    step, layout, blocks = pages.step, pages.layout, Blocks(pages, q)
    # a tile lies in one page where that has metadata; with more tokens there would be too few registers
    tokens = math.gcd(32, layout.page_size) if layout.per_page else blocks.tokens
    centroids = [None if x is None else x.contiguous() for x in (pages.key.centroids, pages.value.centroids)]
    sides = attended_sides(layout)
    heads = blocks.kv_heads // len(sides)
    for i, (key, value) in enumerate(sides):
        # what is looked up would fill shared memory if it were prefetched
        looked_up = CODEBOOK.value in key.rule + value.rule or any(x is not None for x in centroids)
        _attend[(blocks.count, heads, len(outs))](
            q,
            outs,
            weights,
            pages.pool,
            pages.pool.view(torch.float16),
            pages.pool.view(pages.shadows.dtype),
            lloyd_max.level_table(q.device),
            *centroids,
            step.query_starts,
            step.lengths,
            step.table,
            scale * math.log2(math.e),
            pages.windows.sink,
            pages.windows.recent,
            pages.windows.group,
            blocks.each,
            q.shape[0],
            step.table.stride(0),
            *q.stride()[:2],
            KEY=key,
            VALUE=value,
            KEY_CENTROIDS=0 if centroids[0] is None else centroids[0].shape[1],
            VALUE_CENTROIDS=0 if centroids[1] is None else centroids[1].shape[1],
            HEAD=i * heads,
            PAGE=layout.page_size,
            PAGE_BYTES=layout.page_bytes,
            KV_HEADS=blocks.kv_heads,
            Q_HEADS=q.shape[1],
            RATIO=blocks.ratio,
            QUERIES=blocks.queries,
            ROWS=blocks.rows,
            STEP=tokens,
            TOKENS=max(32, tokens),  # as many as columns, see `tiles`: of values they are what is summed over
            num_warps=blocks.num_warps,
            num_stages=1 if looked_up else 3,
            maxnreg=None if looked_up or layout.per_page else blocks.registers,  # what these read needs more
        )


@triton.jit(
    do_not_specialize=["sink", "recent", "group", "blocks", "tokens", "table_stride"],
    do_not_specialize_on_alignment=["query_starts", "lengths", "table"],
)
def _attend(
    q,
    outs,
    weights,
    pool,
    pool_meta,  # the pool as float16
    pool_wide,  # the pool as the 16-bit type of raw segments
    levels,
    key_centroids,  # float32[kv_heads, centroids, d], or None
    value_centroids,
    query_starts,
    lengths,
    table,
    scale,  # of the logits, times log2(e)
    sink,
    recent,
    group,
    blocks,  # of the queries of a sequence
    tokens,
    table_stride,
    q_stride,
    q_head_stride,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_CENTROIDS: tl.constexpr,  # of a KV head
    VALUE_CENTROIDS: tl.constexpr,
    HEAD: tl.constexpr,  # the first KV head
    PAGE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    RATIO: tl.constexpr,  # query heads of a KV head, up to a power of two
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,  # tokens of a tile
    TOKENS: tl.constexpr,  # and room for them
):
    DIMS: tl.constexpr = KEY.head_dim
    head, split = HEAD + tl.program_id(1), tl.program_id(2)
    sequence, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * QUERIES
    if first >= tl.load(query_starts + sequence + 1) - tl.load(query_starts + sequence):
        return
    table += sequence.to(tl.int64) * table_stride
    query, q_head, live, position, _, last = block_rows(
        query_starts, lengths, sequence, first, head, Q_HEADS, KV_HEADS, RATIO, QUERIES, ROWS
    )
    packed_to = exact_from(position, recent, group)
    qs, sums, means = (), (), ()
    for i in tl.static_range(len(KEY.parts)):
        qs += (_queries(q + query.to(tl.int64) * q_stride + q_head * q_head_stride, live, scale, KEY, i),)
        sums += (tl.sum(qs[i].to(tl.float32), 1),)
    for i in tl.static_range(len(VALUE.parts)):
        means += (tl.zeros([ROWS, VALUE.parts[i] * VALUE.width[i]], tl.float32),)
    highest = tl.full([ROWS], UNSEEN, tl.float32)
    total = tl.zeros([ROWS], tl.float32)

    packed_from, packed_end = sink // STEP * STEP, exact_from(last, recent, group)
    tiles = tl.cdiv(tl.maximum(packed_end - packed_from, 0), STEP)
    share = tl.cdiv(tiles, tl.num_programs(2))
    for tile in range(split * share, tl.minimum((split + 1) * share, tiles)):
        tile_from = packed_from + tile * STEP
        token = tile_from + tl.arange(0, TOKENS)
        exists = (token >= sink) & (token < tl.minimum(packed_end, tile_from + STEP))
        if PAGE % STEP == 0:  # the tile lies in one page
            page = tl.load(table + tile_from // PAGE)
        else:
            page = tl.load(table + token // PAGE, mask=exists, other=0)
        page = page.to(tl.int64) * KV_HEADS + head
        offset = token % PAGE
        logits = tl.zeros([ROWS, TOKENS], tl.float32)
        for i in tl.static_range(len(KEY.parts)):
            x = _levels(pool, pool_meta, pool_wide, levels, page, offset, exists, KEY, i, PAGE_BYTES).to(tl.float16)
            meta = pool_meta + page * (PAGE_BYTES // 2) + (KEY.meta + KEY.entry[i] + offset * KEY.meta_stride)
            if KEY.rule[i] == AFFINE:
                factor, shift = _pair(meta, exists)
                logits += tl.dot(qs[i], tl.trans(x)) * factor.to(tl.float32)[None, :]
                logits += sums[i][:, None] * shift.to(tl.float32)[None, :]
            elif KEY.rule[i] == CODEBOOK:
                factor = tl.load(meta, mask=exists, other=0.0).to(tl.float32)
                logits += tl.dot(qs[i], tl.trans(x)) * factor[None, :]
            else:
                logits = tl.dot(qs[i], tl.trans(x), logits)
            if key_centroids is not None:
                named = key_centroids + head * KEY_CENTROIDS * DIMS
                c = _centroids(named, pool_meta, page, offset, exists, KEY, i, PAGE_BYTES)
                logits = tl.dot(qs[i], tl.trans(c.to(tl.float16)), logits)
        seen = exists[None, :] & (token[None, :] < packed_to[:, None])
        weight, fade, highest, total = softmax(logits, seen, highest, total)
        updated = ()
        for i in tl.static_range(len(VALUE.parts)):
            x = _levels(pool, pool_meta, pool_wide, levels, page, offset, exists, VALUE, i, PAGE_BYTES)
            meta = pool_meta + page * (PAGE_BYTES // 2) + (VALUE.meta + VALUE.entry[i] + offset * VALUE.meta_stride)
            if VALUE.rule[i] == AFFINE:
                factor, shift = _pair(meta, exists)
                if value_centroids is not None:  # with which it is rounded
                    x = x.to(tl.float32)
                x = tl.fma(x, factor[:, None], shift[:, None])
            elif VALUE.rule[i] == CODEBOOK:
                x = x * tl.load(meta, mask=exists, other=0.0).to(tl.float32)[:, None]
            if value_centroids is not None:
                named = value_centroids + head * VALUE_CENTROIDS * DIMS
                x = x + _centroids(named, pool_meta, page, offset, exists, VALUE, i, PAGE_BYTES)
            updated += (tl.dot(weight, x.to(tl.float16), means[i] * fade[:, None]),)
        means = updated

    place = (split.to(tl.int64) * tokens + query) * Q_HEADS + q_head
    tl.store(weights + place, tl.where(total > 0, highest + tl.log2(total), UNSEEN), mask=live)
    for i in tl.static_range(len(VALUE.parts)):
        coordinate, real = coordinates(VALUE, i)
        mean = means[i] / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(outs + place[:, None] * DIMS + coordinate[None, :], mean, mask=live[:, None] & real[None, :])


@triton.jit
def _queries(rows, live, scale, KEY: tl.constexpr, SEGMENT: tl.constexpr):
    """A segment of the queries at pointers `rows`, in the order of its columns."""
    coordinate, real = coordinates(KEY, SEGMENT)
    states = tl.load(rows[:, None] + coordinate[None, :], mask=live[:, None] & real[None, :], other=0.0)
    return (states.to(tl.float32) * scale).to(tl.float16)


@triton.jit
def _levels(
    pool, pool_meta, pool_wide, levels, page, offset, exists,
    SIDE: tl.constexpr, SEGMENT: tl.constexpr, PAGE_BYTES: tl.constexpr,
):  # fmt: skip
    """A segment of a tile of packed tokens, [TOKENS, parts·width]: codes or levels, which a token's metadata are to
    scale, or numbers. Where metadata belong to a page, all tokens lie in it."""
    slots = pool + page * PAGE_BYTES + (SIDE.codes + offset * SIDE.code_stride)
    if SIDE.rule[SEGMENT] == AFFINE:
        return unpack(slots, SIDE, SEGMENT)
    elif SIDE.rule[SEGMENT] == CODEBOOK:
        return tl.load(levels + (1 << SIDE.bits[SEGMENT]) + unpack(slots, SIDE, SEGMENT).to(tl.int32))
    elif SIDE.rule[SEGMENT] == CHANNEL:
        codes = unpack(slots, SIDE, SEGMENT)
        if SIDE.boosted[SEGMENT]:
            codes += _boosts(pool, slots, exists, page, SIDE, SEGMENT, PAGE_BYTES).to(tl.float16)
        coordinate, real = coordinates(SIDE, SEGMENT)
        meta = pool_meta + page * (PAGE_BYTES // 2) + SIDE.meta + coordinate
        factor = tl.load(meta, mask=real, other=0.0)
        shift = tl.load(meta + SIDE.dims[SEGMENT], mask=real, other=0.0)
        return tl.fma(codes, factor[None, :], shift[None, :])
    else:
        coordinate, real = coordinates(SIDE, SEGMENT)
        first = (SIDE.codes + SIDE.byte[SEGMENT]) // 2 - SIDE.start[SEGMENT] + offset * (SIDE.code_stride // 2)
        rows = pool_wide + page * (PAGE_BYTES // 2) + first
        return tl.load(rows[:, None] + coordinate[None, :], mask=exists[:, None] & real[None, :], other=0.0)


@triton.jit
def _pair(meta, exists):
    """The scales and offsets of tokens, in one load."""
    return tl.split(tl.load(meta[:, None] + tl.arange(0, 2)[None, :], mask=exists[:, None], other=0.0))


@triton.jit
def _boosts(pool, slots, exists, page, SIDE: tl.constexpr, SEGMENT: tl.constexpr, PAGE_BYTES: tl.constexpr):
    """What the coordinates that a page names have above the bits of all others, int32[TOKENS, parts·width]: it lies
    behind those. Zeros for all others."""
    BITS: tl.constexpr = SIDE.bits[SEGMENT]
    BOOSTED: tl.constexpr = SIDE.boosted[SEGMENT]
    number = tl.arange(0, power_of_two(BOOSTED))
    names = pool + page * PAGE_BYTES + 2 * (SIDE.meta + 2 * SIDE.dims[SEGMENT])
    named = tl.load(names + number, mask=number < BOOSTED, other=0).to(tl.int32)
    coordinate, _ = coordinates(SIDE, SEGMENT)
    match = (coordinate[:, None] == named[None, :]) & (number < BOOSTED)[None, :]
    behind = tl.sum(tl.where(match, number[None, :] + 1, 0), 1)  # 0: not named
    mask = exists[:, None] & (behind > 0)[None, :]
    high = slots + SIDE.byte[SEGMENT] + SIDE.eighth[SEGMENT] * BITS
    return pick(high, mask, tl.maximum(behind - 1, 0), BITS, BOOSTED // 8) << BITS


@triton.jit
def _centroids(
    centroids, pool_meta, page, offset, exists, SIDE: tl.constexpr, SEGMENT: tl.constexpr, PAGE_BYTES: tl.constexpr
):  # fmt: skip
    """A segment of the centroids of a KV head that a tile of packed tokens name, float32[TOKENS, parts·width]."""
    last = page * (PAGE_BYTES // 2) + SIDE.meta + (offset + 1) * SIDE.meta_stride - 1
    number = tl.load(pool_meta + last, mask=exists, other=0.0).to(tl.int16, bitcast=True)
    coordinate, real = coordinates(SIDE, SEGMENT)
    pointers = (centroids + number.to(tl.int64) * SIDE.head_dim)[:, None] + coordinate[None, :]
    return tl.load(pointers, mask=exists[:, None] & real[None, :], other=0.0)
