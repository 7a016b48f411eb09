"""PagedCache: packed pages of all layers of a batch of sequences."""

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvfold.codec import UNSTORABLE, Codec
from kvfold.layout import PageLayout
from kvfold.ops.dispatch import choose
from kvfold.ops.pages import LayerPages, Step
from kvfold.paged.shadows import Shadows
from kvfold.paged.tables import PageTables
from kvfold.windows import Windows


class PagedCache:
    """uint8[pages, kv_heads, page_bytes] per layer, one page table for all layers, 16-bit shadows for the windows.

    A step is `extend(counts)`, then `attend(layer, q, k, v)` for every layer: it packs the new tokens and lets the
    queries read. What a query reads depends on its position alone, so that the size of steps changes nothing.
    """

    def __init__(
        self,
        codecs: Sequence[tuple[Codec, Codec]],  # keys and values of each layer
        kv_heads: int,
        sequences: int,
        *,
        windows: Windows | None = None,
        page_size: int = 16,
        wide: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        self.codecs = list(codecs)
        self.kv_heads = kv_heads
        self.device = torch.device(device)
        self.layouts = [PageLayout(key.layout, value.layout, page_size) for key, value in self.codecs]
        windows = windows or Windows()
        self.windows = [layout.windows(windows) for layout in self.layouts]
        self.tables = PageTables(page_size, sequences)
        self.shadow_map = Shadows(max(self.windows, key=lambda windows: (windows.group, windows.recent, windows.sink)))
        self.reserved = 0  # pages of each sequence
        self.step = self._describe(self.lengths, 0)
        self.faults = torch.zeros(0, dtype=torch.uint8, device=self.device)
        self.pools = [layout.allocate(0, kv_heads, self.device) for layout in self.layouts]
        self._sides = self._views()
        self.shadows = [
            torch.empty(0, kv_heads, 2, page_size, layout.key.dims, dtype=wide, device=self.device)
            for layout in self.layouts
        ]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return self.tables.lengths

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all pages and shadow pages, in use or not."""
        return sum(tensor.untyped_storage().nbytes() for tensor in (*self.pools, *self.shadows))

    def reserve(self, tokens: int) -> None:
        """Make room for sequences of `tokens` tokens. Steps of one token each up to there move no memory, and a step
        that brings as many tokens as the last describes itself where that did: a CUDA graph of it can be replayed."""
        self.reserved = -(-tokens // self.tables.page_size)
        self._grow(len(self.lengths) * self.reserved)
        pages = max(len(windows.pages(tokens - 1, tokens, self.tables.page_size)) for windows in self.windows)
        self.shadows = [
            _grown(shadows, len(self.lengths) * (pages + 1)) if windows else shadows
            for shadows, windows in zip(self.shadows, self.windows, strict=True)
        ]

    def extend(self, counts: Sequence[int]) -> None:
        """Begin a step: make room for `counts[i]` more tokens in sequence i."""
        starts = list(self.lengths)
        copies = self.tables.extend(counts)
        shadow_copies = [pair for copy in copies if (pair := self.shadow_map.copy(*copy)) is not None]
        self.shadow_map.update(self.tables, starts)
        self._grow(self.tables.capacity)
        self.shadows = [
            _grown(shadows, self.shadow_map.capacity) if windows else shadows
            for shadows, windows in zip(self.shadows, self.windows, strict=True)
        ]
        for tensors, pairs in ((self.pools, copies), (self.shadows, shadow_copies)):
            for tensor in tensors:
                for source, target in pairs if len(tensor) else ():
                    tensor[target] = tensor[source]
        last, self.step = self.step, self._describe(starts, max(counts, default=0))
        if self.reserved and "batch" in vars(last) and last.n == self.step.n and last.batch.update(self.step.batch):
            self.step.described(last.batch)

    def _grow(self, pages: int) -> None:
        """Make room for so many pages."""
        if pages <= len(self.pools[0]):
            return
        self.pools = [_grown(pool, pages) for pool in self.pools]
        self._sides = self._views()
        more = len(self.pools[0]) * self.tables.page_size - len(self.faults)
        self.faults = torch.cat((self.faults, self.faults.new_zeros(more)))

    def _views(self) -> list[list[tuple[slice, Tensor, Tensor]]]:
        return [
            layout.sides(pool, together=key.quantizes_like(value))
            for layout, pool, (key, value) in zip(self.layouts, self.pools, self.codecs, strict=True)
        ]

    def _describe(self, starts: list[int], n: int) -> Step:
        width = max(self.reserved, *map(len, self.tables.pages)) if self.tables.pages else 0
        table = np.zeros((len(self.tables.pages), width), dtype=np.int64)
        for row, held in zip(table, self.tables.pages, strict=True):
            row[: len(held)] = array("q", held)  # many times faster than a list
        shadow_of = torch.full((max(self.tables.capacity, len(self.lengths) * self.reserved),), -1)
        if self.shadow_map.of:
            pages, shadows = torch.tensor(list(self.shadow_map.of.items())).unbind(dim=1)
            shadow_of[pages] = shadows
        return Step(
            n,
            starts,
            list(self.lengths),
            self.tables.page_size,
            torch.from_numpy(table).to(self.device),
            shadow_of.to(self.device),
        )

    def pages(self, layer: int) -> LayerPages:
        """What ops see of a layer."""
        return LayerPages(
            self.step,
            *self.codecs[layer],
            self.layouts[layer],
            self.windows[layer],
            self.pools[layer],
            self._sides[layer],
            self.shadows[layer],
            self.faults,
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
        """Pack the step's new tokens of a layer and attend its queries, float32 or in `out`.

        All are [sequences, n, heads, d] with n the largest of the step's counts, left-padded where a count is smaller.
        What cannot be stored raises, on a GPU with the last layer: then the step is to be taken back by `crop`.
        """
        pages, ops = self.pages(layer), choose(self.layouts[layer], q.shape[2] // self.kv_heads, self.device)
        out = ops.step(pages, q, k, v, scale, out)
        if layer == len(self.layouts) - 1 or self.device.type != "cuda":
            self.check_faults()
        return out

    def check_faults(self) -> None:
        """Raise where `store` met what cannot be stored; not while a CUDA graph is captured."""
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not capturing and self.faults.any():
            self.faults.zero_()
            raise ValueError(UNSTORABLE)

    def crop(self, counts: Sequence[int]) -> None:
        """Forget the last `counts[i]` tokens of sequence i."""
        lengths = [length - count for length, count in zip(self.lengths, counts, strict=True)]
        if min(counts, default=0) < 0 or min(lengths, default=0) < 0:
            raise ValueError(f"cannot remove {list(counts)} tokens from sequences of {self.lengths}")
        self.shadow_map.check_crop(self.tables, lengths)
        self.tables.crop(counts)

    def select(self, rows: Sequence[int]) -> None:
        """Make the batch sequences `rows` of the old one; a row named twice is forked, its pages shared."""
        self.tables.select(rows)


def _grown(tensor: Tensor, size: int) -> Tensor:
    """`tensor` with room for at least `size` pages; small growth takes a sixteenth more, so that copies stay rare."""
    if size <= len(tensor):
        return tensor
    grown = tensor.new_empty((max(size, len(tensor) + len(tensor) // 16), *tensor.shape[1:]))
    grown[: len(tensor)] = tensor
    return grown
