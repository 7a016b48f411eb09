"""What the queries of a step with prompts read, for unpacked_prefill.py: which tokens are unpacked together, and which
queries read which of them.

All of it depends on the lengths of the step's sequences, which the host knows.
"""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from math import gcd
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvfold.format.open_block import packed_from, raw_from
from kvfold.ops.attend.flash_attention_3 import PAGE, Ends, Paged
from kvfold.ops.dequantize_gpu import Span, Tokens
from kvfold.ops.pages import Step, on_device
from kvfold.ops.sizes import ceil_div


class Run(NamedTuple):
    """Successive queries of a sequence."""

    row: int  # the sequence
    query: int  # the row of the first query
    position: int  # of the first query
    n: int

    @property
    def end(self) -> int:
        """Tokens up to the last query."""
        return self.position + self.n

    def page(self, block: int) -> int:
        """The first token of a page. Queries read all tokens before it packed, and some token from it on."""
        return min(self.position, raw_from(self.position, block)) // PAGE * PAGE

    def pieces(self, block: int) -> "list[Run]":
        """Its queries by blocks."""
        borders = range((self.position // block + 1) * block, self.end, block)
        return [
            Run(self.row, self.query + first - self.position, first, end - first)
            for first, end in pairwise([self.position, *borders, self.end])
        ]

    def tokens(self, block: int, library: bool) -> int:
        """How many tokens are unpacked for it together, if they fit."""
        if not block:
            return self.end
        if not library:
            return raw_from(self.end - 1, block) + self.end - raw_from(self.position, block)
        pieces = self.pieces(block)
        return pieces[-1].page(block) + PAGE * sum(piece.pages(block) for piece in pieces)

    def pages(self, block: int) -> int:
        """How many pages end with its raw tokens, if it is a piece."""
        return ceil_div(self.end - self.page(block), PAGE)


class Seen(NamedTuple):
    """Which queries of a run read which tokens, for torch: those at positions from `first` up to, not including,
    `end`."""

    first: Tensor  # int32[tokens]
    end: Tensor  # int32[tokens]
    position: int  # of the first query

    def bias(self, q: Tensor) -> Tensor:
        """What is added to the logits of queries [n, q_heads, d]: [n, tokens] in their dtype."""
        position = torch.arange(self.position, self.position + len(q), dtype=torch.int32, device=q.device).unsqueeze(1)
        hidden = (position < self.first) | (position >= self.end)
        return torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)


class Chunk(NamedTuple):
    """Tokens that are unpacked together, and which queries read which of them."""

    tokens: Tokens
    reach: Ends | Paged | Seen | None  # the last two are for torch; None: every query reads every token


class Read(NamedTuple):
    """Queries whose outputs are found together."""

    queries: slice
    chunks: list[Chunk]


def reads_of(step: Step, block: int, room: int, library: bool) -> tuple[list[Read], int]:
    """How the queries of a step are taken, in a workspace of `room` tokens, and the most tokens that are unpacked
    together. `library`: with FlashAttention 3."""
    reads = [_read(step, block, room, library, runs) for runs in _groups(step, block, room, library)]
    return reads, max(len(chunk.tokens.locations) for read in reads for chunk in read.chunks)


def _groups(step: Step, block: int, room: int, library: bool) -> Iterator[list[Run]]:
    """Runs that are read together: of neighbouring sequences, as long as their tokens fit into the workspace. torch
    reads one run at a time."""
    known, most = step.known, _most_queries(block, room, library)
    group, used = list[Run](), 0
    for row, (start, length, query) in enumerate(zip(*known, known.query_starts[:-1], strict=True)):
        for position in range(start, length, most):
            run = Run(row, query + position - start, position, min(most, length - position))
            tokens = run.tokens(block, library)
            # a run over half the workspace is alone: FlashAttention 3 reads one long sequence faster than several
            alone = not library or 2 * tokens > room
            if group and (alone or used + tokens > room):
                yield group
                group, used = [], 0
            group.append(run)
            used += room if alone else tokens
    yield group


def _most_queries(block: int, room: int, library: bool) -> int:
    """Of a run, so that from their first page on all that they read fits into the workspace. One block always may."""
    if not library:
        return room // 16  # torch's mask takes as much memory as a workspace then
    if not block:
        return room // 2
    own = ceil_div(PAGE - gcd(PAGE, block) + block, PAGE) * PAGE  # tokens in the pages of a piece, at most
    return max(1, (room - own - PAGE) // (block + own)) * block


def _read(step: Step, block: int, room: int, library: bool, runs: list[Run]) -> Read:
    """How runs are read. A run alone may have more tokens than fit: its first ones are read in chunks of their own."""
    device, run, first = step.table.device, runs[0], 0
    chunks = list[Chunk]()
    while len(runs) == 1 and run.tokens(block, library) - first > room and first < run.page(block):
        end = min(first + room, run.page(block))
        queries, tokens = on_device([[0, run.n], [0, end - first]], device)
        reach = Ends(queries, tokens, run.n, end - first, causal=False) if library else None
        chunks.append(Chunk(Tokens.of(step, block, [Span(run.row, range(first, end), end)]), reach))
        first = end
    last = (_paged if block else _whole) if library else _masked
    return Read(slice(run.query, runs[-1].query + runs[-1].n), [*chunks, last(step, block, runs, first)])


def _whole(step: Step, block: int, runs: list[Run], first: int) -> Chunk:
    """Without blocks, for FlashAttention 3: the tokens of runs from `first` on, one run after the other."""
    counts, tokens = [run.n for run in runs], [run.end - first for run in runs]
    ends = on_device([[0, *accumulate(each)] for each in (counts, tokens)], step.table.device)
    spans = [Span(run.row, range(first, run.end), run.end) for run in runs]
    return Chunk(Tokens.of(step, block, spans), Ends(ends[0], ends[1], max(counts), max(tokens), causal=True))


def _paged(step: Step, block: int, runs: list[Run], first: int) -> Chunk:
    """With blocks, for FlashAttention 3: a page table per piece of a run, of the unpacked pages from `first` on and
    then its own pages, which end with its raw tokens."""
    spans, tables, counts, used, begun = list[Span](), list[list[int]](), [0], list[int](), 0
    for run in runs:
        pieces = run.pieces(block)
        last = pieces[-1].page(block)
        spans.append(Span(run.row, range(first, last), last))
        own = begun + (last - first) // PAGE
        for piece in pieces:
            page, held = piece.page(block), piece.pages(block)
            padding = held * PAGE - (piece.end - page)
            spans.append(Span(run.row, range(page, piece.end), raw_from(piece.position, block), padding))
            tables.append([*range(begun, begun + (page - first) // PAGE), *range(own, own + held)])
            counts.append(counts[-1] + piece.n)
            used.append(piece.end - first)
            own += held
        begun = own
    table = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, pages in zip(table, tables, strict=True):
        row[: len(pages)] = pages
    most, device = max(end - first for first, end in pairwise(counts)), step.table.device
    paged = Paged(on_device(counts, device), most, on_device(used, device), max(used), on_device(table, device))
    return Chunk(Tokens.of(step, block, [span for span in spans if span.tokens]), paged)


def _masked(step: Step, block: int, runs: list[Run], first: int) -> Chunk:
    """For torch, of one run: the tokens from `first` on that queries read packed, then those that they read raw."""
    (run,) = runs
    border = raw_from(run.end - 1, block)
    packed, raw = range(first, border), range(raw_from(run.position, block), run.end) if block else range(0)
    padding = -(len(packed) + len(raw)) % 8  # of rows of the mask: they must be aligned
    own = Span(run.row, raw, raw.start, padding) if raw else Span(run.row, packed, border, padding)
    spans = [Span(run.row, packed, border), own] if raw and packed else [own]
    token = np.array([*packed, *raw])
    is_raw, after = np.arange(len(token)) >= len(packed), packed_from(token, block)
    ends = np.stack((np.where(is_raw, token, after), np.where(is_raw, after, run.end)))
    ends = np.pad(ends, ((0, 0), (0, padding)), constant_values=run.end)
    reads, until = on_device(ends, step.table.device)
    return Chunk(Tokens.of(step, block, spans), Seen(reads, until, run.position))
