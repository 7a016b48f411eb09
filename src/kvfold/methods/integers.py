"""Token-wise affine integers."""

from typing import ClassVar

from pydantic import Field, PositiveInt

from kvfold.format.layout import SlotLayout, affine_slot
from kvfold.recipe import Fit, Recipe


class Integers(Recipe):
    """Per token, KV head and group: s = (max − min)/(2^bits − 1), code = round((x − min)/s), x̂ = s·code + min."""

    options: ClassVar = (*Recipe.options, "group")
    bits: int = Field(ge=1, le=8)
    group: PositiveInt | None = None  # dims that share a scale; default: the whole head

    def layouts(self, key_dim: int, value_dim: int, fit: Fit) -> tuple[SlotLayout, SlotLayout]:
        return affine_slot(key_dim, self.bits, self.group), affine_slot(value_dim, self.bits, self.group)
