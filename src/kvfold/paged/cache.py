"""PagedCache: the packed pages of a batch of sequences, for all layers."""

from array import array
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from kvfold.format.codec import UNSTORABLE, Codec
from kvfold.format.layout import PageLayout
from kvfold.format.windows import Windows
from kvfold.ops.dispatch import New, Ops, choose
from kvfold.ops.pages import NO_STEP, HostLengths, LayerPages, Logits, Step
from kvfold.paged.shadows import Shadows
from kvfold.paged.tables import PageTables


class PagedCache:
    """uint8[pages, kv_heads, page_bytes] per layer, one page table for all layers, shadow pages for the windows.

    A step is `extend(counts)`, then `attend(layer, q, k, v)` per layer: it packs the new tokens and lets the queries
    read. What a query reads depends on its position alone. So it does not matter how tokens are split into steps.
    """

    def __init__(
        self,
        codecs: Sequence[tuple[Codec, Codec]],  # keys and values, per layer
        kv_heads: int,
        sequences: int,
        *,
        windows: Windows | None = None,
        page_size: int = 16,
        raw_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        shared: Collection[int] = (),  # layers whose pages other layers read too
    ) -> None:
        self.codecs = list(codecs)
        self.kv_heads, self.shared = kv_heads, shared
        self.new: dict[int, New] = {}  # what `store` returned in the step, by shared layer
        self.device = torch.device(device)
        self.layouts = [PageLayout(key.layout, value.layout, page_size) for key, value in self.codecs]
        self.recipe_windows = windows or Windows()
        self.windows = [layout.windows(self.recipe_windows) for layout in self.layouts]
        self.tables = PageTables(page_size, sequences)
        self.shadow_map = Shadows(max(self.windows, key=lambda windows: (windows.group, windows.recent, windows.sink)))
        self.reserved = 0  # pages per sequence
        self.step = NO_STEP
        self.counts: list[int] = []  # new tokens of the step, per sequence
        self.faults = torch.zeros(0, dtype=torch.uint8, device=self.device)
        self.pools = [layout.allocate(0, kv_heads, self.device) for layout in self.layouts]
        self.shadows = [layout.allocate_shadows(0, kv_heads, raw_dtype, self.device) for layout in self.layouts]
        self._layers = self._views()
        # per layer, by query heads per KV head and whether logits are capped
        self._ops: dict[tuple[int, bool], list[Ops]] = {}

    @property
    def lengths(self) -> list[int]:
        """Tokens per sequence."""
        return self.tables.lengths

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all pages and shadow pages, in use or not."""
        return sum(tensor.untyped_storage().nbytes() for tensor in (*self.pools, *self.shadows))

    def reserve(self, tokens: int) -> None:
        """Make room for sequences of `tokens` tokens. Up to that length, steps of one token each move no memory. A step
        of the same size as the last is written into its tensors, so a CUDA graph of it can be replayed."""
        self.reserved = -(-tokens // self.tables.page_size)
        pages = max(len(windows.pages(tokens - 1, tokens, self.tables.page_size)) for windows in self.windows)
        self._grow(len(self.lengths) * self.reserved, len(self.lengths) * (pages + 1))

    def extend(self, counts: Sequence[int]) -> None:
        """Begin a step: make room for `counts[i]` more tokens in sequence i."""
        starts = list(self.lengths)
        copies = self.tables.extend(counts)
        shadow_copies = [pair for copy in copies if (pair := self.shadow_map.copy(*copy)) is not None]
        self.shadow_map.update(self.tables, starts)
        self._grow(self.tables.capacity, self.shadow_map.capacity)
        for tensors, pairs in ((self.pools, copies), (self.shadows, shadow_copies)):
            for tensor in tensors:
                for source, target in pairs if len(tensor) else ():
                    tensor[target] = tensor[source]
        step = self._describe(starts)
        same = self.reserved and list(counts) == self.counts
        self.step, self.counts = step.placed_in(self.step) if same else step, list(counts)

    def _grow(self, pages: int, shadows: int) -> None:
        """Make room for `pages` pages and `shadows` shadow pages."""
        before = [len(tensor) for tensor in (*self.pools, *self.shadows)]
        self.pools = [_grown(pool, pages) for pool in self.pools]
        self.shadows = [
            _grown(pool, shadows) if windows else pool for pool, windows in zip(self.shadows, self.windows, strict=True)
        ]
        if [len(tensor) for tensor in (*self.pools, *self.shadows)] == before:
            return
        if more := len(self.pools[0]) * self.tables.page_size - len(self.faults):
            self.faults = torch.cat((self.faults, self.faults.new_zeros(more)))
        self._layers = self._views()

    def _views(self) -> list[LayerPages]:
        tensors = zip(self.codecs, self.layouts, self.pools, self.shadows, strict=True)
        return [
            LayerPages.of(codecs, layout, self.recipe_windows, pool, shadows, self.faults)
            for codecs, layout, pool, shadows in tensors
        ]

    def _describe(self, starts: list[int]) -> Step:
        """The step that takes sequences from `starts` to `lengths` tokens. Those without new tokens are not in it."""
        rows = [row for row, (start, length) in enumerate(zip(starts, self.lengths, strict=True)) if length > start]
        held = [self.tables.pages[row] for row in rows]
        table = np.zeros((len(rows), max(self.reserved, *map(len, held), 0)), dtype=np.int64)
        for row, pages in zip(table, held, strict=True):
            row[: len(pages)] = array("q", pages)  # many times faster than from a list
        shadow_of = torch.full((max(self.tables.capacity, len(self.lengths) * self.reserved),), -1)
        if self.shadow_map.of:
            page, shadow = torch.tensor(list(self.shadow_map.of.items())).unbind(dim=1)
            shadow_of[page] = shadow
        host = HostLengths([starts[row] for row in rows], [self.lengths[row] for row in rows])
        return Step.of(host, torch.from_numpy(table), shadow_of.to(self.device), self.tables.page_size)

    def pages(self, layer: int) -> LayerPages:
        """A layer and the current step, as ops take them."""
        return self._layers[layer].during(self.step)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, logits: Logits, out: Tensor | None = None) -> Tensor:
        """Pack a layer's new tokens and attend its queries, float32 or in `out`.

        All are [sequences, n, heads, d]. Outputs have the d of values. If a sequence has fewer than n new tokens, they
        are its last columns. Outputs before them are zero. A token that cannot be stored raises, on a GPU with the last
        layer. Then take the step back by `crop`.
        """
        ops, pages = self._chosen(layer, q, logits), self.pages(layer)

        def run(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
            if layer not in self.shared:
                return ops.store_and_attend(pages, q, k, v, logits, out)
            self.new[layer] = ops.store.run(pages, k, v)
            return ops.attend(pages, q, self.new[layer], logits, out)

        out = self._run(run, (q, k, v), v.shape[-1], out)
        if layer == len(self.layouts) - 1 or self.device.type != "cuda":
            self.check_faults()
        return out

    def read(self, layer: int, q: Tensor, logits: Logits, out: Tensor | None = None) -> Tensor:
        """Let the queries of another layer read what `attend` packed for a shared layer in this step. Queries and
        outputs are as there."""
        ops, pages, new = self._chosen(layer, q, logits), self.pages(layer), self.new[layer]

        def run(q: Tensor, out: Tensor | None = None) -> Tensor:
            return ops.read(pages, q, new, logits, out)

        return self._run(run, (q,), pages.layout.value.dims, out)

    def _chosen(self, layer: int, q: Tensor, logits: Logits) -> Ops:
        kind = q.shape[2] // self.kv_heads, logits.cap is not None
        if kind not in self._ops:
            ratio, cap = kind
            self._ops[kind] = [choose(layout, ratio, self.device, cap=cap) for layout in self.layouts]
        return self._ops[kind][layer]

    def _run(self, run: Callable[..., Tensor], states: Sequence[Tensor], dims: int, out: Tensor | None) -> Tensor:
        """Run an op on the tokens of left-padded states [sequences, n, heads, d]. Outputs have `dims` coordinates."""
        shape = states[0].shape[:3]
        out = torch.empty(*shape, dims, device=self.device) if out is None else out
        if sum(self.counts) == shape[:2].numel():
            run(*(x.flatten(0, 1) for x in states), out.view(-1, *out.shape[2:]))
        else:
            tokens = self.step.once(_index, tuple(self.counts))
            out.zero_()[tokens] = run(*(x[tokens] for x in states)).to(out.dtype)
        return out

    def check_faults(self) -> None:
        """Raise if `store` could not store a token. Does nothing while a CUDA graph is captured."""
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not capturing and self.faults.any():
            self.faults.zero_()
            raise ValueError(UNSTORABLE)

    def check_crop(self, counts: Sequence[int]) -> None:
        """Refuse a `crop` that cannot be done."""
        lengths = [length - count for length, count in zip(self.lengths, counts, strict=True)]
        if min(counts, default=0) < 0 or min(lengths, default=0) < 0:
            raise ValueError(f"cannot remove {list(counts)} tokens from sequences of {self.lengths}")
        self.shadow_map.check_crop(self.tables, lengths)

    def crop(self, counts: Sequence[int]) -> None:
        """Forget the last `counts[i]` tokens of sequence i."""
        self.check_crop(counts)
        self.tables.crop(counts)

    def select(self, rows: Sequence[int]) -> None:
        """Make the batch the sequences `rows` of the old one. A row named twice is forked and shares its pages."""
        self.tables.select(rows)


def _index(step: Step, counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Row and column of every new token in a left-padded batch. Columns count from the right, from -1."""
    places = [(row, column) for row, count in enumerate(counts) for column in range(-count, 0)]
    row, column = torch.tensor(places, dtype=torch.int64).view(-1, 2).to(step.table.device).unbind(dim=1)
    return row, column


def _grown(tensor: Tensor, size: int) -> Tensor:
    """`tensor` with room for at least `size` pages. It grows by at least a sixteenth, so that copies stay rare."""
    if size <= len(tensor):
        return tensor
    grown = tensor.new_empty((max(size, len(tensor) + len(tensor) // 16), *tensor.shape[1:]))
    grown[: len(tensor)] = tensor
    return grown
