"""`attend` for many queries per sequence, over unpacked tokens.

Tokens are unpacked in a workspace of bounded size, in the dtype of the queries, and flash attention reads them there.
Unpacked keys and values are transformed back, and so need queries as the model gives them. Only if queries are few,
these are transformed instead, and their outputs back.

A query reads its own block raw and all tokens before it packed. So the queries of each block are a sequence of their
own, with a causal mask: they read the unpacked pages before their block, and then pages that end with the raw tokens of
the block. FlashAttention 3 takes all of these in one call, where it is installed (flash_attention_3.py). Elsewhere
torch's attention gets the same tokens and a mask.

If not all tokens fit, those before the queries' first block are read in chunks that fill the workspace, without a mask.
Parts are merged by log-sum-exp. What depends on the step alone is found once per step (prompt_reads.py), and serves all
layers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.format.layout import PageLayout
from kvfold.format.open_block import DRAFTED
from kvfold.ops import tiles
from kvfold.ops.attend import attend_gpu as portable
from kvfold.ops.attend.flash_attention_3 import Ends, Library, Paged
from kvfold.ops.attend.parts import LOG2_E, learned_sinks, merge
from kvfold.ops.attend.prompt_reads import Seen, reads_of
from kvfold.ops.dequantize_gpu import dequantize
from kvfold.ops.launch import launcher
from kvfold.ops.pages import LayerPages, Logits
from kvfold.ops.rotate import dual, inverse
from kvfold.ops.sizes import ceil_div, power_of_two

WORKSPACE, MOST_TOKENS = 2**27, 2**15  # bytes of unpacked keys and values, and tokens, at most
MOST_ROTATED_BACK = 128  # dims
QUERY_COST = 3  # of rotating a query and its output, relative to a key and its value while they are unpacked
MIN_QUERIES = 64  # of a sequence: with fewer, the portable kernel reads where FlashAttention 3 is missing

aten = torch.ops.aten


def unsupported(layout: PageLayout) -> str | None:
    """Why no kernel unpacks pages of this layout, or why flash attention does not take its heads; or None."""
    if packed := tiles.unsupported_side(layout):
        return "{} are not unpacked: {}".format(*packed)
    dims = layout.key.dims
    if dims != layout.value.dims:
        return f"keys have {dims} dims and values {layout.value.dims}, and flash attention takes equal ones"
    return f"heads have {dims} dims, not a multiple of 8 up to 256" if dims % 8 or dims > 256 else None


class Part(NamedTuple):
    """Attention over some of the tokens that queries read."""

    outs: Tensor  # [n, q_heads, d]
    logs: Tensor | None  # log-sum-exps [n, q_heads]; None where nobody needs them


class Target(NamedTuple):
    """Where a part is written."""

    outs: Tensor  # [n, q_heads, d], contiguous
    logs: Tensor | None  # float32[n, q_heads], contiguous; None where nobody needs them
    mean: Tensor | None = None  # float32[kv_heads, d], contiguous: added to the outputs


def empty_target(q: Tensor) -> Target:
    """Memory for a part of queries [n, q_heads, d]."""
    return Target(torch.empty(q.shape, device=q.device), torch.empty(q.shape[:2], device=q.device))


def attend(
    pages: LayerPages,
    q: Tensor,
    new: tuple[Tensor, Tensor] | None,
    logits: Logits,
    out: Tensor | None = None,
    library: Library | None = None,
) -> Tensor:
    """Queries [tokens, q_heads, d] -> outputs of the same shape, float32 or in `out`.

    `new` is what `store` returned for the same step. With up to DRAFTED queries per sequence, it lacks older raw tokens
    (see `Fresh`), and the host may not know the lengths: the portable kernel takes these steps.
    """
    step = pages.step
    if step.max_queries <= DRAFTED or (library is None and step.max_queries < MIN_QUERIES):
        return portable.attend(pages, q, new, logits, out)
    value = pages.value.transform
    operand, back = _operand(q.device, q.dtype), _back(pages, q, logits)
    q_here = (q if back[0] else dual(pages.key.transform, q, operand)).to(operand)
    if library is None or q_here.stride()[1:] != (q.shape[2], 1):  # FlashAttention 3 needs no copy of engines' queries
        q_here = q_here.contiguous()
    final = torch.empty(q.shape, device=q.device) if out is None else out
    reads, most = step.once(reads_of, pages.block, _room(pages, q.dtype), library is not None)
    keys, values = (
        torch.empty(most, pages.pool.shape[1], q.shape[2], dtype=operand, device=q.device) for _ in range(2)
    )
    for read in reads:
        queries, to = q_here[read.queries], final[read.queries]
        part, target = None, Target(to, None, value.mean) if back[1] else None
        # one part is all, and can be written where it is wanted
        direct = library is not None and len(read.chunks) == 1 and back[1] and final.dtype == operand
        for chunk in read.chunks:
            dequantize(pages, chunk.tokens, (keys, values), new, back, centred=not direct)
            # no more tokens than are unpacked: FlashAttention 3 multiplies what lies behind by zero, be it NaN
            k, v = (x[: len(chunk.tokens.locations)] for x in (keys, values))
            found = _attend(queries, k, v, logits.scale, chunk.reach, library, to if direct else None)
            if not direct:
                part = _merged(part, found, target if chunk is read.chunks[-1] else None)
        if part is None or back[1]:
            continue
        if logits.sinks is None or part.logs is None:
            inverse(value, part.outs, to)
        else:
            weights = LOG2_E.value * part.logs.contiguous()
            sinks = learned_sinks(pages, q[read.queries], logits)
            merge(part.outs.float().unsqueeze(0), weights.unsqueeze(0), value, to, sinks=sinks)
    return final


def _back(pages: LayerPages, q: Tensor, logits: Logits) -> tuple[bool, bool]:
    """Whether unpacked keys, and values, are transformed back. Otherwise queries are transformed, and outputs back.

    What takes less time is chosen. Learned sinks are merged with outputs over transformed values. A larger matrix does
    not fit into the shared memory of every GPU.
    """
    if logits.sinks is not None:
        return False, False
    many = QUERY_COST * q.shape[0] * q.shape[1] > sum(pages.step.known.lengths) * pages.pool.shape[1]
    many &= q.shape[2] <= MOST_ROTATED_BACK
    return many, many or pages.value.transform.rotation is None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, reach: Ends | Paged | Seen | None, library: Library | None,
    out: Tensor | None,
) -> Part:  # fmt: skip
    """Attention of q [n, q_heads, d] over k, v [tokens, kv_heads, d], in `out` if FlashAttention 3 reads."""
    if isinstance(reach, Ends | Paged):
        assert library is not None
        return Part(*library.attend(q, k, v, scale, reach, out))
    return _torch_attention(q, k, v, scale, reach)


def _torch_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Seen | None) -> Part:
    # KV heads are its batch, and their queries its heads: so keys and values are not copied for every query head
    n, kv_heads = len(q), k.shape[1]
    q = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    k, v = (x.transpose(0, 1).unsqueeze(1).expand(-1, q.shape[1], -1, -1) for x in (k, v))
    bias = None if seen is None else seen.bias(q[0, 0]).expand(*q.shape[:2], -1, -1)
    if q.is_cuda:
        outs, logs, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=scale)
    else:
        outs, logs = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale)
    return Part(outs.permute(2, 0, 1, 3).flatten(1, 2), logs[:, :, :n].permute(2, 0, 1).flatten(1, 2))


def _room(pages: LayerPages, dtype: torch.dtype) -> int:
    """How many tokens are unpacked together, a power of two, if queries have `dtype`."""
    numbers = 2 * pages.pool.shape[1] * pages.layout.key.dims  # of the keys and values of a token
    fit = WORKSPACE // (numbers * _operand(pages.pool.device, dtype).itemsize)
    return min(MOST_TOKENS, 1 << fit.bit_length() - 1)


def _operand(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """What flash attention reads and writes, if queries have `dtype`."""
    if device.type == "cpu":
        return torch.float32
    return torch.float16 if dtype == torch.float32 else dtype


def _merged(one: Part | None, other: Part, to: Target | None) -> Part:
    """Two parts merged: float32, or in `to`."""
    if one is None and to is None:
        return other
    n, q_heads, dims = other.outs.shape
    to, rows = to or empty_target(other.outs), 16
    strides = [x.stride()[:2] for part in (one, other) if part for x in part if x is not None]
    kernel = launcher(
        _merge_rows,
        other.outs.device,
        Q_HEADS=q_heads,
        RATIO=1 if to.mean is None else q_heads // len(to.mean),
        DIMS=dims,
        WIDTH=power_of_two(dims),
        ROWS=rows,
    )
    kernel(
        (ceil_div(n * q_heads, rows), 1, 1),
        *(one or (None, None)),
        *other,
        *to,
        n * q_heads,
        *(stride for pair in [(0, 0)] * (4 - len(strides)) + strides for stride in pair),
    )
    return Part(to.outs, to.logs)


@triton.jit(
    do_not_specialize=["rows", "one_log", "one_log_head", "other_log", "other_log_head"],
    do_not_specialize_on_alignment=["logs"],
)
def _merge_rows(
    one, one_logs, other, other_logs, out, logs, mean, rows, one_query, one_head, one_log, one_log_head, other_query,
    other_head, other_log, other_log_head,
    Q_HEADS: tl.constexpr, RATIO: tl.constexpr, DIMS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, coordinate = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    query, head = (row // Q_HEADS).to(tl.int64), row % Q_HEADS
    mask = (row < rows)[:, None] & (coordinate < DIMS)
    at = (query * other_query + head * other_head)[:, None] + coordinate
    merged = tl.load(other + at, mask=mask, other=0.0).to(tl.float32)
    log = tl.load(other_logs + query * other_log + head * other_log_head, mask=row < rows, other=0.0)
    if one is not None:
        at = (query * one_query + head * one_head)[:, None] + coordinate
        x = tl.load(one + at, mask=mask, other=0.0).to(tl.float32)
        x_log = tl.load(one_logs + query * one_log + head * one_log_head, mask=row < rows, other=0.0)
        merged = x + (merged - x) * tl.sigmoid(log - x_log)[:, None]
        log = tl.maximum(x_log, log) + tl.log(1 + tl.exp(-tl.abs(x_log - log)))
    if mean is not None:
        merged += tl.load(mean + (head // RATIO * DIMS)[:, None] + coordinate, mask=mask, other=0.0)
    tl.store(out + row.to(tl.int64)[:, None] * DIMS + coordinate, merged, mask=mask)
    if logs is not None:
        tl.store(logs + row, log, mask=row < rows)
