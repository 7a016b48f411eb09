"""`attend` for many queries per sequence, over unpacked chunks of the context.

Tokens are unpacked in chunks of bounded size, in the dtype of the queries. Flash attention runs on each chunk, and
parts are merged by log-sum-exp. Unpacked keys and values are transformed back, and so need queries as the model gives
them. Only if queries are few, these are transformed instead, and their outputs back.

Queries are taken in runs (`Run`). Before its recent window, each query of a run reads one token more than the query
before it. Raw tokens of the sink are unpacked as they are. `diagonal_kernel` reads the recent windows.
- FlashAttention 3 reads all chunks where it is installed (flash_attention_3.py). A chunk holds the tokens of as many
  runs as fit. So a step of several prompts takes as few launches as that of one, if they fit.
- Otherwise torch's attention does, one run after the other. A chunk that all queries of a run read needs no mask: cuDNN
  computes it if it can. In the last chunk, cuDNN's causal mask serves some numbers of queries, and `diagonal_kernel`
  reads what is left.

What depends on the step alone is found once per step (`_reads`), and serves all layers.
"""

from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import accumulate, product
from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, cudnn_sdp_enabled, enable_cudnn_sdp
from torch.nn.functional import pad

from kvfold.format.layout import PageLayout
from kvfold.format.windows import Windows
from kvfold.ops import tiles
from kvfold.ops.attend import attend_gpu as portable
from kvfold.ops.attend.diagonal_kernel import Diagonal, Heads, Near, Part, Target, empty_target
from kvfold.ops.attend.flash_attention_3 import Ends, Library
from kvfold.ops.attend.parts import LOG2_E, learned_sinks, merge
from kvfold.ops.dequantize_gpu import Span, Tokens, dequantize
from kvfold.ops.launch import launcher
from kvfold.ops.pages import LayerPages, Logits, Step, on_device
from kvfold.ops.rotate import dual, inverse
from kvfold.ops.sizes import ceil_div, power_of_two

# Bytes of unpacked keys and values, and tokens, at most. Tokens of recent windows may be half as many again.
WORKSPACE, MOST_TOKENS = 2**27, 2**15
MOST_ROTATED_BACK = 128  # dims
QUERY_COST = 3  # of rotating a query and its output, relative to a key and its value while they are unpacked
# Per sequence, for torch: queries that read packed tokens, and packed tokens. With fewer, the portable kernel reads.
MIN_QUERIES, MIN_TOKENS = 64, 1024
# cuDNN builds a graph for every shape, which takes 40 ms and more. So there are few shapes, and a server builds all
# graphs before its first prompt (`build_graphs`):
# - With a causal mask: multiples of CAUSAL_STEP queries, and as many tokens.
# - Without a mask: queries padded to FEWEST_QUERIES or a higher power of two. Tokens are a multiple of CHUNK_STEP, or a
#   half or a quarter of it.
# Chunks of a prompt begin at round numbers. So the recent window may be missing from a number of tokens.
FEWEST_QUERIES, CAUSAL_STEP = 256, 512
CHUNK_STEP = 4096

aten = torch.ops.aten


def unsupported(layout: PageLayout) -> str | None:
    """Why no kernel unpacks pages of this layout, or why flash attention does not take its heads; or None."""
    if packed := tiles.unsupported_side(layout):
        return "{} are not unpacked: {}".format(*packed)
    dims = layout.key.dims
    if dims != layout.value.dims:
        return f"keys have {dims} dims and values {layout.value.dims}, and flash attention takes equal ones"
    return f"heads have {dims} dims, not a multiple of 8 up to 256" if dims % 8 or dims > 256 else None


def attend(
    pages: LayerPages,
    q: Tensor,
    new: tuple[Tensor, Tensor] | None,
    logits: Logits,
    out: Tensor | None = None,
    library: Library | None = None,
) -> Tensor:
    """Queries [tokens, q_heads, d] -> outputs of the same shape, float32 or in `out`.

    `new` is what `store` returned for the same step. `library` reads chunks instead of torch's attention. Without it,
    neighbouring sequences of one kind are taken together. If only the device knows their lengths, they are requests
    that decode with drafts, which have few queries.
    """
    if pages.step.host is None or not q.numel():
        return portable.attend(pages, q, new, logits, out)
    if library is not None:
        return _attend(pages, q, new, logits, out, library)
    kinds = pages.step.once(_kinds, pages.windows)
    if len(set(kinds)) < 2:
        return (_attend if Kind.LONG in kinds else portable.attend)(pages, q, new, logits, out)
    out = torch.empty(q.shape, device=q.device) if out is None else out
    for kind, tokens, part in pages.step.once(_neighbours, pages.windows):
        own = None if new is None else (new[0][tokens], new[1][tokens])
        run = _attend if kind == Kind.LONG else portable.attend
        run(pages.during(part), q[tokens], own, logits, out[tokens])
    return out


class Kind(Enum):
    """How a sequence is read without FlashAttention 3.

    - LONG: its context is unpacked in chunks.
    - SHORT_TURN: by the portable kernel, since few queries read packed tokens.
    - SHORT_PROMPT: by the portable kernel, since its queries read few packed tokens.
    """

    LONG, SHORT_TURN, SHORT_PROMPT = range(3)


def _kinds(step: Step, windows: Windows) -> list[Kind]:
    kinds = []
    for start, length in zip(*step.known, strict=True):
        queries = length - max(start, windows.packed_from(windows.sink))  # that read a packed token
        tokens = windows.raw_from(length - 1) - windows.sink
        kind = Kind.LONG if tokens >= MIN_TOKENS else Kind.SHORT_PROMPT
        kinds.append(kind if queries >= MIN_QUERIES else Kind.SHORT_TURN)
    return kinds


def _neighbours(step: Step, windows: Windows) -> list[tuple[Kind, slice, Step]]:
    return step.split(step.once(_kinds, windows))


def build_graphs(pages: LayerPages, ratio: int, library: Library | None = None) -> None:
    """Let cuDNN build its graphs for layers like this one, with `ratio` query heads per KV head.

    Also compile what merges parts, for all types of parts. A `library` builds no graphs. It is called with two
    sequences and with one, as it has functions for both.
    """
    kv_heads, dims, device = pages.pool.shape[1], pages.layout.key.dims, pages.pool.device
    room, operand = _room(pages, pages.key.raw_dtype), _operand(device, pages.key.raw_dtype)
    for n, tokens, causal in _graphs(room, pages.windows.recent) if library is None else [(2, 2, True), (1, 1, True)]:
        q = torch.zeros(n, kv_heads * ratio, dims, dtype=operand, device=device)
        k, v = torch.zeros(2, tokens, kv_heads, dims, dtype=operand, device=device)
        if library is None:
            part = _flash(q, k, v, dims**-0.5, causal, True)
        else:  # n sequences
            ends = on_device(range(n + 1), device)
            part = Part(*library.attend(q, k, v, dims**-0.5, causal, Ends(ends, ends, 1, 1)))
    q, other = q[:1], Part(part.outs[:1], None if part.logs is None else part.logs[:1])
    final = Target(torch.empty_like(q), None, pages.value.transform.mean)
    diagonal = Diagonal.of([Near(0, 1, 0, 0, 0)], 0, 1, Heads(ratio, dims), device)
    for one, to in product((other, Part(*empty_target(q)[:2]), None), (empty_target(q), final)):
        _merged(one, other, to)
        diagonal.attend(q, k, v, 1.0, one, 0, to)


def _graphs(room: int, recent: int) -> Iterator[tuple[int, int, bool]]:
    """The shapes that cuDNN is given: queries, tokens, and whether there is a causal mask."""
    yield from ((n, n, True) for n in range(1, room // 2 + 1) if _masked(n, recent))
    n = FEWEST_QUERIES
    while n <= room // 2:
        yield from ((n, size, False) for size in _sizes(room, recent))
        n *= 2


def _attend(
    pages: LayerPages,
    q: Tensor,
    new: tuple[Tensor, Tensor] | None,
    logits: Logits,
    out: Tensor | None = None,
    library: Library | None = None,
) -> Tensor:
    """`attend` by flash attention."""
    windows, value = pages.windows, pages.value.transform
    operand, back = _operand(q.device, q.dtype), _back(pages, q, logits)
    q_here = (q if back[0] else dual(pages.key.transform, q, operand)).to(operand)
    if library is None or q_here.stride()[1:] != (q.shape[2], 1):  # FlashAttention 3 needs no copy of engines' queries
        q_here = q_here.contiguous()
    final = torch.empty(q.shape, device=q.device) if out is None else out
    to = Target(final, None, value.mean) if back[1] else empty_target(q)
    kv_heads, dims = pages.pool.shape[1], q.shape[2]
    heads = Heads(q.shape[1] // kv_heads, dims)
    reads, most = pages.step.once(_reads, windows, _room(pages, q.dtype), library is not None, heads)
    keys, values = (torch.empty(most, kv_heads, dims, dtype=operand, device=q.device) for _ in range(2))
    for read in reads:
        queries, part = (q_here if read.queries is None else q_here[read.queries]), None
        target = to if read.queries is None else to.of(read.queries)
        # one part is all, and can be written where it is wanted
        direct = library is not None and len(read.chunks) == 1 and not read.near and target.logs is None
        direct &= final.dtype == operand
        for chunk in read.chunks:
            dequantize(pages, chunk.tokens, (keys, values), new, back, centred=not direct)
            if not chunk.read:
                continue
            # no more tokens than are read: FlashAttention 3 multiplies what lies behind them by zero, be it NaN
            whole = chunk.read == keys.shape[0]  # a slice takes the host microseconds
            k, v = (keys, values) if whole else (keys[: chunk.read], values[: chunk.read])
            seen = queries, k, v, logits.scale
            here = target if chunk is read.chunks[-1] and not read.near else None
            if library is not None and chunk.ends is not None:
                found = Part(*library.attend(*seen, chunk.causal, chunk.ends, target.outs if direct else None))
                part = found if direct else _merged(part, found, here)
            elif chunk.diagonal is not None:
                part = chunk.diagonal.attend(*seen, part, 0, here)
            else:
                part = _merged(part, _flash(*seen, chunk.causal, chunk.usual), here)
        if read.near:
            read.near.attend(queries, keys, values, logits.scale, part, windows.recent, target)
    if logits.sinks is not None and to.logs is not None:
        weights = LOG2_E.value * to.logs.unsqueeze(0)
        return merge(to.outs.unsqueeze(0), weights, value, final, sinks=learned_sinks(pages, q, logits))
    return final if back[1] else inverse(value, to.outs, final)


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


class Run(NamedTuple):
    """Successive queries of a sequence, and what they read."""

    row: int  # the sequence
    query: int  # the row of the first query
    position: int  # of the first query
    n: int
    shared: int  # before its recent window, the first query reads one token more than this; may be negative
    end: int  # tokens that the last query reads before its recent window
    near: range  # the tokens of recent windows

    @classmethod
    def of(cls, row: int, query: int, position: int, n: int, windows: Windows) -> Self:
        shared = windows.raw_from(position) - 1
        near = range(max(0, shared + 1), position + n) if windows.recent else range(0)
        return cls(row, query, position, n, shared, max(0, shared + n), near)


class Chunk(NamedTuple):
    """Tokens that are unpacked together: those that flash attention reads, then those of recent windows."""

    tokens: Tokens
    read: int  # how many flash attention reads
    causal: bool  # whether the last query of a sequence reads one token more than the query before it, and so on
    ends: Ends | None = None  # for FlashAttention 3
    diagonal: Diagonal | None = None  # reads them instead of cuDNN
    usual: bool = False  # whether cuDNN may build a graph


class Read(NamedTuple):
    """Queries whose outputs are found together."""

    queries: slice | None  # None: all of the step
    chunks: list[Chunk]
    near: Diagonal | None  # reads recent windows in the last chunk


def _reads(step: Step, windows: Windows, room: int, library: bool, heads: Heads) -> tuple[list[Read], int]:
    """How the queries of a step are taken, with chunks of up to `room` tokens and those of recent windows. Then the
    tokens of the largest chunk. `library`: with FlashAttention 3."""
    runs = list(_query_runs(step, windows, room // 2, library))
    groups = list(_together(runs, room)) if library else [[run] for run in runs]
    reads = [_read(step, windows, room, library, heads, group) for group in groups]
    if len(reads) == 1:
        reads = [reads[0]._replace(queries=None)]
    return reads, max(len(chunk.tokens.locations) for read in reads for chunk in read.chunks)


def _query_runs(step: Step, windows: Windows, most: int, library: bool) -> Iterator[Run]:
    """Runs of up to `most` queries, of as many as FlashAttention 3 or cuDNN may take.

    For cuDNN, queries that read recent windows alone are a run of their own.
    """
    known = step.known
    for row, (position, length, query) in enumerate(zip(*known, known.query_starts[:-1], strict=True)):
        while position < length:
            n = min(most, length - position)
            if not library and position < windows.recent:
                n = min(n, windows.recent - position)
            elif not library:
                n = next((fewer for fewer in range(n, 0, -1) if _masked(fewer, windows.recent)), n)
            yield Run.of(row, query, position, n, windows)
            position, query = position + n, query + n


def _together(runs: Iterable[Run], room: int) -> Iterator[list[Run]]:
    """Neighbouring runs whose tokens fit into one chunk. A run over half a chunk is alone: FlashAttention 3 reads one
    long sequence faster than several."""
    group: list[Run] = []
    used = 0
    for run in runs:
        tokens = run.end + len(run.near)
        alone = 2 * tokens > room
        if group and (alone or used + tokens > room):
            yield group
            group, used = [], 0
        if alone:
            yield [run]
        else:
            group.append(run)
            used += tokens
    if group:
        yield group


def _read(step: Step, windows: Windows, room: int, library: bool, heads: Heads, runs: list[Run]) -> Read:
    """How the queries of neighbouring runs are taken together. Only a run that is alone has several chunks."""
    first, last, device, chunks = runs[0], runs[-1], step.table.device, []
    masked, sizes = _masked(first.n, windows.recent), _sizes(room, windows.recent)
    pieces = [
        _few_chunks(run.shared, run.end, room) if library else _chunks(run.shared, run.end, sizes, masked)
        for run in runs
    ]
    for parts in zip(*pieces, strict=True):
        ranges, causal = [tokens for tokens, _ in parts], parts[0][1]
        spans = [Span(run.row, tokens, tokens.stop) for run, tokens in zip(runs, ranges, strict=True)]
        spans += [Span(run.row, run.near, 0) for run in runs if causal]
        read, diagonal = sum(map(len, ranges)), None
        if causal and not library and not masked:
            near = Near(0, first.n, first.position, ranges[0].start, 0)
            diagonal = Diagonal.of([near], windows.recent, first.end, heads, device)
        tokens, ends = Tokens.of(step, windows.sink, spans), _ends(runs, ranges, device) if library else None
        chunks.append(Chunk(tokens, read, causal, ends, diagonal, causal or read in sizes))
    queries = slice(first.query, last.query + last.n)
    if not windows.recent:
        return Read(queries, chunks, None)
    places = list(accumulate((len(run.near) for run in runs), initial=chunks[-1].read))[:-1]
    sequences = [
        Near(run.query - first.query, run.n, run.position, run.near.start, place)
        for run, place in zip(runs, places, strict=True)
    ]
    return Read(queries, chunks, Diagonal.of(sequences, 0, windows.recent, heads, device))


def _ends(runs: list[Run], tokens: list[range], device: torch.device) -> Ends:
    sizes = [run.n for run in runs], [len(each) for each in tokens]
    queries, read = on_device([[0, *accumulate(each)] for each in sizes], device)
    return Ends(queries, read, *map(max, sizes))


def _masked(n: int, recent: int) -> bool:
    """Whether cuDNN may build a graph with a causal mask for n queries and as many tokens."""
    return n >= CAUSAL_STEP // 2 and any(size % CAUSAL_STEP == 0 for size in (n, n + recent))


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


def _chunks(shared: int, end: int, sizes: list[int], masked: bool) -> Iterator[tuple[range, bool]]:
    """Chunks of the tokens before `end`, and whether a chunk needs the causal mask. Only the last one does.

    All queries read the tokens before `shared`. `masked`: whether the last chunk must have no others.
    """
    start = 0
    for size in sizes:
        while shared - start >= size:
            yield range(start, start + size), False
            start += size
    if start < shared and masked:
        yield range(start, shared), False
        start = shared
    yield range(start, end), True


def _few_chunks(shared: int, end: int, room: int) -> Iterator[tuple[range, bool]]:
    """`_chunks` for a library that takes any shape: as few as fit into the workspace. Queries are room / 2 at most."""
    start = 0
    while end - start > room:
        stop = min(start + room, shared)
        yield range(start, stop), False
        start = stop
    yield range(start, end), True


def _sizes(room: int, recent: int) -> list[int]:
    """The sizes of chunks without a mask, in falling order. Only the last of these chunks may have another size."""
    step = min(CHUNK_STEP, room)
    sizes = {*range(step, room + 1, step), step // 2, step // 4}
    return sorted((size for size in sizes | {size - recent for size in sizes} if size > 0), reverse=True)


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, usual: bool) -> Part:
    """torch's attention of q [n, q_heads, d] over k, v [tokens, kv_heads, d].

    - `causal`: the last query reads all tokens, every other query one token less than the next.
    - `usual`: cuDNN may build a graph for this shape. Without a mask, queries are padded to few numbers.
    """
    n = len(q)
    if usual and not causal and (more := max(FEWEST_QUERIES, power_of_two(n)) - n):
        q = pad(q, (0, 0, 0, 0, 0, more))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    if not q.is_cuda:
        mask = q.new_full((q.shape[2], k.shape[2]), -torch.inf).triu_(k.shape[2] - q.shape[2] + 1) if causal else None
        outs, logs = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
    elif usual and _cudnn_can(SDPAParams(q, k, v, None, 0.0, causal, True)):
        outs, logs = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
    else:
        outs, logs = aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal, scale=scale)[:2]
    return Part(outs[0].transpose(0, 1)[:n], logs.view(*logs.shape[1:3]).T[:n])


def _cudnn_can(parameters: SDPAParams) -> bool:
    """Whether cuDNN can compute this, even where PyTorch may not choose it by itself, as in vLLM's processes."""
    allowed = cudnn_sdp_enabled()
    enable_cudnn_sdp(True)
    try:
        return can_use_cudnn_attention(parameters)
    finally:
        enable_cudnn_sdp(allowed)


def _merged(one: Part | None, other: Part, to: Target | None) -> Part:
    """Two parts merged: float32, or in `to`."""
    if one is None and to is None:
        return other
    n, q_heads, dims = other.outs.shape
    to, rows = to or empty_target(other.outs), 16
    strides = [x.stride()[:2] for part in (one, other) if part for x in (part.outs, part.logs) if x is not None]
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
