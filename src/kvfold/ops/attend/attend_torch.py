"""`attend` in vectorised PyTorch. Chunks of pages are unpacked one after the other. Flash attention runs on each, and
the parts are merged by their log-sum-exp. The context is never unpacked as a whole."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvfold.format.open_block import packed_from, raw_from
from kvfold.ops.attend.learned_sinks import sink_part
from kvfold.ops.pages import LayerPages, Logits, Step

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
    first_rows = None if new is None else pages.fresh.starts[:-1] - pages.fresh.first  # of token 0, in `new`
    sequence = 0
    for n, tokens, step in pages.step.once(_batches):
        rows = slice(sequence, sequence := sequence + len(step.lengths))
        raw = None if new is None or first_rows is None else (*new, first_rows[rows], pages.fresh.first[rows])
        attended = _attend(pages.during(step), q[tokens].unflatten(0, (-1, n)), raw, logits)
        out[tokens] = attended.flatten(0, 1)
    return out


def _batches(step: Step) -> list[tuple[int, slice, Step]]:
    """Per batch: queries per sequence, their rows, and the step."""
    return step.split(step.known.counts)


Raw = tuple[
    Tensor, Tensor, Tensor, Tensor
]  # what `store` returned; per sequence, the row of token 0 and the first token


def _attend(pages: LayerPages, q: Tensor, raw: Raw | None, logits: Logits) -> Tensor:
    """`attend` for queries [sequences, n, q_heads, d]."""
    sequences, n, q_heads, _ = q.shape
    parts = _Parts(pages.key.transform.dual(q).transpose(1, 2), logits)
    if logits.cap is not None and (of_mean := logits.of_mean(pages.key.transform, q)) is not None:
        parts.of_mean = of_mean.transpose(1, 2)
    if logits.sinks is not None:
        out, weight = sink_part(pages, q, logits)
        parts.out, parts.weight = out.transpose(1, 2).contiguous(), weight.transpose(1, 2).unsqueeze(-1).contiguous()
    room = CPU_LOGITS if q.device.type == "cpu" else DEVICE_LOGITS
    tokens = min(CHUNK_TOKENS, max(1, room // (sequences * q_heads * n)))
    for chunk in pages.step.once(_packed_chunks, pages.block, _group(pages), tokens):
        parts.add(chunk.columns, chunk.mask, *_unpack(pages, chunk))
    if raw is not None:
        for near in pages.step.once(_raw_chunks, pages.block, tokens):
            parts.add(near.columns, near.mask, *_gathered(pages, near, raw))
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
    if chunk.begins and pages.key.first is not None:
        unpacked[0][:, :, 0] += pages.key.first
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
    begins: bool  # whether the first token has position 0
    columns: slice  # the queries that read any of these tokens
    mask: Tensor | None  # float[sequences, 1, columns, tokens]: 0 or UNSEEN; None: they read all tokens
    unwritten: Tensor | None  # bool[sequences, last pages, page_size, 1]: no packed token of the sequence


def _group(pages: LayerPages) -> int:
    """Tokens that are quantized together."""
    return pages.layout.page_size if pages.layout.per_page else 1


def _packed_chunks(step: Step, block: int, group: int, chunk_tokens: int) -> list[_PackedChunk]:
    """The tokens that some query of the step reads packed, in chunks of whole pages."""
    device, n, lengths = step.table.device, step.max_queries, step.known.lengths
    longest, shortest = max(lengths), min(lengths)
    end = raw_from(longest - 1, block)
    chunk_pages = max(1, chunk_tokens // step.page_size)
    chunks = []
    for page in range(0, -(-end // step.page_size), chunk_pages):
        table = step.table[:, page : page + chunk_pages]
        start, stop = page * step.page_size, min((page + chunk_pages) * step.page_size, end)
        columns = slice(max(0, packed_from(start, block) - (longest - n)), n)
        mask = unwritten = None
        if stop > raw_from(shortest - n + columns.start, block):
            position = _positions(step)[:, columns].unsqueeze(-1)
            mask = _additive(torch.arange(start, stop) < raw_from(position, block)).to(device)
        written = torch.tensor(lengths) // group * group  # packed tokens per sequence
        if stop > written.min():
            first = max(page, int(written.min()) // step.page_size)
            tokens = torch.arange(first * step.page_size, (page + table.shape[1]) * step.page_size)
            unwritten = (tokens >= written.unsqueeze(1)).view(len(written), -1, step.page_size, 1).to(device)
        chunks.append(_PackedChunk(table.flatten(), stop - start, page == 0, columns, mask, unwritten))
    return chunks


@dataclass(frozen=True)
class _RawChunk:
    tokens: Tensor  # int64[sequences, width]: positions, -1: none
    columns: slice  # the queries that read any of them
    mask: Tensor  # float[sequences, 1, columns, width]: 0 or UNSEEN


def _raw_chunks(step: Step, block: int, chunk_tokens: int) -> list[_RawChunk]:
    """The tokens that some query of the step reads raw."""
    rows = [torch.arange(raw_from(start, block), length) for start, length in zip(*step.known, strict=True)]
    near = pad_sequence(rows, batch_first=True, padding_value=-1)
    return [_raw_chunk(step, block, tokens) for tokens in near.split(chunk_tokens, dim=1)]


def _raw_chunk(step: Step, block: int, tokens: Tensor) -> _RawChunk:
    n, lengths, device = step.max_queries, step.known.lengths, step.table.device
    first = int(tokens[tokens >= 0].min()) - (max(lengths) - n)
    last = packed_from(int(tokens.max()), block) - (min(lengths) - n)
    columns = slice(max(0, first), max(0, min(n, last)))
    position, token = _positions(step)[:, columns].unsqueeze(-1), tokens.unsqueeze(1)
    seen = (token >= raw_from(position, block)) & (token <= position)
    return _RawChunk(tokens.to(device), columns, _additive(seen).to(device))


def _gathered(pages: LayerPages, chunk: _RawChunk, raw: Raw) -> list[Tensor]:
    """The raw keys and values [sequences, kv_heads, width, d] of a chunk, float32."""
    *fresh, first_rows, first = raw
    token, row = chunk.tokens.clamp_min(0), torch.arange(len(first), device=first.device).unsqueeze(1)
    own = (first_rows.unsqueeze(1) + token).clamp_min(0)
    places = pages.step.in_rings(row, token, pages.ring_tokens)
    older = ((chunk.tokens >= 0) & (token < first.unsqueeze(1)))[..., None, None]
    sides = []
    for x, ring in zip(fresh, pages.ring_sides, strict=True):
        side = torch.where(older, ring[places // pages.ring_tokens, :, places % pages.ring_tokens], x[own])
        sides.append(side.transpose(1, 2).float())  # from [sequences, width, kv_heads, d]
    return sides


def _positions(step: Step) -> Tensor:
    """int64[sequences, n]: the positions of the queries, in host memory."""
    return torch.tensor(step.known.lengths).unsqueeze(1) - step.max_queries + torch.arange(step.max_queries)


def _additive(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill_(~seen, UNSEEN).unsqueeze(1)
