"""`attend` for many queries per sequence, over unpacked chunks of the context.

Packed tokens are unpacked in chunks of bounded size. The fastest attention that torch has runs on each chunk, and the
parts are merged by log-sum-exp. `window_kernel` reads windows.

Queries are taken in runs (`_query_runs`). A chunk that all queries of a run read needs no mask: cuDNN computes it if it
can. In the last chunk, each query reads one token more than the query before it, and the last query reads all.
FlashAttention has this causal mask. cuDNN has it only where the first query reads a single token.
"""

from collections.abc import Iterator
from dataclasses import replace
from enum import Enum

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
from kvfold.ops.attend import window_kernel
from kvfold.ops.attend.parts import LOG2_E, UNSEEN, learned_sinks, merge
from kvfold.ops.dequantize_gpu import dequantize
from kvfold.ops.pages import LayerPages, Logits, Step
from kvfold.ops.rotate import dual, inverse
from kvfold.ops.sizes import ceil_div, power_of_two

WORKSPACE = 2**26  # bytes of unpacked keys and values, at most
OPERANDS = {"cpu": torch.float32, "cuda": torch.float16}  # also the dtype of outputs: bfloat16 is too coarse
# Per sequence: queries that read packed tokens, and packed tokens. With fewer, the portable kernel is faster.
MIN_QUERIES, MIN_TOKENS = 64, 1024
# cuDNN builds a graph for every shape, which takes a tenth of a second and more. So there are few shapes, and a server
# builds all graphs before its first prompt (`build_graphs`). Queries are padded to FEWEST_QUERIES or a higher power of
# two. From CAUSAL_QUERIES on, their number is a power of two itself, and cuDNN's mask is used. Chunks are as large as
# the workspace, a quarter of it, or a sixteenth.
FEWEST_QUERIES, CAUSAL_QUERIES = 256, 2048
CHUNK_RATIO, CHUNK_SIZES = 4, 3

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
    pages: LayerPages, q: Tensor, new: tuple[Tensor, Tensor] | None, logits: Logits, out: Tensor | None = None
) -> Tensor:
    """Queries [tokens, q_heads, d] -> outputs of the same shape, float32 or in `out`.

    `new` is what `store` returned for the same step. Neighbouring sequences of one kind are taken together. If only the
    device knows their lengths, they are requests that decode with drafts, which have few queries.
    """
    if pages.step.host is None:
        return portable.attend(pages, q, new, logits, out)
    kinds = pages.step.once(_kinds, pages.windows)
    if len(set(kinds)) < 2:
        return (_attend if Kind.LONG in kinds else portable.attend)(pages, q, new, logits, out)
    out = torch.empty(q.shape, device=q.device) if out is None else out
    for kind, tokens, part in pages.step.once(_runs, pages.windows):
        own = None if new is None else (new[0][tokens], new[1][tokens])
        run = _attend if kind == Kind.LONG else portable.attend
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


def build_graphs(pages: LayerPages, ratio: int) -> None:
    """Let cuDNN build its graphs for layers like this one, with `ratio` query heads per KV head."""
    (kv_heads, dims), device = (pages.pool.shape[1], pages.layout.key.dims), pages.pool.device
    room, workspace = _workspace(pages, device)
    n = FEWEST_QUERIES
    while n <= room // 2:
        queries = torch.zeros(n, kv_heads * ratio, dims, dtype=workspace.dtype, device=device)
        shapes = [(size, False) for size in _sizes(room)] + [(n, True)] * (n >= CAUSAL_QUERIES)
        for tokens, causal in shapes:
            k, v = workspace[: 2 * kv_heads * tokens * dims].view(2, 1, kv_heads, tokens, dims)
            _flash(queries.transpose(0, 1).unsqueeze(0), k, v, dims**-0.5, causal, usual=True)
        n *= 2


def _attend(
    pages: LayerPages, q: Tensor, new: tuple[Tensor, Tensor] | None, logits: Logits, out: Tensor | None = None
) -> Tensor:
    """`attend` for a step of LONG sequences."""
    step, windows, value = pages.step, pages.windows, pages.value.transform
    room, workspace = _workspace(pages, q.device)
    rotated = dual(pages.key.transform, q, workspace.dtype)
    final = torch.empty(rotated.shape, device=q.device) if out is None else out
    outs = torch.empty(rotated.shape, device=q.device)
    weights = torch.full(rotated.shape[:2], UNSEEN.value, device=q.device)  # logarithms to base 2
    # the last chunk of a run writes to `final`
    direct = new is None and value.rotation is None and logits.sinks is None
    if new is not None:
        window_kernel.attend(pages, rotated, new, logits, outs.unsqueeze(0), weights.unsqueeze(0))
    query_starts = step.known.query_starts
    for row, position, n in _query_runs(step, windows, room // 2):
        first = query_starts[row] + position - step.known.starts[row]
        run = slice(first, first + n)
        queries = rotated[run].to(workspace.dtype)
        if more := max(FEWEST_QUERIES, power_of_two(n)) - n:
            queries = pad(queries, (0, 0, 0, 0, 0, more))
        queries = queries.transpose(0, 1).unsqueeze(0)
        end = windows.raw_from(position + n - 1)
        chunks = _chunks(windows.sink, windows.raw_from(position) - 1, end, room)
        for i, (tokens, causal) in enumerate(chunks):
            k, v = dequantize(pages, row, tokens, workspace)
            usual = len(tokens) == n >= CAUSAL_QUERIES if causal else len(tokens) in _sizes(room)
            part = _flash(queries[:, :, :n] if causal else queries, k, v, logits.scale, causal, usual)
            only, last = new is None and not i, direct and causal
            _merge(outs[run], weights[run], *part, only, final[run] if last else None, value.mean)
    if logits.sinks is not None:
        return merge(outs.unsqueeze(0), weights.unsqueeze(0), value, final, sinks=learned_sinks(pages, q, logits))
    return final if direct else inverse(value, outs, final)


def _query_runs(step: Step, windows: Windows, most: int) -> Iterator[tuple[int, int, int]]:
    """Runs of up to `most` queries that read packed tokens: sequence, position of the first query, number of queries.

    Above CAUSAL_QUERIES, cuDNN has a graph for the number.
    """
    for row, length in enumerate(step.known.lengths):
        position = _first(step, windows, row)
        while position < length:
            n = min(most, length - position)
            n = 1 << n.bit_length() - 1 if n > CAUSAL_QUERIES else n
            yield row, position, n
            position += n


def _workspace(pages: LayerPages, device: torch.device) -> tuple[int, Tensor]:
    """How many tokens fit into the workspace, a power of two, and the workspace for their keys and values."""
    token, dtype = 2 * pages.pool.shape[1] * pages.layout.key.dims, OPERANDS[device.type]
    room = 1 << (WORKSPACE // (token * dtype.itemsize)).bit_length() - 1
    return room, torch.empty(room * token, dtype=dtype, device=device)


def _chunks(start: int, shared: int, end: int, room: int) -> Iterator[tuple[range, bool]]:
    """Chunks of the tokens from `start` to `end`, and whether a chunk needs the causal mask. Only the last one does.

    All queries read the tokens before `shared`.
    """
    for size in _sizes(room):
        while shared - start >= size:
            yield range(start, start + size), False
            start += size
    if start < shared and not (end - shared) % CAUSAL_QUERIES:
        yield range(start, shared), False
        start = shared
    yield range(start, end), True


def _sizes(room: int) -> list[int]:
    """The sizes of chunks without a mask. Only the last of these chunks may have another size."""
    return [size for i in range(CHUNK_SIZES) if (size := room // CHUNK_RATIO**i)]


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, usual: bool) -> tuple[Tensor, Tensor]:
    """Attention of q [1, q_heads, n, d] over k, v [1, kv_heads, tokens, d], and the log-sum-exp [1, q_heads, n, …] of
    its logits.

    - `causal`: the last query reads all tokens, every other query one token less than the next.
    - `usual`: cuDNN may build a graph for this shape.
    """
    if not q.is_cuda:
        mask = q.new_full((q.shape[2], k.shape[2]), -torch.inf).triu_(k.shape[2] - q.shape[2] + 1) if causal else None
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
    if usual and _cudnn_can(SDPAParams(q, k, v, None, 0.0, causal, True)):
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
    return aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal, scale=scale)[:2]


def _cudnn_can(parameters: SDPAParams) -> bool:
    """Whether cuDNN can compute this, even where PyTorch may not choose it by itself, as in vLLM's processes."""
    allowed = cudnn_sdp_enabled()
    enable_cudnn_sdp(True)
    try:
        return can_use_cudnn_attention(parameters)
    finally:
        enable_cudnn_sdp(allowed)


def _merge(
    outs: Tensor,
    weights: Tensor,
    part: Tensor,
    log_sum: Tensor,
    first: bool = False,
    to: Tensor | None = None,
    mean: Tensor | None = None,
) -> None:
    """Merge a part [1, q_heads, n or more, d] into outs [n, q_heads, d] with `weights`. The `first` part replaces them.

    With `to`, the result goes there instead, plus the mean of the KV head.
    """
    n, q_heads, dims = outs.shape
    rows = 16
    _merge_rows[(ceil_div(n * q_heads, rows),)](
        outs,
        weights,
        part,
        log_sum,
        to,
        mean,
        n * q_heads,
        *part.stride()[1:3],
        *log_sum.stride()[1:3],
        Q_HEADS=q_heads,
        RATIO=1 if mean is None else q_heads // len(mean),
        DIMS=dims,
        WIDTH=power_of_two(dims),
        ROWS=rows,
        FIRST=first,
    )


@triton.jit(do_not_specialize=["rows", "log_sum_head", "log_sum_query"], do_not_specialize_on_alignment=["weights"])
def _merge_rows(
    outs, weights, part, log_sum, to, mean, rows, part_head, part_query, log_sum_head, log_sum_query,
    Q_HEADS: tl.constexpr, RATIO: tl.constexpr, DIMS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    row, coordinate = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    query, head = row // Q_HEADS, row % Q_HEADS
    mask = (row < rows)[:, None] & (coordinate < DIMS)[None, :]
    weight = LOG2_E * tl.load(log_sum + head * log_sum_head + query * log_sum_query, mask=row < rows, other=0.0)
    added = part + (head * part_head + query * part_query)[:, None] + coordinate[None, :]
    out = tl.load(added, mask=mask, other=0.0).to(tl.float32)
    place = (row * DIMS)[:, None] + coordinate[None, :]
    if not FIRST:
        old = tl.load(weights + row, mask=row < rows, other=0.0)
        x = tl.load(outs + place, mask=mask, other=0.0)
        out = x + (out - x) * (1 / (1 + tl.exp2(old - weight)))[:, None]
        weight = tl.maximum(old, weight) + tl.log2(1 + tl.exp2(-tl.abs(old - weight)))
    if to is None:
        tl.store(outs + place, out, mask=mask)
        tl.store(weights + row, weight, mask=row < rows)
    else:
        if mean is not None:
            out += tl.load(mean + (head // RATIO * DIMS)[:, None] + coordinate[None, :], mask=mask, other=0.0)
        tl.store(to + place, out, mask=mask)
