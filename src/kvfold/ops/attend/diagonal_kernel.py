"""Attention near the diagonal, for many queries: each reads up to a token that lies one further than that of the query
before it. The result is merged with attention over other tokens."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.ops.attend.parts import LOG2_E, UNSEEN
from kvfold.ops.sizes import ceil_div, power_of_two


class _Tile(NamedTuple):
    rows: int  # queries times query heads per KV head
    tokens: int
    warps: int
    stages: int


NARROW, WIDE = _Tile(64, 32, 4, 3), _Tile(64, 32, 4, 2)  # for up to 128 dims, and more


class Part(NamedTuple):
    """Attention over some of the tokens that queries read."""

    outs: Tensor  # [n, q_heads, d]
    logs: Tensor | None  # log-sum-exps [n, q_heads]; None if nothing is merged with it


class Target(NamedTuple):
    """Where a part is written."""

    outs: Tensor  # [n, q_heads, d], contiguous
    logs: Tensor | None  # float32[n, q_heads], contiguous; None where nobody needs them
    mean: Tensor | None = None  # float32[kv_heads, d], added to the outputs


def empty_target(q: Tensor) -> Target:
    """Memory for a part of queries [n, q_heads, d]."""
    return Target(torch.empty(q.shape, device=q.device), torch.empty(q.shape[:2], device=q.device))


def unseen_part(q: Tensor) -> Part:
    """The part of queries [n, q_heads, d] that have read nothing yet."""
    zero, log = torch.zeros(q.shape[-1], device=q.device), torch.full((1,), UNSEEN.value, device=q.device)
    return Part(zero.expand(q.shape), log.expand(q.shape[:2]))


class Diagonal(NamedTuple):
    """The query at position p reads `reach` tokens, of which p − `lag` is the last."""

    position: int  # of the first query
    token: int  # the first of the tokens; no older one is read
    lag: int
    reach: int

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, part: Part, to: Target | None) -> Part:
        """Queries [n, q_heads, d] over k, v [1, kv_heads, tokens, d]: float32, or in `to`.

        The result is merged with `part`, which may be of the last queries only.
        """
        assert part.logs is not None
        (n, q_heads, dims), kv_heads = q.shape, k.shape[1]
        to, ratio = to or empty_target(q), power_of_two(q_heads // kv_heads)
        tile = WIDE if dims > 128 else NARROW
        queries = max(1, tile.rows // ratio)
        _diagonal[(ceil_div(n, queries), kv_heads)](
            q,
            k,
            v,
            *part,
            *to,
            scale * LOG2_E.value,
            n,
            *self,
            n - len(part.outs),
            q.stride(0),
            k.stride(1),
            *part.outs.stride()[:2],
            *part.logs.stride(),
            GROUP=q_heads // kv_heads,
            RATIO=ratio,
            DIMS=dims,
            WIDTH=power_of_two(dims),
            QUERIES=queries,
            ROWS=queries * ratio,
            TOKENS=tile.tokens,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return Part(to.outs, to.logs)


@triton.jit(
    do_not_specialize=["n", "position", "first_token", "lag", "reach", "part_first", "log_stride", "log_head_stride"]
)
def _diagonal(
    q, k, v, part, part_logs, out, logs, mean, scale, n, position, first_token, lag, reach, part_first,
    q_stride, k_head_stride, part_stride, part_head_stride, log_stride, log_head_stride,
    GROUP: tl.constexpr, RATIO: tl.constexpr, DIMS: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    head, begin = tl.program_id(1), tl.program_id(0) * QUERIES
    row, coordinate = tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    query, q_head = begin + row // RATIO, head * GROUP + row % RATIO
    live = (query < n) & (row % RATIO < GROUP)
    whole = live[:, None] & (coordinate < DIMS)
    queries = tl.load(q + (query.to(tl.int64) * q_stride + q_head * DIMS)[:, None] + coordinate, mask=whole, other=0.0)
    k += head.to(tl.int64) * k_head_stride
    v += head.to(tl.int64) * k_head_stride
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    highest = tl.full([ROWS], UNSEEN, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    newest = position + query - lag  # the last token that a query reads; then that of the first and of the last query
    oldest, last = position + begin - lag, position + tl.minimum(begin + QUERIES, n) - 1 - lag
    for tile in range(tl.maximum(first_token, oldest + 1 - reach), last + 1, TOKENS):
        token = tile + tl.arange(0, TOKENS)
        place = (tl.minimum(token, last) - first_token)[:, None] * DIMS + coordinate
        keys = tl.load(k + place, mask=coordinate < DIMS, other=0.0)
        values = tl.load(v + place, mask=coordinate < DIMS, other=0.0)
        products = tl.dot(queries, tl.trans(keys))
        if (tile + TOKENS > oldest + 1) | (tile < last + 1 - reach):  # not all queries read all tokens
            behind = newest[:, None] - token[None, :]
            products = tl.where((behind >= 0) & (behind < reach), products, -float("inf"))
        now = tl.maximum(highest, tl.max(products, 1) * scale)
        fade = tl.exp2(highest - now)
        shares = tl.exp2(products * scale - now[:, None])
        total = total * fade + tl.sum(shares, 1)
        sums = tl.dot(shares.to(values.dtype), values, sums * fade[:, None])
        highest = now
    seen = total > 0
    weight = tl.where(seen, highest + tl.log2(total), UNSEEN)
    result = sums / tl.where(seen, total, 1.0)[:, None]
    there, other = live & (query >= part_first), (query - part_first).to(tl.int64)
    log = tl.load(part_logs + other * log_stride + q_head * log_head_stride, mask=there, other=UNSEEN) * LOG2_E
    before = part + (other * part_stride + q_head * part_head_stride)[:, None] + coordinate
    before = tl.load(before, mask=whole & there[:, None], other=0.0).to(tl.float32)
    result = before + (result - before) * (1 / (1 + tl.exp2(log - weight)))[:, None]
    if mean is not None:
        result += tl.load(mean + head * DIMS + coordinate, mask=coordinate < DIMS, other=0.0)
    place = query.to(tl.int64) * (tl.num_programs(1) * GROUP) + q_head
    tl.store(out + place[:, None] * DIMS + coordinate, result, mask=whole)
    if logs is not None:
        weight = tl.maximum(log, weight) + tl.log2(1 + tl.exp2(-tl.abs(log - weight)))
        tl.store(logs + place, weight / LOG2_E, mask=live)
