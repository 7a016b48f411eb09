"""Attention in parts: what the Triton kernels that compute parts share, and their merge by log-sum-exp.

A part is attention over some of the tokens that queries read. `outs` are its outputs, float32[tokens, q_heads, d]
with the d of values.
`weights` are the log2 of its sums of softmax weights, float32[tokens, q_heads].
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.ops.attend.learned_sinks import sink_values
from kvfold.ops.launch import launcher
from kvfold.ops.pages import LayerPages, Logits
from kvfold.ops.pdl import AFTER, ALONE, LAST, release, wait
from kvfold.ops.rotate import inverse
from kvfold.ops.sizes import ceil_div, power_of_two
from kvfold.transforms import Transform

LOG2_E = tl.constexpr(math.log2(math.e))
UNSEEN = tl.constexpr(-1e30)  # below every logit; finite, so that a row without tokens does not become NaN
MAX_ROWS = 128  # of a tile: queries times query heads per KV head; half as many above 128 dims
MAX_SPLITS = 128
# the fewest parts that `merge` is compiled for, except in decode steps: their CUDA graphs fix the number
FEWEST_PARTS = 8


@lru_cache
def sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


class QueryTiles:
    """How a launch divides the queries [tokens, q_heads, d] of a step.

    A tile is up to `queries` tokens of one sequence, in all query heads of one KV head: `rows` rows.
    """

    def __init__(self, pages: LayerPages, q: Tensor, max_rows: int = MAX_ROWS) -> None:
        step, wide = pages.step, max(pages.layout.key.dims, pages.layout.value.dims) > 128
        self.kv_heads = pages.pool.shape[1]
        self.ratio = power_of_two(q.shape[1] // self.kv_heads)
        self.queries = max(1, min(power_of_two(step.max_queries), max_rows // (2 if wide else 1) // self.ratio))
        self.rows = max(16, self.queries * self.ratio)  # MMA takes 16 at least
        self.per_sequence = ceil_div(step.max_queries, self.queries)
        self.count = self.per_sequence * len(step.lengths)
        self.tokens = 32 if wide else 64  # keys that a tile reads at once
        self.num_warps = 8 if self.rows > (32 if wide else 64) else 4
        # per thread, at most: so that four CTAs fit on an SM, or three, and no register is spilled
        self.registers = None if self.rows > 16 else 168 if wide else 128

    def splits(self, tokens: int, device: torch.device) -> int:
        """Over how many CTAs `tokens` tokens of a sequence are split, so that every SM has work."""
        wanted = ceil_div(4 * sms(device), self.count * self.kv_heads)
        return max(1, min(wanted, ceil_div(tokens, self.tokens), MAX_SPLITS))


def empty(splits: int, q: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    """Memory for `splits` parts of queries [tokens, q_heads, d]: outputs of `dims` coordinates, and weights."""
    outs = torch.empty(splits, *q.shape[:2], dims, dtype=torch.float32, device=q.device)
    return outs, torch.empty(splits, *q.shape[:2], dtype=torch.float32, device=q.device)


class Sinks(NamedTuple):
    """Learned sinks as one more part: what `learned_sinks.sink_part` computes, for `merge`."""

    logits: Tensor  # float32[q_heads]
    value: Tensor  # float32[kv_heads, d]: zero, transformed
    q: Tensor  # [tokens, q_heads, d], as the model gives them
    token: int  # strides
    head: int
    mean: Tensor | None  # of keys, float32[kv_heads, d]
    scale: float  # of the logits, times log2(e)


def learned_sinks(pages: LayerPages, q: Tensor, logits: Logits) -> Sinks | None:
    """The learned sinks of queries [tokens, q_heads, d], if there are any."""
    if logits.sinks is None:
        return None
    scale, mean = logits.scale * LOG2_E.value, pages.key.transform.mean if logits.cap is None else None
    q = q if q.stride(-1) == 1 else q.contiguous()
    return Sinks(logits.sinks, sink_values(pages), q, q.stride(0), q.stride(1), mean, scale)


class Cap(NamedTuple):
    """A soft-cap of logits to base 2."""

    at: float
    of_mean: Tensor | None  # float32[tokens, q_heads]: what logits over centred keys lack


def soft_cap(pages: LayerPages, q: Tensor, logits: Logits) -> Cap | None:
    """The soft-cap for queries [tokens, q_heads, d] as the model gives them, if there is one."""
    if logits.cap is None:
        return None
    of_mean = logits.of_mean(pages.key.transform, q)
    return Cap(logits.cap * LOG2_E.value, None if of_mean is None else of_mean * LOG2_E.value)


def merge(
    outs: Tensor,
    weights: Tensor,
    value: Transform,
    out: Tensor | None = None,
    overlaps: bool = False,
    sinks: Sinks | None = None,
) -> Tensor:
    """Merge parts [splits, tokens, q_heads, d] over transformed values, and learned sinks, to outputs [tokens, q_heads,
    d], and transform these back.

    Outputs are float32, or in `out`. With `overlaps`, kernels are launched before the parts are complete.
    """
    splits, tokens, q_heads, dims = outs.shape
    if splits == 1 and value.rotation is not None and sinks is None:
        return inverse(value, outs[0], out, overlaps)
    mean = value.mean if value.rotation is None else None
    by_head = mean if sinks is None else sinks.value
    key_dims = 0 if sinks is None else sinks.q.shape[-1]
    merged = torch.empty_like(outs[0]) if out is None or value.rotation is not None else out
    padded = max(1 if overlaps else FEWEST_PARTS, power_of_two(splits))
    width = min(power_of_two(dims), max(32, 2048 // padded))
    overlap = (LAST if value.rotation is None else AFTER) if overlaps else ALONE
    ratio = 1 if by_head is None else q_heads // len(by_head)
    kernel = launcher(
        _merge,
        outs.device,
        DIMS=dims,
        KEY_DIMS=key_dims,
        KEY_PADDED=power_of_two(key_dims),
        WIDTH=width,
        SPLITS=padded,
        OVERLAP=overlap,
        maxnreg=64,  # the compiler would choose 32, and load one part after another
        num_warps=2 if padded <= 8 else 4 if padded <= 128 else 8,
        **overlap.launch,
    )
    kernel((tokens * q_heads, ceil_div(dims, width), 1), outs, weights, mean, sinks, merged, splits, q_heads, ratio)
    return merged if value.rotation is None else inverse(value, merged, out, overlaps)


def warm_up(pages: LayerPages, q: Tensor, logits: Logits, out: Tensor) -> None:
    """Compile `merge` for queries [tokens, q_heads, d] and every number of parts.

    There are up to MAX_SPLITS parts of pages, and as many of raw tokens.
    """
    splits = FEWEST_PARTS
    while splits <= 2 * MAX_SPLITS:
        merge(*empty(splits, q, out.shape[-1]), pages.value.transform, out, sinks=learned_sinks(pages, q, logits))
        splits *= 2


@triton.jit(do_not_specialize=["splits"])
def _merge(
    outs, weights, mean, sinks, merged, splits, q_heads, ratio,
    DIMS: tl.constexpr, KEY_DIMS: tl.constexpr, KEY_PADDED: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge WIDTH coordinates of one row: the mean of its parts [splits, rows, DIMS], weighted by 2^weight.

    The learned sink of its query head is one more part. The `mean` of its KV head, if there is one, is added.
    """
    release(OVERLAP, "start")
    wait(OVERLAP, "start")
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    coordinate = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = (split < splits)[:, None] & (coordinate < DIMS)[None, :]
    part = tl.load(outs + (split[:, None] * rows + row) * DIMS + coordinate[None, :], mask=mask, other=0.0)
    weight = tl.load(weights + split * rows + row, mask=split < splits, other=-float("inf"))
    if mean is not None:
        added = tl.load(mean + row % q_heads // ratio * DIMS + coordinate, mask=coordinate < DIMS, other=0.0)
    part = tl.where((weight > UNSEEN)[:, None], part, 0.0)  # a part without tokens may hold anything
    highest = tl.max(weight, 0)
    if sinks is not None:
        learned = _sink(sinks, row // q_heads, row % q_heads, row % q_heads // ratio, KEY_DIMS, KEY_PADDED)
        highest = tl.maximum(highest, learned)
    share = tl.exp2(weight - highest)
    total = tl.sum(share, 0)
    if sinks is not None:
        total += tl.exp2(learned - highest)
    out = tl.sum(part * (share / total)[:, None], 0)
    if sinks is not None:
        at = sinks.value + row % q_heads // ratio * DIMS + coordinate
        out += tl.exp2(learned - highest) / total * tl.load(at, mask=coordinate < DIMS, other=0.0)
    if mean is not None:
        out += added
    tl.store(merged + row * DIMS + coordinate, out, mask=coordinate < DIMS)


@triton.jit
def _sink(sinks, token, q_head, head, DIMS: tl.constexpr, PADDED: tl.constexpr):
    """The logit of a learned sink to base 2, without scale·q·mean, as those of centred keys."""
    logit = tl.load(sinks.logits + q_head).to(tl.float32) * LOG2_E
    if sinks.mean is not None:
        coordinate = tl.arange(0, PADDED)
        query = sinks.q + token * sinks.token + q_head * sinks.head + coordinate
        query = tl.load(query, mask=coordinate < DIMS, other=0.0).to(tl.float32)
        mean = tl.load(sinks.mean + head * DIMS + coordinate, mask=coordinate < DIMS, other=0.0)
        logit -= sinks.scale * tl.sum(query * mean, 0)
    return logit


@triton.jit
def tile_rows(
    query_starts, lengths, sequence, first, head,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, RATIO: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The tile of queries that begins with query `first` of a sequence.

    Returns per row: token, query head, whether it is a query at all, position. Then, per tile: the positions of its
    first and last query.
    """
    begin, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    to_position = tl.load(lengths + sequence) - end
    row = tl.arange(0, ROWS)
    query, group = begin + first + row // RATIO, row % RATIO
    live = (row // RATIO < QUERIES) & (query < end) & (group < Q_HEADS // KV_HEADS)
    last = tl.minimum(begin + first + QUERIES, end) - 1
    q_head = head * (Q_HEADS // KV_HEADS) + group
    return query, q_head, live, query + to_position, begin + first + to_position, last + to_position


@triton.jit
def raw_from(position, BLOCK: tl.constexpr):
    """`open_block.raw_from`: the first token that a query at `position` reads raw."""
    if BLOCK == 0:
        return position + 1
    else:
        return position // BLOCK * BLOCK


@triton.jit
def lacking(cap, row, live):
    """What the logits of rows of queries lack before they are capped. `row`: their place in [tokens, q_heads]."""
    if cap.of_mean is None:
        return tl.zeros(row.shape, tl.float32)
    else:
        return tl.load(cap.of_mean + row, mask=live, other=0.0)


@triton.jit
def capped(logits, cap, lacked):
    """cap·tanh(x / cap) of complete logits x, as tanh(z) = 1 − 2 / (1 + e^2z)."""
    x = logits + lacked[:, None]
    return cap.at - 2 * cap.at / (1 + tl.exp2(x * (2 * LOG2_E / cap.at)))


@triton.jit
def softmax(logits, seen, highest, total):
    """The weights of a tile, the factor for earlier tiles, and the running maximum and sum."""
    logits = tl.where(seen, logits, -float("inf"))
    now = tl.maximum(highest, tl.max(logits, 1))
    fade = tl.exp2(highest - now)
    weights = tl.exp2(logits - now[:, None])
    return weights.to(tl.float16), fade, now, total * fade + tl.sum(weights, 1)
