"""Kitty: accurate and efficient 2-bit KV-cache quantization with dynamic channel-wise precision boost."""

import math
from typing import ClassVar

from pydantic import Field

from kvfold.format.layout import SlotLayout, affine_slot, channel_slot
from kvfold.recipe import Fit, Number, Recipe


class Kitty(Recipe):
    """Keys by channel over pages of 128 tokens, values by token.

    The channels with the largest mean magnitude in a page are boosted: they have twice the bits. Their low bits are
    stored with the codes of all other channels, their high bits behind them. By default nothing is centred: large means
    mark the channels that need the boost.
    """

    options: ClassVar = (*Recipe.options, "boost")
    page_size: ClassVar = 128
    centre: bool = False
    bits: int = Field(ge=1, le=4)
    block: Number = 128
    boost: float = Field(default=0.25, ge=0, le=1)  # share of boosted channels, rounded up to a multiple of 8

    def layouts(self, key_dim: int, value_dim: int, fit: Fit) -> tuple[SlotLayout, SlotLayout]:
        boosted = 8 * math.ceil(self.boost * key_dim / 8)
        return channel_slot(key_dim, self.bits, boosted), affine_slot(value_dim, self.bits)
