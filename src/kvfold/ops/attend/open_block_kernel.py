"""The part of `attend` that reads raw tokens, beside the portable kernel: of each query, the open block up to its own
position. It is a launch of its own, since its tiles have fewer rows and it needs fewer registers.

In decode steps these tokens come from rings, which hold the step's own, too. A step with more queries may overwrite in
rings what its first queries read. So there they come from what `store` returned.
"""

import triton
import triton.language as tl
from torch import Tensor

from kvfold.ops.attend.parts import LOG2_E, UNSEEN, Cap, QueryTiles, capped, lacking, raw_from, softmax, tile_rows
from kvfold.ops.launch import launcher
from kvfold.ops.pages import LayerPages, Logits
from kvfold.ops.sizes import power_of_two

# of a tile, half as many above 128 dims: two CTAs fit on most SMs, and one computes while the other waits for memory
MAX_ROWS = 64


def splits(pages: LayerPages, q: Tensor) -> int:
    """How many parts the raw tokens of transformed queries [tokens, q_heads, d] make."""
    tiles = QueryTiles(pages, q, MAX_ROWS)
    return tiles.splits(pages.block - 1 + tiles.queries, q.device)


def attend(
    pages: LayerPages,
    q: Tensor,
    new: tuple[Tensor, Tensor],
    logits: Logits,
    outs: Tensor,
    weights: Tensor,
    cap: Cap | None = None,
) -> None:
    """Let transformed queries [tokens, q_heads, d] read their raw tokens, into parts [splits, tokens, q_heads, d].

    `new` is what `store` returned.
    """
    step, fresh, tiles = pages.step, pages.fresh, QueryTiles(pages, q, MAX_ROWS)
    tokens, q_heads, dims = q.shape
    assert all(side.is_contiguous() for side in new)
    decodes = fresh.rows is None
    kernel = launcher(
        _open_block,
        q.device,
        BLOCK=pages.block,
        RING_TOKENS=pages.ring_tokens,
        RING_NUMBERS=pages.ring.shape[2],
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
        STAGES=1 if decodes else 3,  # a CTA that decodes reads few tiles: room for more CTAs is better than prefetching
        num_warps=tiles.num_warps,
        maxnreg=tiles.registers,
    )
    kernel(
        (tiles.count, tiles.kv_heads, len(outs)),
        q,
        outs,
        weights,
        *((pages.ring, pages.ring, step.rings) if decodes else (*new, None)),
        fresh.starts,
        fresh.first,
        step.query_starts,
        step.starts,
        step.lengths,
        logits.scale * LOG2_E.value,
        cap,
        step.rings.shape[1],
        step.rings.stride(0),
        tiles.per_sequence,
        tokens,
        *q.stride()[:2],
    )


@triton.jit(
    do_not_specialize=["ring_blocks", "ring_stride", "query_tiles", "tokens"],
    do_not_specialize_on_alignment=[
        *("weights", "rings", "fresh_starts", "fresh_first", "query_starts", "starts", "lengths"),
    ],
)
def _open_block(
    q,
    outs,
    weights,
    raw_k,  # all rings, twice; or what `store` returned
    raw_v,
    rings,  # the blocks of each sequence's ring; None: raw tokens are not in rings
    fresh_starts,  # see `Fresh`
    fresh_first,
    query_starts,
    starts,
    lengths,
    scale,  # of the logits, times log2(e)
    cap,
    ring_blocks,  # per sequence
    ring_stride,
    query_tiles,  # per sequence
    tokens,
    q_stride,
    q_head_stride,
    BLOCK: tl.constexpr,
    RING_TOKENS: tl.constexpr,  # in a block of a ring
    RING_NUMBERS: tl.constexpr,  # of a KV head in a block of a ring
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
    STAGES: tl.constexpr,
):
    head, split = tl.program_id(1), tl.program_id(2)
    sequence, first = tl.program_id(0) // query_tiles, tl.program_id(0) % query_tiles * QUERIES
    if first >= tl.load(query_starts + sequence + 1) - tl.load(query_starts + sequence):
        return
    query, q_head, live, position, oldest, last = tile_rows(
        query_starts, lengths, sequence, first, head, Q_HEADS, KV_HEADS, RATIO, QUERIES, ROWS
    )
    packed_to = raw_from(position, BLOCK)
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

    # from the open block of the oldest query that is no padding
    raw = raw_from(tl.maximum(oldest, tl.load(starts + sequence)), BLOCK)
    to_row = tl.load(fresh_starts + sequence) - tl.load(fresh_first + sequence)
    tiles = tl.cdiv(tl.maximum(last + 1 - raw, 0), TOKENS)
    share = tl.cdiv(tiles, tl.num_programs(2))
    for tile in tl.range(split * share, tl.minimum((split + 1) * share, tiles), num_stages=STAGES):
        token = raw + tile * TOKENS + tl.arange(0, TOKENS)
        seen = (token >= packed_to[:, None]) & (token <= position[:, None])
        token = tl.minimum(token, last)  # past the last token, load it again
        if rings is None:
            vector = (to_row + token).to(tl.int64) * KV_HEADS + head
            k_at, v_at = raw_k + vector * KEY_DIMS, raw_v + vector * VALUE_DIMS
        else:
            place = token % (ring_blocks * RING_TOKENS)
            block = tl.load(rings + sequence.to(tl.int64) * ring_stride + place // RING_TOKENS)
            at = (block * KV_HEADS + head) * RING_NUMBERS
            k_at = raw_k + at + place % RING_TOKENS * KEY_DIMS
            v_at = raw_v + at + (RING_TOKENS * KEY_DIMS + place % RING_TOKENS * VALUE_DIMS)
        k = tl.load(k_at[:, None] + of_key, mask=of_key < KEY_DIMS, other=0.0)
        v = tl.load(v_at[:, None] + of_value, mask=of_value < VALUE_DIMS, other=0.0)
        logits = tl.dot(queries, tl.trans(k.to(tl.float16)))
        if cap is not None:
            logits = capped(logits, cap, lacked)
        weight, fade, highest, total = softmax(logits, seen, highest, total)
        out = tl.dot(weight, v.to(tl.float16), out * fade[:, None])

    place = (split.to(tl.int64) * tokens + query) * Q_HEADS + q_head
    tl.store(weights + place, tl.where(total > 0, highest + tl.log2(total), UNSEEN), mask=live)
    mean = out / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(outs + place[:, None] * VALUE_DIMS + of_value, mean, mask=live[:, None] & (of_value < VALUE_DIMS))
