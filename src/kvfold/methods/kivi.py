"""KIVI: a tuning-free asymmetric 2-bit quantization for KV cache."""

from math import gcd
from typing import ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt

from kvfold.layout import SlotLayout, affine_slot, channel_slot
from kvfold.recipe import Fit, Recipe


class Kivi(Recipe):
    """Keys by channel over pages of 32 tokens, values by token over groups of 32 channels, the last tokens in 16 bits.

    The page is the token group: its keys are quantized when it is full, and read in 16 bits until then. It does not
    centre by default: ranges of a channel do not change with its mean, and values of the first tokens, which are small
    and weigh much, would become large.
    """

    options: ClassVar = (*Recipe.options, "group")
    page_size: ClassVar = 32
    centre: bool = False
    bits: int = Field(ge=1, le=8)
    recent: NonNegativeInt = 128
    group: PositiveInt | None = None  # channels of a value that share a scale; default: 32, or what divides the head

    def layouts(self, head_dim: int, fit: Fit) -> tuple[SlotLayout, SlotLayout]:
        group = gcd(head_dim, 32) if self.group is None else self.group
        return channel_slot(head_dim, self.bits), affine_slot(head_dim, self.bits, group)
