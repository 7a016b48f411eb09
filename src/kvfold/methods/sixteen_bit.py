"""16-bit floats."""

from typing import ClassVar

from kvfold.format.layout import SlotLayout, raw_slot
from kvfold.recipe import Fit, Recipe


class SixteenBit(Recipe):
    """x̂ = x, raw: in the model's own 16-bit type, or in bfloat16 for a float32 model."""

    options: ClassVar = ()
    centre: bool = False

    def layouts(self, key_dim: int, value_dim: int, fit: Fit) -> tuple[SlotLayout, SlotLayout]:
        return raw_slot(key_dim), raw_slot(value_dim)
