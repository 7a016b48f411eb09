"""A cache that is laid out as in serving engines."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from kvfold.format.codec import Codec
from kvfold.format.open_block import ring_tokens
from kvfold.paged import PagedCache

TOKENS = 17  # of a block of a ring
UNUSED = 8  # numbers behind them


class ScatteredCache(PagedCache):
    """Its pages come in random order, and so do the blocks of rings. A ring has several blocks, as few as it needs. At
    first rings hold NaN."""

    def __init__(
        self, codecs: Sequence[tuple[Codec, Codec]], kv_heads: int, sequences: int, *, pages: int, **options: Any
    ) -> None:
        super().__init__(codecs, kv_heads, sequences, **options)
        generator = torch.Generator().manual_seed(0)
        self.tables.references = [0] * pages
        self.tables.free = torch.randperm(pages, generator=generator).tolist()
        each = math.ceil(ring_tokens(self.block) / TOKENS)
        order = torch.randperm(sequences * each, generator=generator)
        self.ring_table = order.view(sequences, each).to(self.device)
        self.rings = [
            ring.new_full((len(ring) * each, kv_heads, TOKENS * layout.raw_numbers + UNUSED), math.nan)
            for ring, layout in zip(self.rings, self.layouts, strict=True)
        ]
        self.layers = self._made()
