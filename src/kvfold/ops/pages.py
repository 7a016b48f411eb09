"""What an op gets: the bytes of one layer, and where the tokens of the step lie in them."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby
from operator import sub
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from kvfold.format.codec import Codec
from kvfold.format.layout import PageLayout, Views
from kvfold.format.windows import Windows
from kvfold.once import Once
from kvfold.transforms import Transform


def on_device(
    numbers: Sequence[Any] | np.ndarray | Tensor, device: torch.device, dtype: torch.dtype = torch.int32
) -> Tensor:
    """Integers that the host knows. The host does not wait for the device."""
    known = torch.as_tensor(numbers, dtype=dtype, device="cpu")
    return known.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else known


class Logits(NamedTuple):
    """How products of queries and keys become the logits of softmax, and which logits learned sinks add.

    A soft-cap bounds logits, those of sinks excepted: x becomes cap·tanh(x / cap). A learned sink is one more logit of
    a query head. Its value is zero, before values are centred.
    """

    scale: float
    cap: float | None = None
    sinks: Tensor | None = None  # float32[q_heads]

    def of_mean(self, key: Transform, q: Tensor) -> Tensor | None:
        """scale·q·mean for queries [..., q_heads, d]: what centring takes from all logits of a query. float32[...,
        q_heads]; None without a mean."""
        if key.mean is None:
            return None
        grouped = q.float().unflatten(-2, (len(key.mean), -1))
        return self.scale * (grouped * key.mean.unsqueeze(1)).sum(dim=-1).flatten(-2)


class HostLengths(NamedTuple):
    """Tokens per sequence before a step and with it, as the host knows them."""

    starts: list[int]
    lengths: list[int]

    @property
    def counts(self) -> list[int]:
        """New tokens per sequence."""
        return list(map(sub, self.lengths, self.starts))

    @property
    def query_starts(self) -> list[int]:
        """The row of each sequence's first new token in q, k and v, and the number of rows."""
        return [0, *accumulate(self.counts)]


@dataclass(frozen=True, eq=False)
class Step(Once):
    """The new tokens of a batch of sequences in one call of the model, for all layers that share a page table.

    q, k and v [tokens, heads, d] hold one sequence after the other, without padding. The tokens of sequence r are rows
    `query_starts[r]` to `query_starts[r + 1]`. The last of them has position `lengths[r] − 1`.

    Kernels read all of it from device memory, so a captured CUDA graph sees changes. `host` repeats the lengths if the
    host knows them. It is None for steps in which an engine decodes on a GPU.

    Shadows: `shadow_of` says which shadow page holds the raw keys and values of a page. If a window of the step reaches
    into older tokens of a page, that page has a shadow. Whoever begins the step ensures this. Ops read the step's own
    tokens from the result of `store` instead. A missing shadow is a bug in the bookkeeping:
    - ops in PyTorch and for CPUs raise (`require_shadows`);
    - kernels for GPUs assert if Triton's assertions are on (TRITON_DEBUG=1, and in tests), else they leave the token
      out.

    A token with a negative location is padding of a CUDA graph. It is not stored, and its output means nothing.
    """

    locations: Tensor  # int64[tokens]: page · page_size + offset
    query_starts: Tensor  # int32[sequences + 1]
    starts: Tensor  # int32[sequences]: tokens before this step
    lengths: Tensor  # int32[sequences]: tokens with this step
    table: Tensor  # int64[sequences, pages]; rows are padded with page 0
    shadow_of: Tensor  # int64[pages of the pool]: the shadow of a page, -1: none
    page_size: int
    max_queries: int  # the most new tokens of any sequence
    host: HostLengths | None = None
    _memory: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, host: HostLengths, table: Tensor, shadow_of: Tensor, page_size: int) -> Self:
        """The step of sequences whose lengths and page table [sequences, pages] are on the host. Its tensors go to the
        device of `shadow_of`."""
        counts = host.counts
        starts, lengths = (torch.tensor(numbers, dtype=torch.int32) for numbers in host)
        # not torch.repeat_interleave: it wakes all threads, for milliseconds, however short the tensors are
        row = torch.from_numpy(np.repeat(np.arange(len(counts)), np.array(counts, dtype=np.int64)))
        query_starts = torch.tensor(host.query_starts, dtype=torch.int32)
        position = torch.arange(len(row)) - query_starts[row] + starts[row]
        locations = table[row, position // page_size] * page_size + position % page_size
        device = shadow_of.device
        return cls(
            locations.to(device),
            query_starts.to(device),
            starts.to(device),
            lengths.to(device),
            table.to(device),
            shadow_of,
            page_size,
            max(counts, default=0),
            host,
        )

    @property
    def known(self) -> HostLengths:
        """`host`, for ops that need it."""
        assert self.host is not None, "this op needs lengths on the host"
        return self.host

    def placed_in(self, last: "Step") -> "Step":
        """This step, copied into the tensors of `last` if all sizes agree: a captured CUDA graph reads it there."""
        pairs = [(old, getattr(self, name)) for name, old in vars(last).items() if isinstance(old, Tensor)]
        if last.max_queries != self.max_queries or any(old.shape != new.shape for old, new in pairs):
            return self
        for old, new in pairs:
            old.copy_(new)
        return replace(last, host=self.host)

    def split(self, keys: Iterable[Hashable]) -> list[tuple[Any, slice, "Step"]]:
        """One step per group of neighbouring sequences with equal keys: key, rows of q, k and v, step. A group without
        new tokens gives no step."""
        parts: list[tuple[Any, slice, Step]] = []
        row = token = 0
        for key, group in groupby(keys):
            rows = slice(row, row := row + len(list(group)))
            host = HostLengths(self.known.starts[rows], self.known.lengths[rows])
            tokens = slice(token, token := token + sum(host.counts))
            query_starts = self.query_starts[rows.start : rows.stop + 1]
            if longest := max(host.counts):
                part = replace(
                    self,
                    locations=self.locations[tokens],
                    query_starts=query_starts - tokens.start if tokens.start else query_starts,
                    starts=self.starts[rows],
                    lengths=self.lengths[rows],
                    table=self.table[rows, : -(-max(host.lengths) // self.page_size)],
                    max_queries=longest,
                    host=host,
                )
                parts.append((key, tokens, part))
        return parts

    @cached_property
    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Page, shadow page (-1: none) and offset in both, per new token: int64[tokens]."""
        page = self.locations // self.page_size
        return page, self.shadow_of[page], self.locations % self.page_size

    @cached_property
    def filled(self) -> tuple[Tensor, Tensor, Tensor]:
        """The pages that this step fills: per page its sequence, and its index in the sequence's table. Then, per token
        [pages, page_size], its row in k and v; negative: older than the step."""
        starts, lengths = self.known
        filled = [
            (row, page)
            for row, (start, length) in enumerate(zip(starts, lengths, strict=True))
            for page in range(start // self.page_size, length // self.page_size)
        ]
        row, page = torch.tensor(filled, dtype=torch.int64).view(-1, 2).unbind(dim=1)
        first = torch.tensor(starts, dtype=torch.int64)[row].unsqueeze(1)
        token = page.unsqueeze(1) * self.page_size + torch.arange(self.page_size)
        own = torch.tensor(self.known.query_starts)[row].unsqueeze(1) + token - first
        own[token < first] = -1
        return row.to(self.table.device), page.to(self.table.device), own.to(self.table.device)


def require_shadows(step: Step, windows: Windows) -> None:
    """Raise if a window reaches into a page without a shadow: see `Step`."""
    reached = [
        (row, page)
        for row, (start, length) in enumerate(zip(*step.known, strict=True))
        for span in (range(min(windows.sink, start)), windows.before(start))
        if span and length > start
        for page in range(span.start // step.page_size, -(-span.stop // step.page_size))
    ]
    row, page = torch.tensor(reached, dtype=torch.int64).view(-1, 2).to(step.table.device).unbind(dim=1)
    if (step.shadow_of[step.table[row, page]] < 0).any():
        raise RuntimeError("a window of this step reaches into a page that has no shadow: this is a bug in kvfold")


@dataclass(frozen=True)
class LayerPages(Once):
    """One layer of a paged cache during a step."""

    step: Step
    key: Codec
    value: Codec
    layout: PageLayout
    windows: Windows
    pool: Tensor  # uint8[pages, kv_heads, page_bytes]
    views: list[Views]  # layout.views(pool)
    shadows: Tensor  # 16-bit float [shadow pages, kv_heads, numbers of a page]
    faults: Tensor  # uint8[pages · page_size]: 1 at the locations of tokens that `store` could not store
    _memory: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # in all steps

    @classmethod
    def of(
        cls,
        codecs: tuple[Codec, Codec],
        layout: PageLayout,
        windows: Windows,
        pool: Tensor,
        shadows: Tensor,
        faults: Tensor,
    ) -> Self:
        """A layer between steps. `windows` are the recipe's."""
        views = layout.views(pool, together=codecs[0].quantizes_like(codecs[1]))
        return cls(NO_STEP, *codecs, layout, layout.windows(windows), pool, views, shadows, faults)

    def during(self, step: Step) -> Self:
        """The same layer in another step. What was made `once` serves all steps, and so must not depend on the step."""
        pages = object.__new__(type(self))
        vars(pages).update(vars(self), step=step)
        return pages

    def codec(self, sides: slice) -> Codec:
        """The codec that quantizes these sides (0: keys, 1: values)."""
        return (self.key, self.value)[sides.start]

    @property
    def shadow_sides(self) -> tuple[Tensor, Tensor]:
        """Views of the keys and values in shadow pages: [shadow pages, kv_heads, page_size, d]."""
        return self.layout.shadow_sides(self.shadows)

    def unpack(self, page: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        """Decode the slots at page and offset int64[tokens]: keys and values float32[tokens, kv_heads, d]."""
        parts = [self.codec(views.sides).dequantize(*views.read(page, offset)) for views in self.views]
        k, v = (side for part in parts for side in part.unbind(2))
        return k, v


_NO_PAGES = torch.empty(0, 0, dtype=torch.int64)
NO_STEP = Step.of(HostLengths([], []), _NO_PAGES, _NO_PAGES.flatten(), page_size=1)
