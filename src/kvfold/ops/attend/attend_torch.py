"""`attend` in vectorised PyTorch. Chunks of pages are unpacked one after the other. Flash attention runs on each, and
the parts are merged by their log-sum-exp. The context is never unpacked as a whole."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvfold.format.windows import Windows
from kvfold.ops.attend.learned_sinks import sink_part
from kvfold.ops.pages import LayerPages, Logits, Step, require_shadows

CHUNK_TOKENS = 4096  # per chunk, at most
CPU_LOGITS, DEVICE_LOGITS = 2**23, 2**27  # query-token pairs per chunk, at most
UNSEEN = -1e30  # added to logits of tokens that a query does not read; finite, so a row without tokens gives no NaN


def attend(
    pages: LayerPages, q: Tensor, new: tuple[Tensor, Tensor] | None, logits: Logits, out: Tensor | None = None
) -> Tensor:
    """Queries [tokens, q_heads, d] -> outputs [tokens, q_heads, d], float32 or in `out`. Keys and values may differ in
    d.

    `new` is what `store` returned for the same step. Neighbouring sequences with equal numbers of queries form a batch.
    """
    out = torch.empty(*q.shape[:2], pages.layout.value.dims, device=q.device) if out is None else out
    if new is not None:
        pages.step.once(require_shadows, pages.windows)
    for n, tokens, step in pages.step.once(_batches):
        states = [x[tokens].unflatten(0, (-1, n)) for x in (q, *(new or ()))]
        attended = _attend(pages.during(step), states[0], states[1:], logits)
        out[tokens] = attended.flatten(0, 1)
    return out


def _batches(step: Step) -> list[tuple[int, slice, Step]]:
    """Per batch: queries per sequence, their rows, and the step."""
    return step.split(step.known.counts)


def _attend(pages: LayerPages, q: Tensor, new: Sequence[Tensor], logits: Logits) -> Tensor:
    """`attend` for queries [sequences, n, q_heads, d], and new keys and values in the same shape."""
    sequences, n, q_heads, _ = q.shape
    parts = _Parts(pages.key.transform.dual(q).transpose(1, 2), logits)
    if logits.cap is not None and (of_mean := logits.of_mean(pages.key.transform, q)) is not None:
        parts.of_mean = of_mean.transpose(1, 2)
    if logits.sinks is not None:
        out, weight = sink_part(pages, q, logits)
        parts.out, parts.weight = out.transpose(1, 2).contiguous(), weight.transpose(1, 2).unsqueeze(-1).contiguous()
    room = CPU_LOGITS if q.device.type == "cpu" else DEVICE_LOGITS
    tokens = min(CHUNK_TOKENS, max(1, room // (sequences * q_heads * n)))
    for chunk in pages.step.once(_packed_chunks, pages.windows, tokens):
        parts.add(chunk.columns, chunk.mask, *_unpack(pages, chunk))
    if new:
        shadow_sides = pages.shadow_sides
        for window in pages.step.once(_window_chunks, pages.windows, tokens):
            parts.add(window.columns, window.mask, *window.gather(shadow_sides, new))
    return pages.value.transform.inverse(parts.out.transpose(1, 2))


def _unpack(pages: LayerPages, chunk: "_PackedChunk") -> tuple[Tensor, Tensor]:
    """The keys and values [sequences, kv_heads, tokens, d] of a chunk, float32."""
    sequences = len(pages.step.table)
    unpacked: list[Tensor] = []
    tokens = len(chunk.pages) // sequences * pages.step.page_size
    for sides, *both in pages.views:
        # [pages, page_size, kv_heads, sides, …] -> [kv_heads, sides, pages, page_size, …]
        codec = pages.codec(sides)
        codes, meta = (
            torch.cat([view.permute(2, 3, 0, 1, 4).index_select(2, chunk.pages) for view in views], dim=-1)
            for views in both
        )
        if chunk.unwritten is not None:  # unwritten memory may hold NaN
            for array in (codes, meta) if codec.layout.has_raw else (meta,):
                last = array.unflatten(2, (sequences, -1))[:, :, :, -chunk.unwritten.shape[1] :]
                last.masked_fill_(chunk.unwritten[:, :, : array.shape[3]], 0)
        x = codec.dequantize(codes, meta, heads=-5)
        x = x.view(*x.shape[:2], sequences, tokens, x.shape[-1]).narrow(3, 0, chunk.tokens)
        unpacked += x.transpose(0, 2).unbind(1)
    return unpacked[0], unpacked[1]


class _Parts:
    """Attention of queries [sequences, q_heads, n, d], part by part."""

    def __init__(self, queries: Tensor, logits: Logits) -> None:
        self.queries, self.logits = queries, logits
        self.of_mean: Tensor | None = None  # [sequences, q_heads, n]: what logits lack before they are capped
        self.weight: Tensor | None = None  # log-sum-exp so far; None before the first part
        self.out: Tensor

    def add(self, columns: slice, mask: Tensor | None, k: Tensor, v: Tensor) -> None:
        """Add tokens k, v [sequences, kv_heads, tokens, d] for the queries in `columns`; `mask` [sequences, 1, columns,
        tokens] is added to their logits."""
        queries = self.queries
        whole = columns == slice(0, queries.shape[2])
        part, weight = self._attend(queries if whole else queries[:, :, columns], columns, mask, k, v)
        weight = weight.unsqueeze(-1)
        if self.weight is None and whole:
            self.out, self.weight = part, weight
            return
        if self.weight is None:
            self.out = part.new_zeros((*queries.shape[:-1], part.shape[-1]))
            self.weight = part.new_full((*queries.shape[:-1], 1), 2 * UNSEEN)
        out, old = self.out[:, :, columns], self.weight[:, :, columns]
        # the sigmoid is this part's share of both. `lerp_` does not round at 0 and 1: an unseen part changes no bit
        out.lerp_(part, torch.sigmoid(weight - old))
        old.copy_(torch.logaddexp(old, weight))

    def _attend(self, q: Tensor, columns: slice, mask: Tensor | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.logits.cap is None:
            return _flash(q, k, v, mask, self.logits.scale)
        of_mean = None if self.of_mean is None else self.of_mean[:, :, columns]
        return _softmax(q, k, v, mask, self.logits.scale, self.logits.cap, of_mean)


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale·q·kᵀ + mask)·v with q [sequences, q_heads, n, d] and k, v [sequences, kv_heads, tokens, d], and the
    log-sum-exp of the logits."""
    if q.device.type == "cpu" and k.shape == v.shape:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, k, v, attn_mask=mask, scale=scale)
    return _softmax(q, k, v, mask, scale)


def _softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    cap: float | None = None,
    of_mean: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`_flash` by matrix products, with a soft-cap. Queries and heads that read the same keys are the rows of one
    product. `of_mean` [sequences, q_heads, n] is added to logits before they are capped."""
    shape, n = (k.shape[1], -1), q.shape[2]
    logits = (q.unflatten(1, shape).flatten(2, 3) @ k.transpose(-1, -2)).mul_(scale)
    if of_mean is not None:
        logits += of_mean.unflatten(1, shape).flatten(2, 3).unsqueeze(-1)
    if cap is not None:
        logits.div_(cap).tanh_().mul_(cap)
    if mask is not None:
        logits.unflatten(2, (-1, n)).add_(mask.unsqueeze(1))
    out = torch.softmax(logits, dim=-1) @ v
    weight = torch.logsumexp(logits, dim=-1)
    return out.unflatten(2, (-1, n)).flatten(1, 2), weight.unflatten(2, (-1, n)).flatten(1, 2)


@dataclass(frozen=True)
class _PackedChunk:
    pages: Tensor  # int64[sequences · pages]
    tokens: int  # per sequence, from the first page on; no query reads the rest
    columns: slice  # the queries that read any of these tokens
    mask: Tensor | None  # float[sequences, 1, columns, tokens]: 0 or UNSEEN; None: they read all tokens
    unwritten: Tensor | None  # bool[sequences, last pages, page_size, 1]: no packed token of the sequence


def _packed_chunks(step: Step, windows: Windows, chunk_tokens: int) -> list[_PackedChunk]:
    """The tokens that some query of the step reads packed, in chunks of whole pages."""
    device, n, lengths = step.table.device, step.max_queries, step.known.lengths
    longest, shortest = max(lengths), min(lengths)
    end = max(0, windows.raw_from(longest - 1))
    chunk_pages = max(1, chunk_tokens // step.page_size)
    chunks = []
    for page in range(windows.sink // step.page_size, -(-end // step.page_size), chunk_pages):
        table = step.table[:, page : page + chunk_pages]
        start, stop = page * step.page_size, min((page + chunk_pages) * step.page_size, end)
        columns = slice(max(0, windows.packed_from(start) - (longest - n)), n)
        mask = unwritten = None
        if start < windows.sink or stop > windows.raw_from(shortest - n + columns.start):
            tokens = torch.arange(start, stop)
            position = _positions(step)[:, columns].unsqueeze(-1)
            mask = _additive((tokens >= windows.sink) & (tokens < windows.raw_from(position))).to(device)
        written = torch.tensor(lengths) // windows.group * windows.group  # packed tokens per sequence
        if stop > written.min():
            first = max(page, int(written.min()) // step.page_size)
            tokens = torch.arange(first * step.page_size, (page + table.shape[1]) * step.page_size)
            unwritten = (tokens >= written.unsqueeze(1)).view(len(written), -1, step.page_size, 1).to(device)
        chunks.append(_PackedChunk(table.flatten(), stop - start, columns, mask, unwritten))
    return chunks


@dataclass(frozen=True)
class _WindowChunk:
    columns: slice  # the queries that read any of these tokens
    mask: Tensor  # float[sequences, 1, columns, tokens]: 0 or UNSEEN
    column: Tensor  # int64[sequences, tokens]: the token's column in the step, 0 for older tokens
    old: tuple[Tensor, Tensor]  # row and index of tokens older than the step
    shadow: tuple[Tensor, Tensor]  # their shadow page and offset

    def gather(self, shadow_sides: Sequence[Tensor], new: Sequence[Tensor]) -> list[Tensor]:
        """The keys and values [sequences, kv_heads, tokens, d], float32."""
        row = torch.arange(len(self.column), device=self.column.device).unsqueeze(1)
        sides = [side[row, self.column] for side in new]  # [sequences, tokens, kv_heads, d]
        for side, shadows in zip(sides, shadow_sides, strict=True):
            side[self.old] = shadows[self.shadow[0], :, self.shadow[1]]
        return [side.transpose(1, 2).float() for side in sides]


def _window_chunks(step: Step, windows: Windows, chunk_tokens: int) -> list[_WindowChunk]:
    """The tokens that some query of the step reads raw: tokens of the sink, and tokens of recent windows."""
    recent = [
        range(max(windows.sink, windows.raw_from(start)), length if windows.has_recent else 0)
        for start, length in zip(*step.known, strict=True)
    ]
    sink = [range(min(windows.sink, length)) for length in step.known.lengths]
    chunks = []
    for rows, ends in ((sink, None), (recent, windows)):
        tokens = pad_sequence(
            [torch.tensor(row, dtype=torch.int64) for row in rows], batch_first=True, padding_value=-1
        )
        for chunk in tokens.split(chunk_tokens, dim=1):
            if (chunk >= 0).any():
                chunks.append(_window_chunk(step, chunk, ends))
    return chunks


def _window_chunk(step: Step, tokens: Tensor, windows: Windows | None) -> _WindowChunk:
    """The chunk of tokens at these positions [sequences, width] (-1: none). Queries read a token raw from its position
    on. With `windows`, they do so until they read it packed; without, always."""
    device, n, (starts, lengths) = step.table.device, step.max_queries, step.known
    first = int(tokens[tokens >= 0].min()) - (max(lengths) - n)
    last = n if windows is None else windows.packed_from(int(tokens.max())) - (min(lengths) - n)
    columns = slice(max(0, first), max(0, min(n, last)))
    position, token = _positions(step)[:, columns].unsqueeze(-1), tokens.unsqueeze(1)
    mask = (token >= 0) & (token <= position)
    if windows is not None:
        mask &= token >= windows.raw_from(position)
    old = (tokens >= 0) & (tokens < torch.tensor(starts).unsqueeze(1))
    row, place = (index.to(device) for index in torch.nonzero(old, as_tuple=True))
    old_tokens = tokens[old].to(device)
    return _WindowChunk(
        columns,
        _additive(mask).to(device),
        (tokens - torch.tensor(lengths).unsqueeze(1) + n).clamp_min(0).to(device),
        (row, place),
        (step.shadow_of[step.table[row, old_tokens // step.page_size]], old_tokens % step.page_size),
    )


def _positions(step: Step) -> Tensor:
    """int64[sequences, n]: the positions of the queries, in host memory."""
    return torch.tensor(step.known.lengths).unsqueeze(1) - step.max_queries + torch.arange(step.max_queries)


def _additive(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill_(~seen, UNSEEN).unsqueeze(1)
