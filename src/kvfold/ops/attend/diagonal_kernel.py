"""Attention near the diagonal, for many queries: each reads up to a token that lies one further than that of the query
before it. The result is merged with attention over other tokens."""

from typing import NamedTuple, Self

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.ops.attend.parts import LOG2_E, UNSEEN
from kvfold.ops.launch import Launcher, launcher
from kvfold.ops.pages import on_device
from kvfold.ops.sizes import power_of_two


class _Tile(NamedTuple):
    rows: int  # queries times query heads per KV head
    tokens: int
    warps: int
    stages: int


NARROW, WIDE = _Tile(64, 32, 4, 3), _Tile(64, 32, 8, 2)  # for up to 128 dims, and more


class Heads(NamedTuple):
    """Of a model. They say how many queries a CTA takes."""

    group: int  # query heads per KV head
    dims: int

    @property
    def tile(self) -> _Tile:
        return WIDE if self.dims > 128 else NARROW

    @property
    def ratio(self) -> int:
        return power_of_two(self.group)

    @property
    def queries(self) -> int:
        return max(1, self.tile.rows // self.ratio)


class Part(NamedTuple):
    """Attention over some of the tokens that queries read."""

    outs: Tensor  # [n, q_heads, d]
    logs: Tensor | None  # log-sum-exps [n, q_heads]; None if nothing is merged with it


class Target(NamedTuple):
    """Where a part is written."""

    outs: Tensor  # [n, q_heads, d], contiguous
    logs: Tensor | None  # float32[n, q_heads], contiguous; None where nobody needs them
    mean: Tensor | None = None  # float32[kv_heads, d], added to the outputs

    def of(self, queries: slice) -> Self:
        return self._replace(outs=self.outs[queries], logs=None if self.logs is None else self.logs[queries])


def empty_target(q: Tensor) -> Target:
    """Memory for a part of queries [n, q_heads, d]."""
    return Target(torch.empty(q.shape, device=q.device), torch.empty(q.shape[:2], device=q.device))


class Near(NamedTuple):
    """Queries of a sequence, and the first of the tokens that they may read."""

    query: int  # the row of the first query
    queries: int
    position: int  # of the first query
    token: int  # the first that they may read
    place: int  # the row of that token in k and v


class Diagonal(NamedTuple):
    """Queries of sequences. The query at position p reads `reach` tokens, of which p − `lag` is the last."""

    tiles: Tensor  # int32[tiles, 5]: per CTA, the five fields of `Near`
    lag: int
    reach: int
    kernel: Launcher

    @classmethod
    def of(cls, sequences: list[Near], lag: int, reach: int, heads: Heads, device: torch.device) -> Self:
        each = np.array(sequences)
        count = -(-each[:, 1] // heads.queries)  # tiles
        before = heads.queries * (np.arange(count.sum()) - np.repeat(count.cumsum() - count, count))  # queries
        tiles = np.repeat(each, count, axis=0)
        tiles[:, [0, 2]] += before[:, None]
        tiles[:, 1] = np.minimum(tiles[:, 1] - before, heads.queries)
        kernel = launcher(
            _diagonal,
            device,
            GROUP=heads.group,
            RATIO=heads.ratio,
            DIMS=heads.dims,
            WIDTH=power_of_two(heads.dims),
            ROWS=heads.queries * heads.ratio,
            TOKENS=heads.tile.tokens,
            num_warps=heads.tile.warps,
            num_stages=heads.tile.stages,
        )
        return cls(on_device(tiles, device), lag, reach, kernel)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, part: Part | None, part_from: int, to: Target | None
    ) -> Part:
        """Queries [n, q_heads, d] over k, v [tokens, kv_heads, d]: float32, or in `to`.

        The result is merged with `part`, which counts for queries from position `part_from` on.
        """
        to = to or empty_target(q)
        strides = [stride for x in part or () if x is not None for stride in x.stride()[:2]]
        self.kernel(
            (self.tiles.shape[0], k.shape[1], 1),
            q,
            k,
            v,
            *(part or (None, None)),
            *to,
            self.tiles,
            scale * LOG2_E.value,
            self.lag,
            self.reach,
            part_from,
            q.stride(0),
            *(strides or [0] * 4),
        )
        return Part(to.outs, to.logs)


@triton.jit(
    do_not_specialize=["lag", "reach", "part_from", "log_stride", "log_head_stride"],
    do_not_specialize_on_alignment=["part_logs", "logs"],
)
def _diagonal(
    q, k, v, part, part_logs, out, logs, mean, tiles, scale, lag, reach, part_from,
    q_stride, part_stride, part_head_stride, log_stride, log_head_stride,
    GROUP: tl.constexpr, RATIO: tl.constexpr, DIMS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    head, heads, tiles = tl.program_id(1), tl.num_programs(1), tiles + tl.program_id(0) * 5
    first, n, position, first_token = tl.load(tiles), tl.load(tiles + 1), tl.load(tiles + 2), tl.load(tiles + 3)
    row, coordinate = tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    query, q_head = (first + row // RATIO).to(tl.int64), head * GROUP + row % RATIO
    live = (row // RATIO < n) & (row % RATIO < GROUP)
    whole = live[:, None] & (coordinate < DIMS)
    queries = tl.load(q + (query * q_stride + q_head * DIMS)[:, None] + coordinate, mask=whole, other=0.0)
    near = (tl.load(tiles + 4).to(tl.int64) * heads + head) * DIMS  # the first token
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    highest = tl.full([ROWS], UNSEEN, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    newest = position + row // RATIO - lag  # the last token that a query reads; then that of the first and last query
    oldest, last = position - lag, position + n - 1 - lag
    for tile in range(tl.maximum(first_token, oldest + 1 - reach), last + 1, TOKENS):
        token = tile + tl.arange(0, TOKENS)
        place = near + (tl.minimum(token, last) - first_token)[:, None] * (heads * DIMS) + coordinate
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
    if part is not None:
        there = live & (newest + lag >= part_from)
        log = tl.load(part_logs + query * log_stride + q_head * log_head_stride, mask=there, other=UNSEEN) * LOG2_E
        before = part + (query * part_stride + q_head * part_head_stride)[:, None] + coordinate
        before = tl.load(before, mask=whole & there[:, None], other=0.0).to(tl.float32)
        result = before + (result - before) * (1 / (1 + tl.exp2(log - weight)))[:, None]
        weight = tl.maximum(log, weight) + tl.log2(1 + tl.exp2(-tl.abs(log - weight)))
    if mean is not None:
        result += tl.load(mean + head * DIMS + coordinate, mask=coordinate < DIMS, other=0.0)
    place = query * (heads * GROUP) + q_head
    tl.store(out + place[:, None] * DIMS + coordinate, result, mask=whole)
    if logs is not None:
        tl.store(logs + place, weight / LOG2_E, mask=live)
