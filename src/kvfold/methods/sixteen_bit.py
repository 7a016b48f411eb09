"""16-bit floats."""

from typing import ClassVar

from torch import Tensor

from kvfold.codec import Codec
from kvfold.layout import raw_slot
from kvfold.recipe import Recipe


class SixteenBit(Recipe):
    """x̂ = x in the model's own 16-bit type (bfloat16 for a float32 model)."""

    options: ClassVar = ()
    centre: bool = False

    def codecs(self, head_dim: int, key_mean: Tensor | None, value_mean: Tensor | None) -> tuple[Codec, Codec]:
        raw = Codec(raw_slot(head_dim))
        return raw, raw
