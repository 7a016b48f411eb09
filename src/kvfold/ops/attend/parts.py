"""Attention in parts: what the Triton kernels that compute parts share, and their merge by log-sum-exp.

A part is attention over some of the tokens that queries read. `outs` are its outputs, float32[tokens, q_heads, d].
`weights` are the log2 of its sums of softmax weights, float32[tokens, q_heads].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.ops.pages import LayerPages
from kvfold.ops.pdl import AFTER, ALONE, LAST, release, wait
from kvfold.ops.rotate import inverse
from kvfold.ops.sizes import ceil_div, power_of_two
from kvfold.transforms import Transform

UNSEEN = tl.constexpr(-1e30)  # below every logit; finite, so that a row without tokens does not become NaN
MAX_ROWS = 128  # of a tile: queries times query heads per KV head
MAX_SPLITS = 128
# the fewest parts that `merge` is compiled for, except in decode steps: their CUDA graphs fix the number
FEWEST_PARTS = 8


def sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


class QueryTiles:
    """How a launch divides the queries [tokens, q_heads, d] of a step.

    A tile is up to `queries` tokens of one sequence, in all query heads of one KV head: `rows` rows.
    """

    def __init__(self, pages: LayerPages, q: Tensor, max_rows: int = MAX_ROWS) -> None:
        step = pages.step
        self.kv_heads = pages.pool.shape[1]
        self.ratio = power_of_two(q.shape[1] // self.kv_heads)
        self.queries = max(1, min(power_of_two(step.max_queries), max_rows // self.ratio))
        self.rows = max(16, self.queries * self.ratio)  # MMA takes 16 at least
        self.per_sequence = ceil_div(step.max_queries, self.queries)
        self.count = self.per_sequence * len(step.lengths)
        self.tokens = 64 if q.shape[-1] <= 128 else 32  # keys that a tile reads at once
        self.num_warps = 8 if self.rows > 64 else 4
        self.registers = 128 if self.rows == 16 else None  # per thread, so that four CTAs fit on an SM

    def splits(self, tokens: int, device: torch.device) -> int:
        """Over how many CTAs `tokens` tokens of a sequence are split, so that every SM has work."""
        wanted = ceil_div(4 * sms(device), self.count * self.kv_heads)
        return max(1, min(wanted, ceil_div(tokens, self.tokens), MAX_SPLITS))


def empty(splits: int, q: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for `splits` parts of queries [tokens, q_heads, d]: outputs and weights."""
    outs = torch.empty(splits, *q.shape, dtype=torch.float32, device=q.device)
    return outs, torch.empty(splits, *q.shape[:2], dtype=torch.float32, device=q.device)


def merge(outs: Tensor, weights: Tensor, value: Transform, out: Tensor | None = None, overlaps: bool = False) -> Tensor:
    """Merge parts [splits, tokens, q_heads, d] over transformed values to outputs [tokens, q_heads, d], and transform
    these back.

    Outputs are float32, or in `out`. With `overlaps`, kernels are launched before the parts are complete.
    """
    splits, tokens, q_heads, dims = outs.shape
    if splits == 1 and value.rotation is not None:
        return inverse(value, outs[0], out, overlaps)
    mean = value.mean if value.rotation is None else None
    merged = torch.empty_like(outs[0]) if out is None or value.rotation is not None else out
    padded = max(1 if overlaps else FEWEST_PARTS, power_of_two(splits))
    width = min(power_of_two(dims), max(32, 2048 // padded))
    overlap = (LAST if value.rotation is None else AFTER) if overlaps else ALONE
    _merge[(tokens * q_heads, ceil_div(dims, width))](
        outs,
        weights,
        mean,
        merged,
        splits,
        q_heads,
        1 if mean is None else q_heads // len(mean),
        DIMS=dims,
        WIDTH=width,
        SPLITS=padded,
        OVERLAP=overlap,
        maxnreg=64,  # the compiler would choose 32, and load one part after another
        num_warps=2 if padded <= 8 else 4 if padded <= 128 else 8,
        **overlap.launch,
    )
    return merged if value.rotation is None else inverse(value, merged, out, overlaps)


def warm_up(q: Tensor, value: Transform, out: Tensor) -> None:
    """Compile `merge` for queries [tokens, q_heads, d] and every number of parts.

    There are up to MAX_SPLITS parts of pages, and as many of windows.
    """
    splits = FEWEST_PARTS
    while splits <= 2 * MAX_SPLITS:
        merge(*empty(splits, q), value, out)
        splits *= 2


@triton.jit(do_not_specialize=["splits"])
def _merge(
    outs, weights, mean, merged, splits, q_heads, ratio,
    DIMS: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge WIDTH coordinates of one row: the mean of its parts [splits, rows, DIMS], weighted by 2^weight.

    The `mean` of its KV head, if there is one, is added.
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
    share = tl.exp2(weight - tl.max(weight, 0))
    out = tl.sum(part * (share / tl.sum(share, 0))[:, None], 0)
    if mean is not None:
        out += added
    tl.store(merged + row * DIMS + coordinate, out, mask=coordinate < DIMS)


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
def raw_from(position, recent, group):
    """`Windows.raw_from`: the first of the recent tokens that a query at `position` reads raw."""
    return tl.minimum((position + 1) // group * group, position + 1 - recent)


@triton.jit
def softmax(logits, seen, highest, total):
    """The weights of a tile, the factor for earlier tiles, and the running maximum and sum."""
    logits = tl.where(seen, logits, -float("inf"))
    now = tl.maximum(highest, tl.max(logits, 1))
    fade = tl.exp2(highest - now)
    weights = tl.exp2(logits - now[:, None])
    return weights.to(tl.float16), fade, now, total * fade + tl.sum(weights, 1)
