"""KIVI: a tuning-free asymmetric 2-bit quantization for KV cache."""

from math import gcd
from typing import ClassVar

from pydantic import Field, PositiveInt

from kvfold.format.layout import SlotLayout, affine_slot, channel_slot
from kvfold.recipe import Fit, Number, Recipe


class Kivi(Recipe):
    """Keys by channel over pages of 32 tokens, values by token over groups of 32 channels.

    The paper's token group is a page here. Its keys are quantized when it is full. The paper reads the last 128 tokens
    raw, and so does the open block here, on average half as many.

    By default nothing is centred. For keys, the range of a channel does not depend on its mean. For values, the first
    tokens have small vectors and large attention weights, and centring would make these vectors large.
    """

    options: ClassVar = (*Recipe.options, "group")
    page_size: ClassVar = 32
    centre: bool = False
    bits: int = Field(ge=1, le=8)
    block: Number = 128
    group: PositiveInt | None = None  # channels of a value that share a scale; default: gcd(32, d)

    def layouts(self, key_dim: int, value_dim: int, fit: Fit) -> tuple[SlotLayout, SlotLayout]:
        group = gcd(value_dim, 32) if self.group is None else self.group
        return channel_slot(key_dim, self.bits), affine_slot(value_dim, self.bits, group)
