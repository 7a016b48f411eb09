"""`attend` for many queries per sequence, over unpacked chunks of the context.

Tokens are unpacked in chunks of bounded size, in the dtype of the queries. Flash attention runs on each chunk, and
parts are merged by log-sum-exp. Unpacked keys and values are transformed back, and so need queries as the model gives
them. Only if queries are few, these are transformed instead, and their outputs back.

Queries are taken in runs (`_query_runs`). Before its recent window, each query of a run reads one token more than the
query before it. Raw tokens of the sink are unpacked as they are.
- FlashAttention 3 reads all chunks where it is installed (flash_attention_3.py).
- Otherwise torch's attention does. A chunk that all queries of a run read needs no mask: cuDNN computes it if it can.
  In the last chunk, cuDNN's causal mask serves some numbers of queries, and `diagonal_kernel` reads what is left.
- `diagonal_kernel` reads the recent windows.
"""

from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from functools import partial
from itertools import product

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
from kvfold.ops.attend.diagonal_kernel import Diagonal, Part, Target, empty_target, unseen_part
from kvfold.ops.attend.flash_attention_3 import Library
from kvfold.ops.attend.parts import LOG2_E, learned_sinks, merge
from kvfold.ops.dequantize_gpu import dequantize
from kvfold.ops.pages import LayerPages, Logits, Step
from kvfold.ops.rotate import dual, inverse
from kvfold.ops.sizes import ceil_div, power_of_two

WORKSPACE, MOST_TOKENS = 2**27, 2**15  # bytes of unpacked keys and values, and tokens, at most
MOST_ROTATED_BACK = 128  # dims
QUERY_COST = 3  # of rotating a query and its output, relative to a key and its value while they are unpacked
# Per sequence: queries that read packed tokens, and packed tokens. With fewer, the portable kernel is faster.
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

    `new` is what `store` returned for the same step. `library` reads chunks instead of torch's attention. Neighbouring
    sequences of one kind are taken together. If only the device knows their lengths, they are requests that decode with
    drafts, which have few queries.
    """
    long = partial(_attend, library)
    if pages.step.host is None:
        return portable.attend(pages, q, new, logits, out)
    kinds = pages.step.once(_kinds, pages.windows)
    if len(set(kinds)) < 2:
        return (long if Kind.LONG in kinds else portable.attend)(pages, q, new, logits, out)
    out = torch.empty(q.shape, device=q.device) if out is None else out
    for kind, tokens, part in pages.step.once(_runs, pages.windows):
        own = None if new is None else (new[0][tokens], new[1][tokens])
        run = long if kind == Kind.LONG else portable.attend
        run(replace(pages, step=part), q[tokens], own, logits, out[tokens])
    return out


class Kind(Enum):
    """How a sequence is read.

    - LONG: its context is unpacked in chunks.
    - SHORT_TURN: by the portable kernel, since few queries read packed tokens.
    - SHORT_PROMPT: by the portable kernel, since its queries read few packed tokens.
    """

    LONG, SHORT_TURN, SHORT_PROMPT = range(3)


def _kinds(step: Step, windows: Windows) -> list[Kind]:
    kinds = []
    for row, length in enumerate(step.known.lengths):
        queries, tokens = length - _first(step, windows, row), windows.raw_from(length - 1) - windows.sink
        kind = Kind.LONG if tokens >= MIN_TOKENS else Kind.SHORT_PROMPT
        kinds.append(kind if queries >= MIN_QUERIES else Kind.SHORT_TURN)
    return kinds


def _first(step: Step, windows: Windows, row: int) -> int:
    """The position of the first query of the step that reads a packed token."""
    return max(step.known.starts[row], windows.packed_from(windows.sink))


def _runs(step: Step, windows: Windows) -> list[tuple[Kind, slice, Step]]:
    return step.split(step.once(_kinds, windows))


def build_graphs(pages: LayerPages, ratio: int, library: Library | None = None) -> None:
    """Let cuDNN build its graphs for layers like this one, with `ratio` query heads per KV head.

    Also compile what merges parts, for all types of parts. A `library` builds no graphs, and is called once.
    """
    kv_heads, dims = pages.pool.shape[1], pages.layout.key.dims
    room, workspace = _workspace(pages, pages.pool.device, pages.key.raw_dtype)
    read = partial(_flash, usual=True) if library is None else library.attend
    for queries, tokens, causal in _graphs(room, pages.windows.recent) if library is None else [(1, 1, True)]:
        q = torch.zeros(queries, kv_heads * ratio, dims, dtype=workspace.dtype, device=workspace.device)
        k, v = workspace[: tokens * _numbers(pages)].view(2, 1, kv_heads, tokens, dims)
        part = Part(*read(q, k, v, dims**-0.5, causal))
    q, other = q[:1], Part(part.outs[:1], None if part.logs is None else part.logs[:1])
    final = Target(torch.empty_like(q), None, pages.value.transform.mean)
    for one, to in product((other, unseen_part(q)), (empty_target(q), final)):
        _merged(None, other, to)
        _merged(one, other, to)
        Diagonal(0, 0, 0, 1).attend(q, k, v, 1.0, one, to)


def _graphs(room: int, recent: int) -> Iterator[tuple[int, int, bool]]:
    """The shapes that cuDNN is given: queries, tokens, and whether there is a causal mask."""
    yield from ((n, n, True) for n in range(1, room // 2 + 1) if _masked(n, recent))
    n = FEWEST_QUERIES
    while n <= room // 2:
        yield from ((n, size, False) for size in _sizes(room, recent))
        n *= 2


def _attend(
    library: Library | None,
    pages: LayerPages,
    q: Tensor,
    new: tuple[Tensor, Tensor] | None,
    logits: Logits,
    out: Tensor | None = None,
) -> Tensor:
    """`attend` for a step of LONG sequences."""
    windows, known, value = pages.windows, pages.step.known, pages.value.transform
    room, workspace = _workspace(pages, q.device, q.dtype)
    sizes = _sizes(room, windows.recent)
    back = _back(pages, q, logits)
    q_here = (q if back[0] else dual(pages.key.transform, q, workspace.dtype)).to(workspace.dtype).contiguous()
    final = torch.empty(q.shape, device=q.device) if out is None else out
    outs, logs, mean = Target(final, None, value.mean) if back[1] else empty_target(q)
    for row, before, position, n in _query_runs(pages.step, windows, room // 2, library):
        first, part = known.query_starts[row] + position - known.starts[row], None
        run, whole = slice(first, first + n), slice(first - before, first + n)
        to = Target(outs[whole], None if logs is None else logs[whole], mean)
        masked, shared = _masked(n, windows.recent), windows.raw_from(position) - 1
        alone = shared + n <= room and not windows.recent and logs is None  # one part is all
        if library and alone and outs.dtype == q_here.dtype:
            k, v = dequantize(pages, row, range(shared + n), workspace, new, back=back, centred=False)
            library.attend(q_here[run], k, v, logits.scale, True, to.outs)
            continue
        few = _few_chunks(shared, shared + n, room)
        for tokens, causal in few if library else _chunks(shared, shared + n, sizes, masked):
            k, v = dequantize(pages, row, tokens, workspace, new, back=back)
            here = to if causal and not windows.recent else None
            if library is not None:
                part = _merged(part, Part(*library.attend(q_here[run], k, v, logits.scale, causal)), here)
            elif causal and not masked:
                near = Diagonal(position, tokens.start, windows.recent, tokens.stop)
                part = near.attend(q_here[run], k, v, logits.scale, part or unseen_part(q_here[run]), here)
            else:
                usual = causal or len(tokens) in sizes
                part = _merged(part, _flash(q_here[run], k, v, logits.scale, causal, usual), here)
        if windows.recent:
            assert part is not None
            tokens = range(max(0, windows.raw_from(position - before)), position + n)
            raw = workspace.new_empty(len(tokens) * _numbers(pages))
            k, v = dequantize(pages, row, tokens, raw, new, tokens.start, back=back)
            near = Diagonal(position - before, tokens.start, 0, windows.recent)
            near.attend(q_here[whole], k, v, logits.scale, part, to)
    if logits.sinks is not None and logs is not None:
        weights = LOG2_E.value * logs.unsqueeze(0)
        return merge(outs.unsqueeze(0), weights, value, final, sinks=learned_sinks(pages, q, logits))
    return final if back[1] else inverse(value, outs, final)


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


def _query_runs(
    step: Step, windows: Windows, most: int, library: Library | None
) -> Iterator[tuple[int, int, int, int]]:
    """Runs of up to `most` queries that read unpacked chunks, of as many queries as `library` or cuDNN may take.

    Each is: sequence, number of queries before the run that read none, position of the first query, number of queries.
    """
    for row, (start, length) in enumerate(zip(*step.known, strict=True)):
        position = max(start, windows.packed_from(0))
        before = position - start
        while position < length:
            n = min(most, length - position)
            if library is None:
                n = next((fewer for fewer in range(n, 0, -1) if _masked(fewer, windows.recent)), n)
            yield row, before, position, n
            position, before = position + n, 0


def _masked(n: int, recent: int) -> bool:
    """Whether cuDNN may build a graph with a causal mask for n queries and as many tokens."""
    return n >= CAUSAL_STEP // 2 and any(size % CAUSAL_STEP == 0 for size in (n, n + recent))


def _workspace(pages: LayerPages, device: torch.device, dtype: torch.dtype) -> tuple[int, Tensor]:
    """How many tokens fit into the workspace, a power of two, and the workspace for their keys and values.

    `dtype` is that of the queries.
    """
    token, dtype = _numbers(pages), _operand(device, dtype)
    room = min(MOST_TOKENS, 1 << (WORKSPACE // (token * dtype.itemsize)).bit_length() - 1)
    return room, torch.empty(room * token, dtype=dtype, device=device)


def _operand(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """What flash attention reads and writes, if queries have `dtype`."""
    if device.type == "cpu":
        return torch.float32
    return torch.float16 if dtype == torch.float32 else dtype


def _numbers(pages: LayerPages) -> int:
    """Of the keys and values of a token."""
    return 2 * pages.pool.shape[1] * pages.layout.key.dims


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
    """torch's attention of q [n, q_heads, d] over k, v [1, kv_heads, tokens, d].

    - `causal`: the last query reads all tokens, every other query one token less than the next.
    - `usual`: cuDNN may build a graph for this shape. Without a mask, queries are padded to few numbers.
    """
    n = len(q)
    if usual and not causal and (more := max(FEWEST_QUERIES, power_of_two(n)) - n):
        q = pad(q, (0, 0, 0, 0, 0, more))
    q = q.transpose(0, 1).unsqueeze(0)
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
    _merge_rows[(ceil_div(n * q_heads, rows),)](
        *(one or (None, None)),
        *other,
        *to,
        n * q_heads,
        *(stride for pair in [(0, 0)] * (4 - len(strides)) + strides for stride in pair),
        Q_HEADS=q_heads,
        RATIO=1 if to.mean is None else q_heads // len(to.mean),
        DIMS=dims,
        WIDTH=power_of_two(dims),
        ROWS=rows,
    )
    return Part(to.outs, to.logs)


@triton.jit(do_not_specialize=["rows", "one_log", "one_log_head", "other_log", "other_log_head"])
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
