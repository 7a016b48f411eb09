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
from kvfold.format.open_block import DRAFTED, raw_from
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

    Rings: the ring of a sequence keeps the raw vectors of its last tokens, those of the open block among them. It is
    made of one or several blocks of the tensor `LayerPages.ring`. A ring holds the tokens before the step when the step
    begins, and `store` adds the step's own.

    A token with a negative location is padding of a CUDA graph. It is not stored, and its output means nothing.
    """

    locations: Tensor  # int64[tokens]: page · page_size + offset
    query_starts: Tensor  # int32[sequences + 1]
    starts: Tensor  # int32[sequences]: tokens before this step
    lengths: Tensor  # int32[sequences]: tokens with this step
    table: Tensor  # int64[sequences, pages]; rows are padded with page 0
    rings: Tensor  # int64[sequences, blocks]: the blocks of each ring
    page_size: int
    max_queries: int  # the most new tokens of any sequence
    host: HostLengths | None = None
    _memory: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, host: HostLengths, table: Tensor, rings: Tensor, page_size: int) -> Self:
        """The step of sequences whose lengths and page table [sequences, pages] are on the host. Its tensors go to the
        device of `rings`."""
        counts = host.counts
        starts, lengths = (torch.tensor(numbers, dtype=torch.int32) for numbers in host)
        # not torch.repeat_interleave: it wakes all threads, for milliseconds, however short the tensors are
        row = torch.from_numpy(np.repeat(np.arange(len(counts)), np.array(counts, dtype=np.int64)))
        query_starts = torch.tensor(host.query_starts, dtype=torch.int32)
        position = torch.arange(len(row)) - query_starts[row] + starts[row]
        locations = table[row, position // page_size] * page_size + position % page_size
        device = rings.device
        return cls(
            locations.to(device),
            query_starts.to(device),
            starts.to(device),
            lengths.to(device),
            table.to(device),
            rings,
            page_size,
            max(counts, default=0),
            host,
        )

    @property
    def known(self) -> HostLengths:
        """`host`, for ops that need it."""
        assert self.host is not None, "this op needs lengths on the host"
        return self.host

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
                    rings=self.rings[rows],
                    max_queries=longest,
                    host=host,
                )
                parts.append((key, tokens, part))
        return parts

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Page and offset, per new token: int64[tokens]."""
        return self.locations // self.page_size, self.locations % self.page_size

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Sequence and position, per new token: int64[tokens]. No host waits for a device."""
        token = torch.arange(len(self.locations), dtype=torch.int32, device=self.locations.device)
        row = torch.searchsorted(self.query_starts[1:], token, right=True)
        row = row.clamp_max(max(0, len(self.starts) - 1))  # padding behind the last sequence
        return row, (self.starts[row] + token - self.query_starts[row]).long()

    @cached_property
    def begins(self) -> Tensor:
        """Which new tokens have position 0: uint8[tokens]."""
        return (self.rows[1] == 0).byte()

    def in_rings(self, row: Tensor, position: Tensor, tokens: int) -> Tensor:
        """Where tokens of sequences lie in rings whose blocks have `tokens` tokens: block · tokens + offset."""
        place = position % (self.rings.shape[1] * tokens)
        return self.rings[row, place // tokens] * tokens + place % tokens

    @cached_property
    def filled(self) -> tuple[Tensor, Tensor]:
        """The pages that this step fills: the sequence of each, and its index in the sequence's table."""
        starts, lengths = self.known
        filled = [
            (row, page)
            for row, (start, length) in enumerate(zip(starts, lengths, strict=True))
            for page in range(start // self.page_size, length // self.page_size)
        ]
        row, page = torch.tensor(filled, dtype=torch.int64, device=self.table.device).view(-1, 2).unbind(dim=1)
        return row, page


class Fresh(NamedTuple):
    """Which raw vectors `store` returns, and which ones it puts into rings.

    It returns those of the step's tokens. In steps with many tokens of a sequence, these may overwrite in the ring what
    earlier queries of the step read. So it returns the open block before the step, too: per sequence, the tokens from
    `first` on.
    """

    starts: Tensor  # int32[sequences + 1]: where each sequence begins
    first: Tensor  # int32[sequences]
    kept: Tensor  # int64[tokens]: where each new token goes in rings, -1: nowhere
    rows: Tensor | None  # int64[tokens]: where each new token goes in what is returned; None: in order
    old: tuple[Tensor, Tensor] | None  # int64: the same for older tokens, and where they lie in rings

    @classmethod
    def of(cls, step: Step, block: int, tokens: int) -> Self:
        """For an open block of `block` tokens, and rings whose blocks have `tokens` tokens."""
        row, position = step.rows
        room = step.rings.shape[1] * tokens
        stays = (step.locations >= 0) & (position >= step.lengths[row] - room)
        kept = torch.where(stays, step.in_rings(row, position, tokens), -1)
        if step.max_queries <= DRAFTED:
            return cls(step.query_starts, step.starts, kept, None, None)
        host, device = step.known, step.table.device
        first = [raw_from(start, block) for start in host.starts]
        counts = [length - at for length, at in zip(host.lengths, first, strict=True)]
        starts = np.array([0, *accumulate(counts)])
        shift = np.array(host.starts, dtype=np.int64) - np.array(first, dtype=np.int64)
        rows = np.arange(host.query_starts[-1]) + np.repeat(shift.cumsum(), host.counts)
        older = np.repeat(np.arange(len(shift)), shift)
        at = np.arange(shift.sum()) - np.repeat(shift.cumsum() - shift, shift)
        old_row, old_at = on_device(np.stack((older, at)), device, torch.int64)
        begin, end = on_device(starts, device), on_device(first, device)
        places = step.in_rings(old_row, end[old_row] + old_at, tokens)
        return cls(begin, end, kept, on_device(rows, device, torch.int64), (begin[old_row] + old_at, places))


@dataclass(frozen=True)
class LayerPages(Once):
    """One layer of a paged cache during a step."""

    step: Step
    key: Codec
    value: Codec
    layout: PageLayout
    block: int  # tokens of the open block, 0: none
    pool: Tensor  # uint8[pages, kv_heads, page_bytes]
    views: list[Views]  # layout.views(pool)
    ring: Tensor  # 16-bit float [blocks of rings, kv_heads, numbers]
    faults: Tensor  # uint8[pages · page_size]: 1 at the locations of tokens that `store` could not store
    _memory: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # in all steps

    @classmethod
    def of(
        cls,
        codecs: tuple[Codec, Codec],
        layout: PageLayout,
        block: int,
        pool: Tensor,
        ring: Tensor,
        faults: Tensor,
    ) -> Self:
        """A layer between steps. `block` is the recipe's."""
        views = layout.views(pool, together=codecs[0].quantizes_like(codecs[1]))
        return cls(NO_STEP, *codecs, layout, layout.block(block), pool, views, ring, faults)

    def during(self, step: Step) -> Self:
        """The same layer in another step. What was made `once` serves all steps, and so must not depend on the step."""
        pages = object.__new__(type(self))
        vars(pages).update(vars(self), step=step)
        return pages

    def codec(self, sides: slice) -> Codec:
        """The codec that quantizes these sides (0: keys, 1: values)."""
        return (self.key, self.value)[sides.start]

    @property
    def ring_sides(self) -> tuple[Tensor, Tensor]:
        """Views of the keys and values in rings: [blocks, kv_heads, tokens, d]."""
        return self.layout.ring_sides(self.ring)

    @property
    def ring_tokens(self) -> int:
        """Tokens in a block of a ring."""
        return self.ring.shape[-1] // self.layout.raw_numbers

    @property
    def fresh(self) -> Fresh:
        """What `store` returns and keeps in this step. Only layers with an open block return and keep anything."""
        return self.step.once(Fresh.of, self.block, self.ring_tokens)

    def new_fresh(self) -> tuple[Tensor, Tensor]:
        """Memory for what `store` returns, with the older tokens in it."""
        fresh, blocks = self.fresh, self.ring_tokens
        count = len(fresh.kept) + (0 if fresh.old is None else len(fresh.old[0]))
        sides = []
        for ring in self.ring_sides:
            side = ring.new_empty(count, ring.shape[1], ring.shape[3])
            if fresh.old is not None and len(fresh.old[0]):
                rows, places = fresh.old
                side[rows] = ring[places // blocks, :, places % blocks]
            sides.append(side)
        return sides[0], sides[1]

    def unpack(self, page: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        """Decode the slots at page and offset int64[tokens]: keys and values float32[tokens, kv_heads, d]."""
        parts = [self.codec(views.sides).dequantize(*views.read(page, offset)) for views in self.views]
        k, v = (side for part in parts for side in part.unbind(2))
        return k, v


_NO_PAGES = torch.empty(0, 0, dtype=torch.int64)
NO_STEP = Step.of(HostLengths([], []), _NO_PAGES, _NO_PAGES, page_size=1)
