"""What a serving engine's attention should give, step by step, by its definition.

`defined_attention` watches `Layer.attend` and `Layer.read`, which serving engines call. It keeps its own record of what
was stored at each location of the engine's pages, computes in float64 what every query should get from that, and notes
how far the engine's result is from it. The same keys and values go both ways, so that no rounding of the model comes
between.

A query reads raw the tokens of its own block, the tokens from ⌊position / B⌋·B on, and packed all tokens before.
"""

import math
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from packed_reads import packed_and_read
from torch import Tensor

from kvfold.format.codec import Codec
from kvfold.format.open_block import raw_from
from kvfold.ops.pages import Logits, Step
from kvfold.paged.layer import Layer

RAW, PACKED = range(2)  # ways to read a token


class Found:
    """What was found in this process and in those that are forked from it."""

    def __init__(self) -> None:
        self._numbers = multiprocessing.Array("d", 2)
        self.records: dict[Layer, Record] = {}  # of this process

    error = property(lambda self: self._numbers[0], doc="the largest, over the largest value that was read")
    queries = property(lambda self: int(self._numbers[1]), doc="how many were looked at, in all layers")

    def add(self, error: float, queries: int) -> None:
        with self._numbers.get_lock():
            self._numbers[0] = max(self._numbers[0], math.inf if math.isnan(error) else error)
            self._numbers[1] += queries


class Record:
    """A layer's pages, by what was stored in them."""

    def __init__(self, layer: Layer) -> None:
        pages = layer.pages
        self.codecs, self.block = (pages.key, pages.value), pages.block
        self.page_size, self.raw_dtype = pages.layout.page_size, pages.ring.dtype
        self.states: dict[int, tuple[Tensor, ...]] = {}  # keys and values of a page: float64[ways, tokens, kv_heads, d]

    def store(self, step: Step, k: Tensor, v: Tensor) -> None:
        position = torch.cat([torch.arange(*each) for each in zip(*step.known, strict=True)])
        sides = [self._ways(codec, x, position) for codec, x in zip(self.codecs, (k, v), strict=True)]
        for i, location in enumerate(step.locations.tolist()):
            if location < 0:  # padding
                continue
            page, offset = divmod(location, self.page_size)
            if page not in self.states:
                self.states[page] = tuple(x.new_full((2, self.page_size, *x.shape[2:]), torch.nan) for x in sides)
            for states, ways in zip(self.states[page], sides, strict=True):
                states[:, offset] = ways[:, i]

    def _ways(self, codec: Codec, x: Tensor, position: Tensor) -> Tensor:
        """Keys or values [tokens, kv_heads, d] as they are read in each way: float64[ways, tokens, kv_heads, d]."""
        raw = codec.transform.forward(x).to(self.raw_dtype)
        ways = {RAW: raw, PACKED: packed_and_read(codec, x, position)}
        return torch.stack([codec.transform.inverse(ways[way].float()).double() for way in range(2)])

    def attend(self, pages: Sequence[int], start: int, q: Tensor, logits: Logits) -> tuple[Tensor, float]:
        """Queries [n, q_heads, d] from position `start` on: their outputs, and the largest value."""
        n, length = len(q), start + len(q)
        k, v = (torch.cat([self.states[page][side] for page in pages], dim=1)[:, :length] for side in range(2))
        t, j = torch.arange(start, length).unsqueeze(1), torch.arange(length)
        way = torch.where(j >= raw_from(t, self.block), RAW, PACKED)
        queries = q.double().unflatten(1, (k.shape[2], -1))
        x = torch.einsum("thgd,wjhd->whgtj", queries, k) * logits.scale
        if logits.cap is not None:
            x = logits.cap * torch.tanh(x / logits.cap)
        x = x.gather(0, way.expand(1, *x.shape[1:])).squeeze(0).masked_fill(j > t, -torch.inf)
        if logits.sinks is not None:
            learned = logits.sinks.double().view(*x.shape[:2], 1, 1).expand(-1, -1, n, -1)
            x = torch.cat((x, learned), dim=-1)
        weights = x.softmax(-1)[..., :length] * (way == torch.arange(2).view(2, 1, 1, 1, 1))
        out = torch.einsum("whgtj,wjhd->thgd", weights, v).flatten(1, 2)
        return out, v[PACKED].abs().max().item()


@contextmanager
def defined_attention() -> Iterator[Found]:
    """Compare all attention of packed layers with its definition."""
    found, attend, read = Found(), Layer.attend, Layer.read

    def watched(layer: Layer, steps, q: Tensor, k: Tensor, v: Tensor, logits: Logits, out: Tensor) -> None:
        attend(layer, steps, q, k, v, logits, out)
        record = found.records.setdefault(layer, Record(layer))
        for tokens, step in steps:
            record.store(step, k[tokens], v[tokens])
        compare(record, steps, q, logits, out)

    def watched_read(layer: Layer, steps, q: Tensor, logits: Logits, out: Tensor) -> None:
        read(layer, steps, q, logits, out)
        compare(found.records[layer], steps, q, logits, out)

    def compare(record: Record, steps, q: Tensor, logits: Logits, out: Tensor) -> None:
        for tokens, step in steps:
            first = tokens.start
            for row, (start, length) in enumerate(zip(*step.known, strict=True)):
                own = slice(first, first := first + length - start)
                if step.locations[own.start - tokens.start] < 0:  # padding
                    continue
                pages = step.table[row, : -(-length // step.page_size)].tolist()
                expected, largest = record.attend(pages, start, q[own], logits)
                error = (out[own].double() - expected).abs().max().item() / largest
                found.add(error, length - start)

    with patch.object(Layer, "attend", watched), patch.object(Layer, "read", watched_read):
        yield found
