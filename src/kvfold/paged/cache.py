"""PagedCache: the packed pages of a batch of sequences, for all layers."""

from array import array
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvfold.format.codec import UNSTORABLE, Codec
from kvfold.format.layout import PageLayout
from kvfold.format.open_block import DRAFTED
from kvfold.ops.dispatch import choose
from kvfold.ops.pages import NO_STEP, HostLengths, LayerPages, Logits, Step
from kvfold.paged.layer import Layer
from kvfold.paged.tables import PageTables

ROLLBACK = 64  # the last tokens of a sequence that can always be removed


class PagedCache:
    """uint8[pages, kv_heads, page_bytes] per layer, one page table for all layers, and a ring per sequence.

    A step is `extend(counts)`, then `attend(layer, q, k, v)` per layer: it packs the new tokens and lets the queries
    read. What a query reads depends on its position alone. So it does not matter how tokens are split into steps.
    """

    def __init__(
        self,
        codecs: Sequence[tuple[Codec, Codec]],  # keys and values, per layer
        kv_heads: int,
        sequences: int,
        *,
        ratio: int = 1,  # query heads per KV head
        capped: bool = False,  # whether logits have a soft-cap
        block: int = 0,  # tokens of the open block
        page_size: int = 16,
        raw_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        shared: Collection[int] = (),  # layers whose pages other layers read too
    ) -> None:
        self.codecs = list(codecs)
        self.shared, self.device = shared, torch.device(device)
        self.layouts = [PageLayout(key.layout, value.layout, page_size) for key, value in self.codecs]
        self.ops = [choose(layout, ratio, self.device, cap=capped) for layout in self.layouts]
        self.blocks = [layout.block(block) for layout in self.layouts]
        self.block = max(self.blocks, default=0)
        self.ring_tokens = self.block and self.block + max(ROLLBACK, DRAFTED)
        self.tables = PageTables(page_size, sequences)
        self.ring_table = torch.arange(sequences, device=self.device).view(-1, 1)  # the blocks of rings, per sequence
        self.kept_from = [0] * sequences  # the first token that is still in the ring, per sequence
        self._undo: _Undo | None = None
        self.step = NO_STEP
        self.counts: list[int] = []  # new tokens of the step, per sequence
        self.faults = torch.zeros(0, dtype=torch.uint8, device=self.device)
        self.pools = [layout.allocate(0, kv_heads, self.device) for layout in self.layouts]
        self.rings = [
            layout.allocate_ring(sequences if own else 0, self.ring_tokens, kv_heads, raw_dtype, self.device)
            for layout, own in zip(self.layouts, self.blocks, strict=True)
        ]
        self.layers = self._made()

    @property
    def lengths(self) -> list[int]:
        """Tokens per sequence."""
        return self.tables.lengths

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all pages and rings, in use or not."""
        return sum(tensor.untyped_storage().nbytes() for tensor in (*self.pools, *self.rings))

    def extend(self, counts: Sequence[int]) -> None:
        """Begin a step: make room for `counts[i]` more tokens in sequence i."""
        starts = list(self.lengths)
        copies = self.tables.extend(counts)
        self._undo = None
        if self.block and max(counts, default=0) > DRAFTED and any(start % self.block for start in starts):
            self._undo = _Undo(starts, self.kept_from, [ring.clone() for ring in self.rings])
        self.kept_from = [
            max(first, length - self.ring_tokens) for first, length in zip(self.kept_from, self.lengths, strict=True)
        ]
        self._grow(self.tables.capacity)
        for pool in self.pools:
            for source, target in copies:
                pool[target] = pool[source]
        self.step, self.counts = self._describe(starts), list(counts)

    def _grow(self, pages: int) -> None:
        """Make room for `pages` pages."""
        if pages <= len(self.pools[0]):
            return
        self.pools = [_grown(pool, pages) for pool in self.pools]
        self.faults = _grown(self.faults, len(self.pools[0]) * self.tables.page_size, fill=0)
        self.layers = self._made()

    def _made(self) -> list[Layer]:
        """The layers over the tensors that there are now."""
        tensors = zip(self.codecs, self.layouts, self.blocks, self.pools, self.rings, strict=True)
        return [
            Layer(LayerPages.of(*own, self.faults), self.ops[layer], layer in self.shared)
            for layer, own in enumerate(tensors)
        ]

    def _describe(self, starts: list[int]) -> Step:
        """The step that takes sequences from `starts` to `lengths` tokens. Those without new tokens are not in it."""
        rows = [row for row, (start, length) in enumerate(zip(starts, self.lengths, strict=True)) if length > start]
        held = [self.tables.pages[row] for row in rows]
        table = np.zeros((len(rows), max(map(len, held), default=0)), dtype=np.int64)
        for row, pages in zip(table, held, strict=True):
            row[: len(pages)] = array("q", pages)  # many times faster than from a list
        host = HostLengths([starts[row] for row in rows], [self.lengths[row] for row in rows])
        return Step.of(host, torch.from_numpy(table), self.ring_table[rows], self.tables.page_size)

    def pages(self, layer: int) -> LayerPages:
        """A layer and the current step, as ops take them."""
        return self.layers[layer].pages.during(self.step)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, logits: Logits, out: Tensor | None = None) -> Tensor:
        """Pack a layer's new tokens and attend its queries, float32 or in `out`.

        All are [sequences, n, heads, d]. Outputs have the d of values. If a sequence has fewer than n new tokens, they
        are its last columns. Outputs before them are zero. A token that cannot be stored raises, on a GPU with the last
        layer. Then take the step back by `crop`.
        """
        out = self._run(Layer.attend, layer, (q, k, v), logits, out)
        if layer == len(self.layers) - 1 or self.device.type != "cuda":
            self.check_faults()
        return out

    def read(self, layer: int, q: Tensor, logits: Logits, out: Tensor | None = None) -> Tensor:
        """Let the queries of another layer read what `attend` packed for a shared layer in this step. Queries and
        outputs are as there."""
        return self._run(Layer.read, layer, (q,), logits, out)

    def _run(
        self, op: Callable[..., None], layer: int, states: Sequence[Tensor], logits: Logits, out: Tensor | None
    ) -> Tensor:
        """Run an op of a layer on the tokens of left-padded states [sequences, n, heads, d]."""
        own, steps, (*columns, _) = self.layers[layer], [(slice(None), self.step)], states[0].shape
        dims = self.layouts[layer].value.dims
        out = torch.empty(*columns, dims, device=self.device) if out is None else out
        if sum(self.counts) == columns[0] * columns[1]:
            op(own, steps, *(x.flatten(0, 1) for x in states), logits, out.view(-1, *out.shape[2:]))
        else:
            tokens = self.step.once(_index, tuple(self.counts))
            found = torch.empty(sum(self.counts), columns[2], dims, device=self.device)
            op(own, steps, *(x[tokens] for x in states), logits, found)
            out.zero_()[tokens] = found.to(out.dtype)
        return out

    def check_faults(self) -> None:
        """Raise if `store` could not store a token."""
        if self.faults.any():
            self.faults.zero_()
            raise ValueError(UNSTORABLE)

    def check_crop(self, counts: Sequence[int]) -> None:
        """Refuse a `crop` that cannot be done."""
        lengths = [length - count for length, count in zip(self.lengths, counts, strict=True)]
        if min(counts, default=0) < 0 or min(lengths, default=0) < 0:
            raise ValueError(f"cannot remove {list(counts)} tokens from sequences of {self.lengths}")
        for row, length in enumerate(lengths):
            if not self._holds(length, self.kept_from[row]) and not self._undoes(row, length):
                raise ValueError(
                    f"cannot roll back to {length} tokens: with block={self.block} at most the last {ROLLBACK} tokens, "
                    f"the last step, or all back to a multiple of {self.block} can be removed. Feed the prefix again, "
                    "or use a recipe with block=0"
                )

    def _holds(self, length: int, kept_from: int) -> bool:
        """Whether a ring that holds the tokens from `kept_from` on has the open block of a sequence of this length."""
        return not self.block or length % self.block == 0 or length // self.block * self.block >= kept_from

    def _undoes(self, row: int, length: int) -> bool:
        """Whether the open block of this length is in the rings as they were before the last step."""
        undo = self._undo
        return undo is not None and length <= undo.starts[row] and self._holds(length, undo.kept_from[row])

    def crop(self, counts: Sequence[int]) -> None:
        """Forget the last `counts[i]` tokens of sequence i."""
        self.check_crop(counts)
        self.tables.crop(counts)
        for row, length in enumerate(self.lengths):
            if self._undo is not None and not self._holds(length, self.kept_from[row]):
                self.kept_from[row] = self._undo.kept_from[row]
                for ring, before in zip(self.rings, self._undo.rings, strict=True):
                    if len(ring):
                        ring[self.ring_table[row]] = before[self.ring_table[row]]
            if self.block:
                self.kept_from[row] = min(self.kept_from[row], length // self.block * self.block)

    def select(self, rows: Sequence[int]) -> None:
        """Make the batch the sequences `rows` of the old one. A row named twice is forked and shares its pages."""
        self.tables.select(rows)
        self.kept_from = [self.kept_from[row] for row in rows]
        self._undo = None
        blocks = self.ring_table[list(rows)]
        self.rings = [ring[blocks.flatten()] if len(ring) else ring for ring in self.rings]
        self.ring_table = torch.arange(blocks.numel(), device=self.device).view_as(blocks)
        self.layers = self._made()


class _Undo(NamedTuple):
    """The rings before a step that may have overwritten open blocks, so that the whole step can be taken back."""

    starts: list[int]
    kept_from: list[int]
    rings: list[Tensor]


def _index(step: Step, counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Row and column of every new token in a left-padded batch. Columns count from the right, from -1."""
    places = [(row, column) for row, count in enumerate(counts) for column in range(-count, 0)]
    row, column = torch.tensor(places, dtype=torch.int64).view(-1, 2).to(step.table.device).unbind(dim=1)
    return row, column


def _grown(tensor: Tensor, size: int, fill: int | None = None) -> Tensor:
    """`tensor` with room for at least `size` rows. It grows by at least a sixteenth, so that copies stay rare."""
    grown = tensor.new_empty((max(size, len(tensor) + len(tensor) // 16), *tensor.shape[1:]))
    grown[: len(tensor)] = tensor
    if fill is not None:
        grown[len(tensor) :] = fill
    return grown
