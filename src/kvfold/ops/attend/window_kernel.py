"""The part of `attend` that reads windows, on any GPU: raw tokens of shadow pages and of the step itself."""

import triton
import triton.language as tl
from torch import Tensor

from kvfold.ops.attend.parts import LOG2_E, UNSEEN, Cap, QueryTiles, capped, lacking, raw_from, softmax, tile_rows
from kvfold.ops.launch import launcher
from kvfold.ops.pages import LayerPages, Logits
from kvfold.ops.pdl import ALONE, BESIDE_TO_END, release, wait
from kvfold.ops.sizes import power_of_two

# of a tile, half as many above 128 dims: two CTAs fit on most SMs, and one computes while the other waits for memory
MAX_ROWS = 64


def splits(pages: LayerPages, q: Tensor) -> int:
    """How many parts the windows of transformed queries [tokens, q_heads, d] make."""
    windows = pages.windows
    tokens = windows.sink + windows.recent + windows.group + pages.step.max_queries
    return QueryTiles(pages, q, MAX_ROWS).splits(tokens, q.device)


def attend(
    pages: LayerPages,
    q: Tensor,
    new: tuple[Tensor, Tensor],
    logits: Logits,
    outs: Tensor,
    weights: Tensor,
    cap: Cap | None = None,
    overlaps: bool = False,
) -> None:
    """Let transformed queries [tokens, q_heads, d] read their windows, into parts [splits, tokens, q_heads, d].

    `new` are the step's own tokens [tokens, kv_heads, d]; older ones come from shadows. With `overlaps`, the kernel
    runs beside the previous one. All that it reads must be written before the previous kernel releases it.
    """
    step, windows, tiles = pages.step, pages.windows, QueryTiles(pages, q, MAX_ROWS)
    tokens, q_heads, dims = q.shape
    assert all(side.is_contiguous() for side in new)
    long = step.max_queries >= tiles.tokens
    overlap = BESIDE_TO_END if overlaps else ALONE
    kernel = launcher(
        _windows,
        q.device,
        PAGE=pages.layout.page_size,
        KV_HEADS=tiles.kv_heads,
        Q_HEADS=q_heads,
        KEY_DIMS=dims,
        VALUE_DIMS=outs.shape[-1],
        KEY_PADDED=power_of_two(dims),
        VALUE_PADDED=power_of_two(outs.shape[-1]),
        RATIO=tiles.ratio,
        QUERIES=tiles.queries,
        ROWS=tiles.rows,
        TOKENS=tiles.tokens,
        LONG=long,
        OVERLAP=overlap,
        num_warps=tiles.num_warps,
        num_stages=1,  # a CTA reads few tiles of older tokens: room for more CTAs is better than prefetching
        maxnreg=tiles.registers,  # leaves room beside decoding
        **overlap.launch,
    )
    kernel(
        (tiles.count, tiles.kv_heads, len(outs)),
        q,
        outs,
        weights,
        pages.shadows,
        *new,
        step.query_starts,
        step.starts,
        step.lengths,
        step.table,
        step.shadow_of,
        logits.scale * LOG2_E.value,
        cap,
        windows.sink,
        windows.recent,
        windows.group,
        tiles.per_sequence,
        tokens,
        step.table.stride(0),
        *q.stride()[:2],
    )


@triton.jit(
    do_not_specialize=["sink", "recent", "group", "query_tiles", "tokens", "table_stride"],
    do_not_specialize_on_alignment=["weights", "query_starts", "starts", "lengths", "table", "shadow_of"],
)
def _windows(
    q,
    outs,
    weights,
    shadows,
    new_k,
    new_v,
    query_starts,
    starts,
    lengths,
    table,
    shadow_of,
    scale,  # of the logits, times log2(e)
    cap,
    sink,
    recent,
    group,
    query_tiles,  # per sequence
    tokens,
    table_stride,
    q_stride,
    q_head_stride,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KEY_DIMS: tl.constexpr,
    VALUE_DIMS: tl.constexpr,
    KEY_PADDED: tl.constexpr,  # up to a power of two
    VALUE_PADDED: tl.constexpr,
    RATIO: tl.constexpr,  # query heads per KV head, up to a power of two
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    LONG: tl.constexpr,  # whether the step's own tokens may fill a tile
    OVERLAP: tl.constexpr,
):
    head, split = tl.program_id(1), tl.program_id(2)
    sequence, first = tl.program_id(0) // query_tiles, tl.program_id(0) % query_tiles * QUERIES
    end = tl.load(query_starts + sequence + 1)
    if first >= end - tl.load(query_starts + sequence):
        return
    length, start = tl.load(lengths + sequence), tl.load(starts + sequence)
    table += sequence.to(tl.int64) * table_stride
    query, q_head, live, position, oldest, last = tile_rows(
        query_starts, lengths, sequence, first, head, Q_HEADS, KV_HEADS, RATIO, QUERIES, ROWS
    )
    packed_to = raw_from(position, recent, group)
    lacked = None
    if cap is not None:
        lacked = lacking(cap, query.to(tl.int64) * Q_HEADS + q_head, live)
    of_key, of_value = tl.arange(0, KEY_PADDED)[None, :], tl.arange(0, VALUE_PADDED)[None, :]
    row = q + query.to(tl.int64) * q_stride + q_head * q_head_stride
    queries = tl.load(row[:, None] + of_key, mask=live[:, None] & (of_key < KEY_DIMS), other=0.0)
    queries = (queries.to(tl.float32) * scale).to(tl.float16)
    out = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
    highest = tl.full([ROWS], UNSEEN, tl.float32)
    total = tl.zeros([ROWS], tl.float32)

    # Tiles of the sink come first, then tiles of recent windows, from the window of the oldest query that is no padding
    recent_from = tl.maximum(sink, raw_from(tl.maximum(oldest, start), recent, group))
    sink_tiles = tl.cdiv(tl.minimum(sink, last + 1), TOKENS)
    tiles = sink_tiles + tl.cdiv(tl.maximum(last + 1 - recent_from, 0), TOKENS)
    share = tl.cdiv(tiles, tl.num_programs(2))
    begin, stop = split * share, tl.minimum((split + 1) * share, tiles)
    # The step's own tokens are contiguous. Tiles that hold no others need no page table, and are prefetched. Their loop
    # comes first: in a pipelined loop that continues the sums of another loop, ptxas overlaps no MMAs.
    if LONG:
        own_from = tl.where(start > 0, sink_tiles + tl.cdiv(tl.maximum(start - recent_from, 0), TOKENS), 0)
        for tile in tl.range(tl.maximum(begin, own_from), stop, num_stages=3):
            tile_from, newest, seen = _tile(tile, sink, sink_tiles, recent_from, last, packed_to, position, TOKENS)
            own = (tile_from + end - length).to(tl.int64) * KV_HEADS + head
            token = tl.minimum(tl.arange(0, TOKENS), newest - tile_from)  # past the newest token, load it again
            at = (token * KV_HEADS)[:, None]
            k = tl.load(new_k + own * KEY_DIMS + (at * KEY_DIMS + of_key), mask=of_key < KEY_DIMS, other=0.0)
            v = tl.load(new_v + own * VALUE_DIMS + (at * VALUE_DIMS + of_value), mask=of_value < VALUE_DIMS, other=0.0)
            out, highest, total = _read(queries, k, v, cap, lacked, seen, out, highest, total)
        stop = tl.minimum(stop, own_from)
    for tile in range(begin, stop):
        tile_from, newest, seen = _tile(tile, sink, sink_tiles, recent_from, last, packed_to, position, TOKENS)
        token = tile_from + tl.arange(0, TOKENS)
        exists = token <= newest
        of_step = token >= start
        page = tl.load(table + token // PAGE, mask=exists, other=0)
        shadow = tl.load(shadow_of + page, mask=exists & ~of_step, other=0).to(tl.int64)
        tl.device_assert(shadow >= 0, "a window reaches into a page that has no shadow")
        old = shadows + (shadow * KV_HEADS + head) * (PAGE * (KEY_DIMS + VALUE_DIMS))
        own = (token + end - length).to(tl.int64) * KV_HEADS + head
        exists &= shadow >= 0
        k_at = tl.where(of_step, new_k + own * KEY_DIMS, old + token % PAGE * KEY_DIMS)
        k_at = tl.multiple_of(k_at, alignment(KEY_DIMS))  # which `where` makes the compiler forget
        k = tl.load(k_at[:, None] + of_key, mask=exists[:, None] & (of_key < KEY_DIMS), other=0.0)
        v_at = tl.where(of_step, new_v + own * VALUE_DIMS, old + (PAGE * KEY_DIMS + token % PAGE * VALUE_DIMS))
        v_at = tl.multiple_of(v_at, alignment(VALUE_DIMS))
        v = tl.load(v_at[:, None] + of_value, mask=exists[:, None] & (of_value < VALUE_DIMS), other=0.0)
        out, highest, total = _read(queries, k, v, cap, lacked, seen, out, highest, total)

    place = (split.to(tl.int64) * tokens + query) * Q_HEADS + q_head
    tl.store(weights + place, tl.where(total > 0, highest + tl.log2(total), UNSEEN), mask=live)
    mean = out / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(outs + place[:, None] * VALUE_DIMS + of_value, mean, mask=live[:, None] & (of_value < VALUE_DIMS))
    release(OVERLAP, "end")
    wait(OVERLAP, "end")


@triton.constexpr_function
def alignment(dims):
    """Bytes that divide the addresses of 16-bit vectors after one another in aligned memory; loads have up to 16."""
    return min(16, 2 * dims & -2 * dims)


@triton.jit
def _tile(tile, sink, sink_tiles, recent_from, last, packed_to, position, TOKENS: tl.constexpr):
    """The first token of a tile, the newest token that may be read, and which tokens of the tile each row reads."""
    in_sink = tile < sink_tiles
    tile_from = tl.where(in_sink, tile * TOKENS, recent_from + (tile - sink_tiles) * TOKENS)
    newest = tl.where(in_sink, tl.minimum(sink - 1, last), last)
    token = tile_from + tl.arange(0, TOKENS)[None, :]
    seen = (token >= tl.where(in_sink, 0, packed_to)[:, None]) & (token <= tl.minimum(position, newest)[:, None])
    return tile_from, newest, seen


@triton.jit
def _read(queries, k, v, cap, lacked, seen, out, highest, total):
    """The running output, maximum and sum of the rows, after one more tile."""
    logits = tl.dot(queries, tl.trans(k.to(tl.float16)))
    if cap is not None:
        logits = capped(logits, cap, lacked)
    weight, fade, highest, total = softmax(logits, seen, highest, total)
    return tl.dot(weight, v.to(tl.float16), out * fade[:, None]), highest, total
