"""The Gluon decode kernels in PyTorch, as gluon/decode_step.py calls them: what they read and return, in float64.

Their own code needs a GPU. With this in its place, everything around them runs in Triton's interpreter.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from scipy.linalg import hadamard
from torch import Tensor

from kvfold.format.codec import Codec
from kvfold.format.layout import PageLayout
from kvfold.format.open_block import raw_from
from kvfold.ops import pdl
from kvfold.ops.attend.gluon import decode_step as gluon
from kvfold.ops.attend.gluon.open_block import RingBlock

UNSEEN = -1e30


class Decode:
    """Called as decode[splits · groups, kv_heads, sequences](...)."""

    def __init__(self, layout: PageLayout) -> None:
        self.layout = layout

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def launch(
            q: Tensor, outs: Tensor, weights: Tensor, pool: Tensor, table: Tensor, lengths: Tensor, scale: float,
            q_stride: int, table_stride: int, table_pages: int, query_starts: Tensor | None, tokens: int | None,
            groups: int | None, ring: Tensor | None, rings: Tensor, ring_stride: int, ring_blocks: int,
            starts: Tensor | None, near: Tensor | None, *, RATIO: int,
            ORDER: int, BLOCK: int, RING: RingBlock | None, **options: Any,
        ) -> None:  # fmt: skip
            splits, sequences = grid[0] // (groups or 1), grid[2]
            rows = range(sequences + 1) if query_starts is None else query_starts.tolist()
            outs.fill_(math.nan)  # of parts without tokens nothing is read but the weight
            weights.fill_(UNSEEN)
            turned = q.double()
            if ORDER > 1:
                turned = (turned.unflatten(-1, (-1, ORDER)) @ torch.from_numpy(hadamard(ORDER)).double()).flatten(-2)
                turned = turned * ORDER**-0.5
            for sequence, row in ((s, row) for s in range(sequences) for row in range(rows[s], rows[s + 1])):
                length = int(lengths[sequence]) - (rows[sequence + 1] - 1 - row)  # up to this query
                border = raw_from(length - 1, BLOCK)
                packed = self._read(pool, table[sequence], torch.arange(border))
                parts = [*zip(*(side.tensor_split(splits) for side in packed), strict=True)]
                if ring is not None and RING is not None:
                    raw = self._read_ring(ring, rings[sequence], torch.arange(border, length), RING)
                    parts += zip(*(side.tensor_split(len(outs) - splits) for side in raw), strict=True)
                for part, (k, v) in enumerate(parts):  # [tokens, kv_heads, d]
                    for head in range(q.shape[1] if len(k) else 0):
                        logits = scale * (k[:, head // RATIO] @ turned[row, head])  # of powers of two
                        if near is not None and part == 0:
                            logits[0] += scale * (near[head // RATIO].double() @ q[row, head].double())
                        shares = torch.softmax(logits * math.log(2), dim=0)
                        outs[part, row, head] = (shares @ v[:, head // RATIO]).float()
                        weights[part, row, head] = torch.logsumexp(logits * math.log(2), dim=0) / math.log(2)

        return launch

    def _read(self, pool: Tensor, pages: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        size, memory = self.layout.page_size, pool.view(torch.uint8)
        sides, views = [], self.layout.views(memory, False)
        for slot, view in zip((self.layout.key, self.layout.value), views, strict=True):
            codes, meta = view.read(pages[tokens // size], tokens % size)
            sides.append(Codec(slot).dequantize(codes, meta).squeeze(-2).double())
        return sides[0], sides[1]

    def _read_ring(self, ring: Tensor, blocks: Tensor, tokens: Tensor, about: RingBlock) -> tuple[Tensor, Tensor]:
        place = tokens % (len(blocks) * about.tokens)
        k, v = (side[blocks[place // about.tokens], :, place % about.tokens] for side in self.layout.ring_sides(ring))
        return k.double(), v.double()


def use(monkeypatch: Any) -> None:
    """Replace the Gluon decode kernels by these. The interpreter runs one kernel after the other, so none waits."""
    kernel = gluon._kernel
    monkeypatch.setattr(gluon, "_kernel", lambda layout, *rest: kernel(layout, *rest)._replace(decode=Decode(layout)))
    for name in ("gdc_wait", "gdc_launch_dependents"):
        monkeypatch.setattr(pdl, name, lambda: None)
