"""SAW-INT4: system-aware 4-bit KV-cache quantization for real-world LLM serving."""

from typing import ClassVar

from pydantic import PositiveInt
from torch import Tensor

from kvfold.codec import Codec
from kvfold.layout import affine_slot
from kvfold.methods.integers import Integers
from kvfold.transforms import Hadamard, Transform, default_order


class Saw(Integers):
    """k' = k·diag(H_h, …, H_h), then integers over the whole head; queries are rotated alike, so logits stay exact.

    H_h is the orthonormal Hadamard matrix of order h; keys only, or values too (then the output is rotated back).
    """

    options: ClassVar = ("order", "values", *Integers.options)
    order: PositiveInt | None = None  # default: the largest power of two that divides the head dimension, at most 128
    values: bool = False

    def codecs(self, head_dim: int, key_mean: Tensor | None, value_mean: Tensor | None) -> tuple[Codec, Codec]:
        order = default_order(head_dim) if self.order is None else self.order
        if head_dim % order:
            raise ValueError(f"{self.name}: order={order} does not divide the head dimension {head_dim}")
        layout, rotation = affine_slot(head_dim, self.bits, self.group), Hadamard(order)
        value_rotation = rotation if self.values else None
        return Codec(layout, Transform(key_mean, rotation)), Codec(layout, Transform(value_mean, value_rotation))
