"""Token-wise affine integers."""

from typing import ClassVar

from pydantic import Field, PositiveInt
from torch import Tensor

from kvfold.codec import Codec
from kvfold.layout import affine_slot
from kvfold.recipe import Recipe
from kvfold.transforms import Transform


class Integers(Recipe):
    """For each token, KV head and group: s = (max − min)/(2^bits − 1), code = round((x − min)/s), x̂ = s·code + min."""

    options: ClassVar = (*Recipe.options, "group")
    bits: int = Field(ge=1, le=8)
    group: PositiveInt | None = None  # dims that share a scale; default: the whole head

    def codecs(self, head_dim: int, key_mean: Tensor | None, value_mean: Tensor | None) -> tuple[Codec, Codec]:
        layout = affine_slot(head_dim, self.bits, self.group)
        return Codec(layout, Transform(key_mean)), Codec(layout, Transform(value_mean))
