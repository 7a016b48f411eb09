"""What an op sees: one layer's bytes, and where the tokens of the step lie in them."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvfold.codec import Codec
from kvfold.layout import PageLayout
from kvfold.windows import Windows

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Batch:
    """A step as kernels see it: its tokens one sequence after the other, described in device memory alone, so that a
    captured CUDA graph sees what has changed there since.

    The tokens of sequence r are rows `query_starts[r]` to `query_starts[r + 1]` of k, v and q; the last of them is at
    position `lengths[r] − 1`, the others before it. Those before position `starts[r]` are padding.
    """

    slots: Tensor  # int64[tokens]: page · page_size + offset; negative: padding, not stored
    query_starts: Tensor  # int32[sequences + 1]
    starts: Tensor  # int32[sequences]: tokens before this step
    lengths: Tensor  # int32[sequences]: and with it
    table: Tensor  # int64[sequences, pages]
    shadow_of: Tensor  # int64[pages of the pool]: the shadow of each page, -1 where it has none
    max_queries: int  # tokens of the longest sequence of the step

    def update(self, other: "Batch") -> bool:
        """Become `other` where this one lies, if it is a step of the same sizes; else say no."""
        pairs = [(mine, getattr(other, name)) for name, mine in vars(self).items() if isinstance(mine, Tensor)]
        if any(mine.shape != new.shape for mine, new in pairs):
            return False
        for mine, new in pairs:
            mine.copy_(new)
        return True


@dataclass(frozen=True, eq=False)
class Step:
    """One call's new tokens of a batch of sequences, the same for all layers.

    They come as a left-padded batch [sequences, n, heads, d]: column i of row b is the token at position
    `lengths[b] − n + i`, and is padding where that lies before `starts[b]`.

    Kernels for GPUs also take them one sequence after the other, [1, tokens, heads, d], where there are `ends`. Then n
    is that of the longest.
    """

    n: int
    starts: Sequence[int]  # tokens of each sequence before this step
    lengths: Sequence[int]  # and with it
    page_size: int
    table: Tensor  # int64[sequences, pages of the longest]; rows are padded with page 0
    shadow_of: Tensor  # int64[pages of the pool]: the shadow of each page, -1 where it has none
    ends: Sequence[int] = ()  # the token after the last one of each sequence
    _memory: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def once(self, make: Callable[..., T], *arguments: Hashable) -> T:
        """make(step, *arguments), computed when the first layer asks for it."""
        key = (make, arguments)
        if key not in self._memory:
            self._memory[key] = make(self, *arguments)
        return self._memory[key]

    @property
    def shape(self) -> tuple[int, int]:
        """In which tokens come."""
        return (1, self.ends[-1]) if self.ends else (len(self.lengths), self.n)

    def end(self, row: int) -> int:
        """Where the tokens of a sequence end, of those of `shape`."""
        return self.ends[row] if self.ends else (row + 1) * self.n

    @cached_property
    def positions(self) -> Tensor:
        """int64[sequences, n], in host memory."""
        return torch.tensor(self.lengths).unsqueeze(1) - self.n + torch.arange(self.n)

    @cached_property
    def _new(self) -> tuple[Tensor, Tensor]:
        """Row and column of every new token."""
        row, column = torch.nonzero(self.positions >= torch.tensor(self.starts).unsqueeze(1), as_tuple=True)
        return row.to(self.table.device), column.to(self.table.device)

    @cached_property
    def slots(self) -> tuple[Tensor, Tensor, Tensor]:
        """Page, shadow page (-1: none) and offset in them of every new token."""
        position = self.positions.to(self.table.device)[self._new]
        page = self.table[self._new[0], position // self.page_size]
        return page, self.shadow_of[page], position % self.page_size

    def described(self, batch: Batch) -> "Step":
        """This step, with its description in device memory that stays where it is."""
        vars(self)["batch"] = batch
        return self

    @cached_property
    def batch(self) -> Batch:
        starts, lengths = torch.tensor(self.starts, dtype=torch.int32), torch.tensor(self.lengths, dtype=torch.int32)
        page, _, offset = self.slots
        device = self.table.device
        return Batch(
            self.scatter(page * self.page_size + offset + 1).flatten() - 1,
            torch.arange(len(lengths) + 1, dtype=torch.int32, device=device) * self.n,
            starts.to(device),
            lengths.to(device),
            self.table,
            self.shadow_of,
            self.n,
        )

    @cached_property
    def filled(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row and page of the row of every page that this step fills, and the column [pages, page_size] of each of its
        tokens, negative for those that are older than the step."""
        places = [
            (row, page)
            for row, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True))
            for page in range(start // self.page_size, length // self.page_size)
        ]
        row, page = torch.tensor(places, dtype=torch.int64).view(-1, 2).unbind(dim=1)
        token = page.unsqueeze(1) * self.page_size + torch.arange(self.page_size)
        column = token - torch.tensor(self.lengths)[row].unsqueeze(1) + self.n
        column[token < torch.tensor(self.starts)[row].unsqueeze(1)] = -1
        return row.to(self.table.device), page.to(self.table.device), column.to(self.table.device)

    def gather(self, batch: Tensor) -> Tensor:
        """The new tokens [tokens, heads, d] of a padded batch."""
        return batch.flatten(0, 1) if self._dense else batch[self._new]

    def scatter(self, tokens: Tensor) -> Tensor:
        """The inverse of `gather`, with zeros for padding."""
        if self._dense:
            return tokens.unflatten(0, (len(self.lengths), self.n))
        batch = tokens.new_zeros(len(self.lengths), self.n, *tokens.shape[1:])
        batch[self._new] = tokens
        return batch

    @cached_property
    def _dense(self) -> bool:
        return len(self._new[0]) == len(self.lengths) * self.n


@dataclass(frozen=True)
class LayerPages:
    """One layer of a paged cache during a step."""

    step: Step
    key: Codec
    value: Codec
    layout: PageLayout
    windows: Windows
    pool: Tensor  # uint8[pages, kv_heads, page_bytes]
    sides: list[tuple[slice, Tensor, Tensor]]  # layout.sides(pool): views of it, by token
    shadows: Tensor  # 16-bit float [shadow pages, kv_heads, 2 (K, V), page_size, d]
    faults: Tensor  # uint8[pages · page_size]: 1 where `store` met what cannot be stored

    def codec(self, sides: slice) -> Codec:
        """The codec whose layout these sides (0: keys, 1: values) have."""
        return (self.key, self.value)[sides.start]

    def unpack(self, page: Tensor, offset: Tensor) -> Tensor:
        """What slots decode to, by page and offset int64[tokens]: float32[tokens, kv_heads, 2 (K, V), d]."""
        parts = [
            self.codec(sides).dequantize(codes[page, offset], meta[page, offset % meta.shape[1]])
            for sides, codes, meta in self.sides
        ]
        return torch.cat(parts, dim=2)
