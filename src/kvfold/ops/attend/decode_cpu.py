"""`attend` for one query per sequence on a CPU, compiled by numba.

The context is divided into chunks, and a chunk into tiles. A tile is unpacked in a core's cache, and all query heads of
its KV head read it there. Then the chunks are merged.
"""

import math

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from kvfold.ops.attend.learned_sinks import sink_part, sink_values
from kvfold.ops.cpu import (
    EXACT,
    FAST,
    PAGES,
    SEGMENT,
    SIDE,
    TASK,
    WORKER,
    arguments,
    array,
    dense,
    described,
    f4,
    i4,
    kernel,
    read,
    rotate,
    take,
    widen,
)
from kvfold.ops.pages import LayerPages, Logits, Step
from kvfold.quantizers import lloyd_max

CHUNK = 512  # tokens per task
TILE = 64  # tokens that are unpacked at once
ROWS = 4  # tokens that are multiplied at once
UNSEEN = -1e30  # below every logit
LOG2_E = math.log2(math.e)

Arguments = arguments(
    *PAGES, "levels",
    "q", "queries", "parts", "weights", "out", "scratch", "workers", "width",
    "ring", "ring_blocks", "ring_tokens", "ring_numbers", "rings", "rings_each", "new_keys", "new_values",
    "table", "table_stride", "starts", "lengths",
    "key_rotation", "key_rotations", "key_factors", "value_rotation", "value_rotations", "value_mean",
    "sinks", "sink_values", "of_mean",
    "first",
    "sequences", "chunks", "kv_heads", "ratio", "key_dims", "value_dims", "page_size", "block",
    floats=("scale", "cap"),
)  # fmt: skip


def attend(
    pages: LayerPages, q: Tensor, new: tuple[Tensor, Tensor] | None, logits: Logits, out: Tensor | None = None
) -> Tensor:
    """Queries [sequences, q_heads, d] -> outputs [sequences, q_heads, d], float32 or in `out`. Keys and values may
    differ in d.

    `new` is what `store` returned for the same step.
    """
    (sequences, q_heads, key_dims), value_dims = q.shape, pages.layout.value.dims
    step, kv_heads = pages.step, pages.pool.shape[1]
    starts, lengths, chunks = pages.step.once(_lengths)
    sinks = [] if logits.sinks is None else [sink_part(pages, q, logits)[1] * LOG2_E, sink_values(pages)]
    of_mean = None if logits.cap is None else logits.of_mean(pages.key.transform, q)
    of_mean = None if of_mean is None else of_mean * LOG2_E
    first = None if pages.key.first is None else pages.key.first.contiguous()
    q = q.float().contiguous()
    result = (
        out
        if out is not None and out.dtype == torch.float32 and out.is_contiguous()
        else torch.empty(sequences, q_heads, value_dims)
    )
    queries, parts = torch.empty_like(q), torch.empty(chunks, *result.shape)
    weights = torch.empty(chunks, sequences, q_heads, 2)
    width = -(-max(key_dims + 7, value_dims + 7, TILE) // 16) * 16  # in whole cache lines
    scratch = torch.zeros(torch.get_num_threads(), TILE + q_heads // kv_heads, width)  # finite in rows without a token
    key, value = dense(pages.key.transform, key_dims), dense(pages.value.transform, value_dims)
    raw = [] if new is None else [side.contiguous() for side in new]
    rings = step.rings.contiguous()
    told = Arguments(
        0, 0, 0, *described(pages), lloyd_max.level_table(q.device).data_ptr(),
        q.data_ptr(), queries.data_ptr(), parts.data_ptr(), weights.data_ptr(), result.data_ptr(),
        scratch.data_ptr(), scratch.shape[0], width,
        pages.ring.data_ptr(), pages.ring.shape[0], pages.ring_tokens, pages.ring.shape[2],
        rings.data_ptr(), rings.shape[1], *([side.data_ptr() for side in raw] or (0, 0)),
        step.table.data_ptr(), step.table.stride(0),
        starts.data_ptr(), lengths.data_ptr(),
        key.dual.data_ptr(), key.dual.shape[0], key.factors.data_ptr(),
        value.inverse.data_ptr(), value.inverse.shape[0],
        value.mean.data_ptr(), *([x.data_ptr() for x in sinks] or (0, 0)), 0 if of_mean is None else of_mean.data_ptr(),
        0 if first is None else first.data_ptr(),
        sequences, chunks, kv_heads, q_heads // kv_heads, key_dims, value_dims, pages.layout.page_size,
        0 if new is None else pages.block,
        logits.scale * LOG2_E, (logits.cap or 0) * LOG2_E,
    )  # fmt: skip
    _rotate_queries(told, sequences * q_heads)
    _attend_chunks(told, sequences * kv_heads * chunks)
    _merge(told, sequences * q_heads)
    return result if out is None or result is out else out.copy_(result)


def _lengths(step: Step) -> tuple[Tensor, Tensor, int]:
    """Tokens per sequence before the step and with it, and the number of chunks of the longest."""
    starts, lengths = step.starts.int().contiguous(), step.lengths.int().contiguous()
    return starts, lengths, max(1, -(-int(lengths.max()) // CHUNK))


@njit(**EXACT)
def _exp2(x):
    """2^x for x ≤ 0, with an error of 10^-7."""
    x = max(x, f4(-126))
    whole = i4(x - f4(0.5))
    x -= f4(whole)
    power = f4(1.535336188319500e-4)
    power = power * x + f4(1.339887440266574e-3)
    power = power * x + f4(9.618437357674640e-3)
    power = power * x + f4(5.550332471162809e-2)
    power = power * x + f4(2.402264791363012e-1)
    power = power * x + f4(6.931472028550421e-1)
    power = power * x + f4(1)
    return power * i4((whole + 127) << 23).view(np.float32)


@njit(**FAST)
def _weigh(query, tile, count, shares, weight, mixed, lacking, cap):
    """Compute the weights of the first `count` tokens of a tile, relative to the highest logit so far.

    With a soft-cap, logits get what they lack, and are capped.
    The sums over earlier tiles are rescaled to that logit.
    """
    for i in range(0, count, ROWS):
        x0, x1, x2, x3 = tile[i], tile[i + 1], tile[i + 2], tile[i + 3]
        y0 = y1 = y2 = y3 = f4(0)
        for j in range(len(query)):
            y0 += query[j] * x0[j]
            y1 += query[j] * x1[j]
            y2 += query[j] * x2[j]
            y3 += query[j] * x3[j]
        shares[i], shares[i + 1], shares[i + 2], shares[i + 3] = y0, y1, y2, y3
    if cap > 0:
        for i in range(count):
            shares[i] = cap * np.tanh((shares[i] + lacking) / cap)
    highest = max(weight[0], shares[:count].max())
    fade, total = _exp2(weight[0] - highest), f4(0)
    for i in range(count):
        shares[i] = _exp2(shares[i] - highest)
        total += shares[i]
    shares[count:] = f4(0)
    weight[0], weight[1] = highest, weight[1] * fade + total
    mixed *= fade


@njit(**FAST)
def _mix(weights, tile, count, mixed):
    """Add the first `count` values of a tile, times their weights."""
    for i in range(0, count, ROWS):
        x0, x1, x2, x3 = tile[i], tile[i + 1], tile[i + 2], tile[i + 3]
        w0, w1, w2, w3 = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        for j in range(len(mixed)):
            mixed[j] += w0 * x0[j] + w1 * x1[j] + w2 * x2[j] + w3 * x3[j]


@kernel(Arguments)
def _rotate_queries(p):
    """A task rotates one query, and scales it for logits to base 2."""
    a = carray(p, 1)[0]
    heads = a.kv_heads * a.ratio
    q = array(a.q, (a.sequences * heads, a.key_dims), np.float32)
    queries = array(a.queries, (a.sequences * heads, a.key_dims), np.float32)
    rotations = array(a.key_rotation, (a.key_rotations, a.key_dims, a.key_dims), np.float64)
    factors = array(a.key_factors, a.key_dims, np.float64)
    task = take(p, TASK)
    while task < a.tasks:
        rotate(q[task], rotations, task % heads // a.ratio, factors, queries[task])
        queries[task] *= f4(a.scale)
        task = take(p, TASK)


@kernel(Arguments)
def _attend_chunks(p):
    """A task lets the query heads of one KV head read CHUNK tokens of a sequence.

    Per query head it writes the weighted sum of values, the highest logit, and the sum of weights. Weights are relative
    to the highest logit.
    """
    a = carray(p, 1)[0]
    queries = array(a.queries, (a.sequences, a.kv_heads, a.ratio, a.key_dims), np.float32)
    parts = array(a.parts, (a.chunks, a.sequences, a.kv_heads, a.ratio, a.value_dims), np.float32)
    weights = array(a.weights, (a.chunks, a.sequences, a.kv_heads, a.ratio, 2), np.float32)
    pool, words = array(a.pool, a.pool_bytes, np.uint8), array(a.pool, a.pool_bytes // 2, np.uint16)
    levels = array(a.levels, 512, np.float32)
    sides, segments = array(a.sides, 2, SIDE), array(a.segments, (2, a.most), SEGMENT)
    table = array(a.table, (a.sequences, a.table_stride), np.int64)
    rings = array(a.rings, (a.sequences, a.rings_each), np.int64)
    starts, lengths = array(a.starts, a.sequences, np.int32), array(a.lengths, a.sequences, np.int32)
    ring = array(a.ring, (a.ring_blocks, a.kv_heads, a.ring_numbers), np.uint16)
    new_keys = array(a.new_keys, (a.sequences, a.kv_heads, a.key_dims), np.uint16)
    new_values = array(a.new_values, (a.sequences, a.kv_heads, a.value_dims), np.uint16)
    of_mean = array(a.of_mean, (a.sequences, a.kv_heads, a.ratio), np.float32)
    first_keys = array(a.first, (a.kv_heads, a.key_dims), np.float32)
    scratch = array(a.scratch, (a.workers, TILE + a.ratio, a.width), np.float32)[take(p, WORKER)]
    tile, shares = scratch[:TILE], scratch[TILE:]
    half, task = a.half != 0, take(p, TASK)
    while task < a.tasks:
        chunk, sequence, head = task % a.chunks, task // a.chunks // a.kv_heads, task // a.chunks % a.kv_heads
        part, weight = parts[chunk, sequence, head], weights[chunk, sequence, head]
        start, length = starts[sequence], lengths[sequence]
        opened = (length - 1) // a.block * a.block if a.block else length
        part[:], weight[:, 0], weight[:, 1] = f4(0), f4(UNSEEN), f4(0)
        end = min(length, (chunk + 1) * CHUNK)
        for first in range(chunk * CHUNK, end, TILE):
            count = min(TILE, end - first)
            for side in range(2):
                i, dims = 0, a.value_dims if side else a.key_dims
                while i < count:
                    token = first + i
                    page, place = table[sequence, token // a.page_size], token % a.page_size
                    run = min(count - i, a.page_size - place, opened - token)
                    if token >= opened and token >= start:
                        widen((new_keys if side == 0 else new_values)[sequence, head], half, tile[i])
                        run = 1  # the query's own token
                    elif token >= opened:
                        at = token % (a.rings_each * a.ring_tokens)
                        raw = ring[rings[sequence, at // a.ring_tokens], head]
                        first_number = side * a.ring_tokens * a.key_dims + at % a.ring_tokens * dims
                        widen(raw[first_number : first_number + dims], half, tile[i])
                        run = 1
                    else:
                        at = page * a.page_stride + head * a.head_stride
                        read(pool, words, at, place, sides[side], segments[side], levels, half, tile[i : i + run])
                        if a.first and side == 0 and token == 0:
                            tile[0, :dims] += first_keys[head]
                    i += run
                for r in range(a.ratio):
                    if side == 0:
                        lacking = of_mean[sequence, head, r] if a.of_mean else f4(0)
                        _weigh(
                            queries[sequence, head, r], tile, count, shares[r], weight[r], part[r], lacking, f4(a.cap)
                        )
                    else:
                        _mix(shares[r], tile, count, part[r])
        task = take(p, TASK)


@kernel(Arguments)
def _merge(p):
    """A task merges the chunks of one query and its learned sink, rotates the result back, and adds the mean value."""
    a = carray(p, 1)[0]
    heads = a.kv_heads * a.ratio
    parts = array(a.parts, (a.chunks, a.sequences * heads, a.value_dims), np.float32)
    weights = array(a.weights, (a.chunks, a.sequences * heads, 2), np.float32)
    rotations = array(a.value_rotation, (a.value_rotations, a.value_dims, a.value_dims), np.float64)
    means = array(a.value_mean, (a.kv_heads, a.value_dims), np.float32)
    sinks = array(a.sinks, a.sequences * heads, np.float32)
    sink_values = array(a.sink_values, (a.kv_heads, a.value_dims), np.float32)
    out, ones = array(a.out, (a.sequences * heads, a.value_dims), np.float32), np.ones(a.value_dims)
    task = take(p, TASK)
    while task < a.tasks:
        weight, mixed, total = weights[:, task], np.zeros(a.value_dims, np.float32), f4(1e-30)
        highest, head = weight[:, 0].max(), task % heads // a.ratio
        if a.sinks:
            highest = max(highest, sinks[task])
            total = _exp2(sinks[task] - highest)
            mixed += total * sink_values[head]
        for chunk in range(a.chunks):
            share = _exp2(weight[chunk, 0] - highest)
            total += share * weight[chunk, 1]
            mixed += share * parts[chunk, task]
        mixed /= total
        rotate(mixed, rotations, head, ones, out[task])
        if a.value_mean:
            out[task] += means[head]
        task = take(p, TASK)
