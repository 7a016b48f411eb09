"""What a serving engine's attention should give, step by step, by its definition.

`defined_attention` watches `Layer.attend` and `Layer.read`, which serving engines call. It keeps its own record of what
was stored at each location of the engine's pages, computes in float64 what every query should get from that, and notes
how far the engine's result is from it. The same keys and values go both ways, so that no rounding of the model comes
between.

A token is read in 16 bits where it lies in a window of the query and either comes with the query's own step, or has
a 16-bit copy that was made when the token was stored and was never lost. Where the copy was lost, or never made, a
window reads what is packed, in 16 bits. All other tokens are read packed.
"""

import math
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from kvfold.engines.serving import Layer
from kvfold.format.codec import Codec
from kvfold.ops.pages import Logits, Step

EXACT, PACKED, RESTORED = range(3)  # ways to read a token


class Found:
    """What was found in this process and in those that are forked from it."""

    def __init__(self) -> None:
        self._numbers = multiprocessing.Array("d", 3)
        self.records: dict[Layer, Record] = {}  # of this process

    error = property(lambda self: self._numbers[0], doc="the largest, over the largest value that was read")
    queries = property(lambda self: int(self._numbers[1]), doc="how many were looked at, in all layers")
    restored = property(lambda self: int(self._numbers[2]), doc="reads of tokens in windows that had lost their copy")

    def add(self, error: float, queries: int, restored: int) -> None:
        with self._numbers.get_lock():
            self._numbers[0] = max(self._numbers[0], math.inf if math.isnan(error) else error)
            self._numbers[1] += queries
            self._numbers[2] += restored


class Record:
    """A layer's pages, by what was stored in them."""

    def __init__(self, layer: Layer) -> None:
        pages = layer.pages
        self.codecs, self.windows = (pages.key, pages.value), pages.windows
        self.page_size, self.raw_dtype = pages.layout.page_size, pages.shadows.dtype
        self.states: dict[int, tuple[Tensor, ...]] = {}  # keys and values of a page: float64[ways, tokens, kv_heads, d]
        self.copied: dict[int, Tensor] = {}  # bool[tokens]: whose 16-bit copy is that of when it was stored
        self.shadow: dict[int, int] = {}  # of a page when it was last seen

    def store(self, step: Step, k: Tensor, v: Tensor) -> None:
        sides = [self._ways(codec, x) for codec, x in zip(self.codecs, (k, v), strict=True)]
        for i, location in enumerate(step.locations.tolist()):
            if location < 0:  # padding
                continue
            page, offset = divmod(location, self.page_size)
            if page not in self.states:
                self.states[page] = tuple(x.new_full((3, self.page_size, *x.shape[2:]), torch.nan) for x in sides)
                self.copied[page] = torch.zeros(self.page_size, dtype=torch.bool)
            for states, ways in zip(self.states[page], sides, strict=True):
                states[:, offset] = ways[:, i]
            self.copied[page][offset] = self.shadow[page] >= 0

    def _ways(self, codec: Codec, x: Tensor) -> Tensor:
        """Keys or values [tokens, kv_heads, d] as they are read in each way: float64[ways, tokens, kv_heads, d]."""
        y = codec.transform.forward(x)
        packed = codec.dequantize(*codec.quantize(y.unsqueeze(-2))).squeeze(-2)
        ways = {EXACT: y.to(self.raw_dtype), PACKED: packed, RESTORED: packed.to(self.raw_dtype)}
        return torch.stack([codec.transform.inverse(ways[way].float()).double() for way in range(3)])

    def see(self, shadow_of: Tensor) -> None:
        """A page whose shadow is another than before has lost its copy."""
        for page, shadow in enumerate(shadow_of.tolist()):
            if self.shadow.get(page, -1) != shadow and page in self.copied:
                self.copied[page].zero_()
            self.shadow[page] = shadow

    def attend(self, pages: Sequence[int], start: int, q: Tensor, logits: Logits) -> tuple[Tensor, float, int]:
        """Queries [n, q_heads, d] from position `start` on: their outputs, the largest value, and how many reads were
        of restored tokens."""
        n, length = len(q), start + len(q)
        k, v = (torch.cat([self.states[page][side] for page in pages], dim=1)[:, :length] for side in range(2))
        copied = torch.cat([self.copied[page] for page in pages])[:length]
        t, j = torch.arange(start, length).unsqueeze(1), torch.arange(length)
        inside = (j < self.windows.sink) | (j > t - self.windows.recent)
        exact = inside & ((j >= start) | copied)
        way = torch.where(exact, EXACT, torch.where(inside, RESTORED, PACKED))
        queries = q.double().unflatten(1, (k.shape[2], -1))
        x = torch.einsum("thgd,wjhd->whgtj", queries, k) * logits.scale
        if logits.cap is not None:
            x = logits.cap * torch.tanh(x / logits.cap)
        x = x.gather(0, way.expand(1, *x.shape[1:])).squeeze(0).masked_fill(j > t, -torch.inf)
        if logits.sinks is not None:
            learned = logits.sinks.double().view(*x.shape[:2], 1, 1).expand(-1, -1, n, -1)
            x = torch.cat((x, learned), dim=-1)
        weights = x.softmax(-1)[..., :length] * (way == torch.arange(3).view(3, 1, 1, 1, 1))
        out = torch.einsum("whgtj,wjhd->thgd", weights, v).flatten(1, 2)
        return out, v.abs().max().item(), int(((way == RESTORED) & (j <= t)).sum())


@contextmanager
def defined_attention() -> Iterator[Found]:
    """Compare all attention of packed layers with its definition."""
    found, attend, read = Found(), Layer.attend, Layer.read

    def watched(layer: Layer, steps, q: Tensor, k: Tensor, v: Tensor, logits: Logits, out: Tensor) -> None:
        attend(layer, steps, q, k, v, logits, out)
        record = found.records.setdefault(layer, Record(layer))
        record.see(steps[0][1].shadow_of)
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
                expected, largest, restored = record.attend(pages, start, q[own], logits)
                error = (out[own].double() - expected).abs().max().item() / largest
                found.add(error, length - start, restored)

    with patch.object(Layer, "attend", watched), patch.object(Layer, "read", watched_read):
        yield found
