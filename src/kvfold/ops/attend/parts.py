"""Attention in parts: what the Triton kernels that compute them share, and their merge by log-sum-exp.

A part is the attention of queries over some of the tokens that they read, float32[tokens, q_heads, d], and the log2 of
the sum of its weights, float32[tokens, q_heads].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvfold.ops.pages import LayerPages
from kvfold.ops.rotate import inverse
from kvfold.ops.sizes import ceil_div, power_of_two
from kvfold.transforms import Transform

UNSEEN = tl.constexpr(-1e30)  # below every logit; finite, so that a row without tokens is no NaN
MAX_ROWS = 128  # queries times heads of a block
MAX_SPLITS = 128
FEWEST_PARTS = 8  # for which merging is compiled, but for that of decoding, of which CUDA graphs know how many


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


class Blocks:
    """How a launch divides the queries [tokens, q_heads, d] of a step: blocks of `queries` of a sequence, which with
    the heads of one KV head make `rows`."""

    def __init__(self, pages: LayerPages, q: Tensor, max_rows: int = MAX_ROWS) -> None:
        step = pages.step
        self.kv_heads = pages.pool.shape[1]
        self.ratio = power_of_two(q.shape[1] // self.kv_heads)
        self.queries = max(1, min(power_of_two(step.max_queries), max_rows // self.ratio))
        self.rows = max(16, self.queries * self.ratio)  # tensor cores take 16 at least
        self.each = ceil_div(step.max_queries, self.queries)  # of a sequence
        self.count = self.each * len(step.lengths)
        self.tokens = 64 if q.shape[-1] <= 128 else 32  # of a tile
        self.num_warps = 8 if self.rows > 64 else 4
        self.registers = 128 if self.rows == 16 else None  # of a thread: four programs on a processor

    def splits(self, tokens: int, device: torch.device) -> int:
        """Over how many programs `tokens` tokens of a sequence are split, so that every processor has work."""
        wanted = ceil_div(4 * processors(device), self.count * self.kv_heads)
        return max(1, min(wanted, ceil_div(tokens, self.tokens), MAX_SPLITS))


def empty(splits: int, q: Tensor) -> tuple[Tensor, Tensor]:
    """Room for `splits` parts of queries [tokens, q_heads, d]: outputs and weights."""
    outs = torch.empty(splits, *q.shape, dtype=torch.float32, device=q.device)
    return outs, torch.empty(splits, *q.shape[:2], dtype=torch.float32, device=q.device)


def merge(outs: Tensor, weights: Tensor, value: Transform, out: Tensor | None = None, late: bool = False) -> Tensor:
    """Parts [splits, tokens, q_heads, d] over transformed values, and their weights -> outputs [tokens, q_heads, d],
    float32 or in `out`.

    With `late`, it is launched before the kernel that computes the parts ends, and waits for that.
    """
    splits, tokens, q_heads, dims = outs.shape
    if splits == 1 and value.rotation is not None:
        return inverse(value, outs[0], out, late)
    mean = value.mean if value.rotation is None else None
    merged = torch.empty_like(outs[0]) if out is None or value.rotation is not None else out
    padded = max(1 if late else FEWEST_PARTS, power_of_two(splits))
    width = min(power_of_two(dims), max(32, 2048 // padded))
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
        EARLY=late and value.rotation is not None,
        LATE=late,
        maxnreg=64,  # of a thread, which takes 32 if it may, and then loads one part after the other
        num_warps=2 if padded <= 8 else 4 if padded <= 128 else 8,
        **({"launch_pdl": True} if late else {}),
    )
    return merged if value.rotation is None else inverse(value, merged, out, late)


def warm_up(q: Tensor, value: Transform, out: Tensor) -> None:
    """Compile merging of as many parts of queries [tokens, q_heads, d] as there may be: those of pages and windows."""
    splits = FEWEST_PARTS
    while splits <= 2 * MAX_SPLITS:
        merge(*empty(splits, q), value, out)
        splits *= 2


@triton.jit(do_not_specialize=["splits"])
def _merge(
    outs, weights, mean, merged, splits, q_heads, ratio,
    DIMS: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """The mean of the parts [splits, rows, DIMS] of one row, each weighted by 2^weight: WIDTH coordinates of it. To
    that goes `mean`, of the row's KV head, if there is one."""
    if EARLY:  # for what rotates the outputs
        gdc_launch_dependents()
    if LATE:
        gdc_wait()
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    coordinate = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = (split < splits)[:, None] & (coordinate < DIMS)[None, :]
    part = tl.load(outs + (split[:, None] * rows + row) * DIMS + coordinate[None, :], mask=mask, other=0.0)
    weight = tl.load(weights + split * rows + row, mask=split < splits, other=-float("inf"))
    if mean is not None:
        added = tl.load(mean + row % q_heads // ratio * DIMS + coordinate, mask=coordinate < DIMS, other=0.0)
    part = tl.where((weight > UNSEEN)[:, None], part, 0.0)  # without tokens it may be anything
    share = tl.exp2(weight - tl.max(weight, 0))
    out = tl.sum(part * (share / tl.sum(share, 0))[:, None], 0)
    if mean is not None:
        out += added
    tl.store(merged + row * DIMS + coordinate, out, mask=coordinate < DIMS)


@triton.jit
def block_rows(
    query_starts, lengths, sequence, first, head,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, RATIO: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The rows of the block of queries from the `first` of a sequence on: which token and head each is, whether it is
    one, and its position; then the positions of the block's first and last query."""
    begin, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    to_position = tl.load(lengths + sequence) - end
    row = tl.arange(0, ROWS)
    query, group = begin + first + row // RATIO, row % RATIO
    live = (row // RATIO < QUERIES) & (query < end) & (group < Q_HEADS // KV_HEADS)
    last = tl.minimum(begin + first + QUERIES, end) - 1
    q_head = head * (Q_HEADS // KV_HEADS) + group
    return query, q_head, live, query + to_position, begin + first + to_position, last + to_position


@triton.jit
def exact_from(position, recent, group):
    """The first of the recent tokens that a query at `position` reads in 16 bits (see windows.py)."""
    return tl.minimum((position + 1) // group * group, position + 1 - recent)


@triton.jit
def softmax(logits, seen, highest, total):
    """A tile's weights, by what to scale what came before, and the running maximum and sum."""
    logits = tl.where(seen, logits, -float("inf"))
    now = tl.maximum(highest, tl.max(logits, 1))
    fade = tl.exp2(highest - now)
    weights = tl.exp2(logits - now[:, None])
    return weights.to(tl.float16), fade, now, total * fade + tl.sum(weights, 1)
