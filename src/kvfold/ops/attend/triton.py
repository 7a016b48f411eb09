"""`attend` in Triton, for any GPU: decode, chunked prefill and verification in one kernel.

A program takes a block of one sequence's queries, the query heads of one KV head, and one part of the tokens that they
read: first tiles of the windows, in 16 bits, then packed ones. Where tokens are split over several programs, a second
kernel merges their parts by log-sum-exp. The grid depends on sizes alone; lengths are read on the device.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.ops.pages import LayerPages
from kvfold.ops.tiles import AFFINE, CODEBOOK, coordinates, key_side, level_table, unpack, value_side

UNSEEN = tl.constexpr(-1e30)  # below every logit; finite, so that a row without tokens is no NaN
MAX_SPLITS = 128


def attend(pages: LayerPages, q: Tensor, new: tuple[Tensor, Tensor] | None, scale: float) -> Tensor:
    """Queries [sequences, n, q_heads, d] (left-padded) -> outputs of the same shape, float32.

    `new` is what `store` returned for the same step. Outputs of padding are finite and meaningless.
    """
    if not q.numel():
        return q.float()
    rotated = pages.key.transform.dual(q).flatten(0, 1)
    flat = None if new is None else (new[0].flatten(0, 1), new[1].flatten(0, 1))
    splits = _splits(pages, rotated)
    parts = rotated.new_empty(splits, *rotated.shape, dtype=torch.float32)
    weights = rotated.new_empty(splits, *rotated.shape[:2], dtype=torch.float32)
    _launch(pages, rotated, flat, scale, parts, weights)
    return pages.value.transform.inverse(merge(parts, weights).view(q.shape))


def exact_parts(
    pages: LayerPages, q: Tensor, new: tuple[Tensor, Tensor], scale: float, parts: Tensor, weights: Tensor
) -> None:
    """Let transformed queries [tokens, q_heads, d] read their windows alone, into parts [splits, tokens, q_heads, d]
    and their weights, for `merge`."""
    _launch(pages, q, new, scale, parts, weights, packed=False)


def merge(parts: Tensor, weights: Tensor) -> Tensor:
    """The outputs [tokens, q_heads, d] of parts [splits, tokens, q_heads, d], weighted by 2^weights."""
    splits, tokens, q_heads, dims = parts.shape
    if splits == 1:
        return parts[0]
    out = torch.empty_like(parts[0])
    columns = triton.next_power_of_2(dims)
    _merge[(tokens * q_heads,)](
        parts, weights, out, splits, DIMS=dims, WIDTH=columns, SPLITS=triton.next_power_of_2(splits), num_warps=2
    )
    return out


def _splits(pages: LayerPages, q: Tensor) -> int:
    """Over how many programs the tokens of a sequence are split, so that every processor has work."""
    batch = pages.step.batch
    _, blocks = _blocks(pages, q)
    tiles = triton.cdiv(batch.table.shape[1] * pages.layout.page_size, _block_tokens(q))
    programs = len(batch.lengths) * blocks * pages.pool.shape[1]
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 4
    return max(1, min(triton.cdiv(4 * processors, programs), tiles, MAX_SPLITS))


def _blocks(pages: LayerPages, q: Tensor) -> tuple[int, int]:
    """How many queries of a sequence make a block, and how many blocks there are at most."""
    ratio = triton.next_power_of_2(q.shape[1] // pages.pool.shape[1])
    queries = max(1, min(triton.next_power_of_2(pages.step.batch.max_queries), 64 // ratio))
    return queries, triton.cdiv(pages.step.batch.max_queries, queries)


def _block_tokens(q: Tensor) -> int:
    return 64 if q.shape[-1] <= 128 else 32


def _launch(
    pages: LayerPages,
    q: Tensor,
    new: tuple[Tensor, Tensor] | None,
    scale: float,
    parts: Tensor,
    weights: Tensor,
    packed: bool = True,
) -> None:
    batch, layout, windows = pages.step.batch, pages.layout, pages.windows
    tokens, q_heads, _ = q.shape
    kv_heads = pages.pool.shape[1]
    ratio = triton.next_power_of_2(q_heads // kv_heads)
    queries, blocks = _blocks(pages, q)
    key, value = key_side(layout), value_side(layout)
    new_k, new_v = (pages.shadows, pages.shadows) if new is None else new
    _attend[(len(batch.lengths) * blocks, kv_heads, len(parts))](
        q,
        parts,
        weights,
        pages.pool,
        pages.pool.view(torch.float16),
        pages.pool.view(pages.shadows.dtype),
        pages.shadows,
        new_k,
        new_v,
        level_table(q.device),
        batch.query_starts,
        batch.starts,
        batch.lengths,
        batch.table,
        batch.shadow_of,
        scale * math.log2(math.e),
        blocks,
        tokens,
        batch.table.stride(0),
        *q.stride()[:2],
        *new_k.stride()[:2],
        KEY=key,
        VALUE=value,
        EXACT=bool(windows),
        PACKED=packed,
        SINK=windows.sink,
        RECENT=windows.recent,
        GROUP=windows.group,
        PAGE=layout.page_size,
        PAGE_BYTES=layout.page_bytes,
        KV_HEADS=kv_heads,
        Q_HEADS=q_heads,
        RATIO=ratio,
        QUERIES=queries,
        ROWS=max(16, queries * ratio),  # tensor cores take 16 rows at least
        TOKENS=_block_tokens(q),
        num_warps=4,
        num_stages=1 if CODEBOOK.value in key.rule + value.rule else 3,  # levels prefetched would fill shared memory
    )


@triton.jit
def _attend(
    q,
    parts,
    weights,
    pool,
    pool_meta,  # the pool as float16
    pool_wide,  # the pool as the 16-bit type of raw segments
    shadows,
    new_k,
    new_v,
    levels,
    query_starts,
    starts,
    lengths,
    table,
    shadow_of,
    scale,  # of the logits, times log2(e)
    blocks,  # of the queries of a sequence
    tokens,
    table_stride,
    q_stride,
    q_head_stride,
    new_stride,
    new_head_stride,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    EXACT: tl.constexpr,  # whether there are windows to read
    PACKED: tl.constexpr,  # whether to read what lies between them
    SINK: tl.constexpr,
    RECENT: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    RATIO: tl.constexpr,  # query heads of a KV head, up to a power of two
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    DIMS: tl.constexpr = KEY.head_dim
    head, split = tl.program_id(1), tl.program_id(2)
    sequence = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * QUERIES
    begin, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    if first >= end - begin:
        return
    length = tl.load(lengths + sequence)
    start = tl.load(starts + sequence)
    table += sequence.to(tl.int64) * table_stride

    # rows: queries of the block, and for each the heads of the group
    row = tl.arange(0, ROWS)
    query, group = begin + first + row // RATIO, row % RATIO
    live = (row // RATIO < QUERIES) & (query < end) & (group < Q_HEADS // KV_HEADS)
    q_head = head * (Q_HEADS // KV_HEADS) + group
    position = query - end + length
    packed_to = _exact_from(position, RECENT, GROUP)
    last = tl.minimum(begin + first + QUERIES, end) - 1 - end + length  # position of the block's last query

    qs, sums, outs = (), (), ()
    for i in tl.static_range(len(KEY.columns)):
        qs += (_queries(q + query.to(tl.int64) * q_stride + q_head * q_head_stride, live, scale, KEY, i),)
        sums += (tl.sum(qs[i].to(tl.float32), 1),)
    for i in tl.static_range(len(VALUE.columns)):
        outs += (tl.zeros([ROWS, VALUE.columns[i] * 8], tl.float32),)
    highest = tl.full([ROWS], UNSEEN, tl.float32)
    total = tl.zeros([ROWS], tl.float32)

    # tiles: of the sink, of the recent windows, then packed
    sink_tiles, recent_tiles, recent_from = 0, 0, 0
    if EXACT:
        oldest = tl.maximum(begin + first - end + length, start)  # the first query that is no padding
        recent_from = tl.maximum(SINK, _exact_from(oldest, RECENT, GROUP))
        sink_tiles = tl.cdiv(tl.minimum(SINK, last + 1), TOKENS)
        recent_tiles = tl.cdiv(tl.maximum(last + 1 - recent_from, 0), TOKENS)
    packed_from = SINK // TOKENS * TOKENS
    packed_end = _exact_from(last, RECENT, GROUP)
    exact_tiles = sink_tiles + recent_tiles
    tiles = exact_tiles
    if PACKED:
        tiles += tl.cdiv(tl.maximum(packed_end - packed_from, 0), TOKENS)
    share = tl.cdiv(tiles, tl.num_programs(2))
    tile_from, tile_end = split * share, tl.minimum((split + 1) * share, tiles)

    if EXACT:
        for tile in range(tile_from, tl.minimum(tile_end, exact_tiles)):
            in_sink = tile < sink_tiles
            from_ = tl.where(in_sink, tile * TOKENS, recent_from + (tile - sink_tiles) * TOKENS)
            token = from_ + tl.arange(0, TOKENS)
            exists = token < tl.where(in_sink, tl.minimum(SINK, last + 1), last + 1)
            of_step = token >= start
            page = tl.load(table + token // PAGE, mask=exists, other=0)
            shadow = tl.load(shadow_of + page, mask=exists & ~of_step, other=0).to(tl.int64)
            old = shadows + ((shadow * KV_HEADS + head) * 2 * PAGE + token % PAGE) * DIMS
            own = (token + end - length).to(tl.int64) * new_stride + head * new_head_stride
            exists &= of_step | (shadow >= 0)
            k = tl.where(of_step, new_k + own, old)
            v = tl.where(of_step, new_v + own, old + PAGE * DIMS)
            logits = tl.zeros([ROWS, TOKENS], tl.float32)
            for i in tl.static_range(len(KEY.columns)):
                coordinate, real = coordinates(KEY, i)
                x = tl.load(k[:, None] + coordinate[None, :], mask=exists[:, None] & real[None, :], other=0.0)
                logits = tl.dot(qs[i], tl.trans(x.to(tl.float16)), logits)
            exact = in_sink | (token[None, :] >= packed_to[:, None])
            seen = exists[None, :] & exact & (token[None, :] <= position[:, None])
            share_of, fade, highest, total = _softmax(logits, seen, highest, total)
            updated = ()
            for i in tl.static_range(len(VALUE.columns)):
                coordinate, real = coordinates(VALUE, i)
                x = tl.load(v[:, None] + coordinate[None, :], mask=exists[:, None] & real[None, :], other=0.0)
                updated += (tl.dot(share_of, x.to(tl.float16), outs[i] * fade[:, None]),)
            outs = updated

    for tile in range(tl.maximum(tile_from, exact_tiles), tile_end):
        token = packed_from + (tile - exact_tiles) * TOKENS + tl.arange(0, TOKENS)
        exists = (token >= SINK) & (token < packed_end)
        page = tl.load(table + token // PAGE, mask=exists, other=0).to(tl.int64) * KV_HEADS + head
        offset = token % PAGE
        logits = tl.zeros([ROWS, TOKENS], tl.float32)
        for i in tl.static_range(len(KEY.columns)):
            x = _levels(pool, pool_wide, levels, page, offset, exists, KEY, i, PAGE_BYTES, TOKENS).to(tl.float16)
            meta = pool_meta + page * (PAGE_BYTES // 2) + KEY.meta + offset * KEY.meta_stride + KEY.entry[i]
            if KEY.rule[i] == AFFINE:
                factor = tl.load(meta, mask=exists, other=0.0).to(tl.float32)
                shift = tl.load(meta + 1, mask=exists, other=0.0).to(tl.float32)
                logits += tl.dot(qs[i], tl.trans(x)) * factor[None, :] + sums[i][:, None] * shift[None, :]
            elif KEY.rule[i] == CODEBOOK:
                factor = tl.load(meta, mask=exists, other=0.0).to(tl.float32)
                logits += tl.dot(qs[i], tl.trans(x)) * factor[None, :]
            else:
                logits = tl.dot(qs[i], tl.trans(x), logits)
        seen = exists[None, :] & (token[None, :] < packed_to[:, None])
        share_of, fade, highest, total = _softmax(logits, seen, highest, total)
        updated = ()
        for i in tl.static_range(len(VALUE.columns)):
            x = _levels(pool, pool_wide, levels, page, offset, exists, VALUE, i, PAGE_BYTES, TOKENS)
            meta = pool_meta + page * (PAGE_BYTES // 2) + VALUE.meta + offset * VALUE.meta_stride + VALUE.entry[i]
            if VALUE.rule[i] == AFFINE:
                factor = tl.load(meta, mask=exists, other=0.0).to(tl.float32)
                shift = tl.load(meta + 1, mask=exists, other=0.0).to(tl.float32)
                x = x.to(tl.float32) * factor[:, None] + shift[:, None]
            elif VALUE.rule[i] == CODEBOOK:
                x = x * tl.load(meta, mask=exists, other=0.0).to(tl.float32)[:, None]
            updated += (tl.dot(share_of, x.to(tl.float16), outs[i] * fade[:, None]),)
        outs = updated

    place = (split.to(tl.int64) * tokens + query) * Q_HEADS + q_head
    tl.store(weights + place, tl.where(total > 0, highest + tl.log2(total), UNSEEN), mask=live)
    for i in tl.static_range(len(VALUE.columns)):
        coordinate, real = coordinates(VALUE, i)
        mean = outs[i] / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(parts + place[:, None] * DIMS + coordinate[None, :], mean, mask=live[:, None] & real[None, :])


@triton.jit
def _exact_from(position, RECENT: tl.constexpr, GROUP: tl.constexpr):
    """The first of the recent tokens that a query at `position` reads in 16 bits (see windows.py)."""
    return tl.minimum((position + 1) // GROUP * GROUP, position + 1 - RECENT)


@triton.jit
def _queries(rows, live, scale, KEY: tl.constexpr, SEGMENT: tl.constexpr):
    """A segment of the queries at pointers `rows`, in the order of its columns."""
    coordinate, real = coordinates(KEY, SEGMENT)
    states = tl.load(rows[:, None] + coordinate[None, :], mask=live[:, None] & real[None, :], other=0.0)
    return (states.to(tl.float32) * scale).to(tl.float16)


@triton.jit
def _levels(
    pool, pool_wide, levels, page, offset, exists,
    SIDE: tl.constexpr, SEGMENT: tl.constexpr, PAGE_BYTES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """A segment of a tile of packed tokens, [TOKENS, columns·8]: codes or levels, which metadata are to scale."""
    byte = page * PAGE_BYTES + SIDE.codes + offset * SIDE.code_stride
    if SIDE.rule[SEGMENT] == AFFINE:
        return unpack(pool + byte, exists, SIDE, SEGMENT, TOKENS)
    elif SIDE.rule[SEGMENT] == CODEBOOK:
        codes = unpack(pool + byte, exists, SIDE, SEGMENT, TOKENS)
        return tl.load(levels + (1 << SIDE.bits[SEGMENT]) + codes)
    else:
        coordinate, real = coordinates(SIDE, SEGMENT)
        first = (byte + SIDE.byte[SEGMENT]) // 2 - SIDE.start[SEGMENT]
        pointers = pool_wide + first[:, None] + coordinate[None, :]
        return tl.load(pointers, mask=exists[:, None] & real[None, :], other=0.0)


@triton.jit
def _softmax(logits, seen, highest, total):
    """A tile's weights, by what to scale what came before, and the running maximum and sum."""
    now = tl.maximum(highest, tl.max(tl.where(seen, logits, UNSEEN), 1))
    fade = tl.exp2(highest - now)
    weights = tl.where(seen, tl.exp2(logits - now[:, None]), 0.0)
    return weights.to(tl.float16), fade, now, total * fade + tl.sum(weights, 1)


@triton.jit
def _merge(parts, weights, out, splits, DIMS: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """The mean of the parts [splits, rows, DIMS] of one row, each weighted by 2^weight."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    weight = tl.load(weights + split * rows + row, mask=split < splits, other=UNSEEN)
    share = tl.exp2(weight - tl.max(weight, 0))
    share = share / tl.sum(share, 0)
    coordinate = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for i in range(splits):
        part = tl.load(parts + (i * rows + row) * DIMS + coordinate, mask=coordinate < DIMS, other=0.0)
        total += part * tl.sum(tl.where(split == i, share, 0.0), 0)
    tl.store(out + row * DIMS + coordinate, total, mask=coordinate < DIMS)
