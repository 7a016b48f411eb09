"""SAW-INT4: system-aware 4-bit KV-cache quantization for real-world LLM serving."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import PositiveInt

from kvfold.format.layout import SlotLayout
from kvfold.methods.integers import Integers
from kvfold.recipe import Fit, Rotations

if TYPE_CHECKING:
    from kvfold.transforms import Hadamard


class Saw(Integers):
    """k' = k·diag(H_h, …, H_h), then integers over the whole head. Queries are rotated alike, so logits do not change.

    H_h is the orthonormal Hadamard matrix of order h. With `values`, values are rotated too, and outputs rotated back.
    """

    options: ClassVar = ("order", "values", *Integers.options)
    order: PositiveInt | None = None  # default: the largest power of two that divides the head dimension, at most 128
    values: bool = False

    def layouts(self, key_dim: int, value_dim: int, fit: Fit) -> tuple[SlotLayout, SlotLayout]:
        self._order(key_dim)
        return super().layouts(key_dim, value_dim, fit)

    def rotations(self, key_dim: int, value_dim: int, fit: Fit) -> Rotations:
        return self._hadamard(key_dim), self._hadamard(value_dim) if self.values else None

    def _hadamard(self, head_dim: int) -> "Hadamard":
        from kvfold.transforms import Hadamard

        return Hadamard(self._order(head_dim))

    def _order(self, head_dim: int) -> int:
        order = min(head_dim & -head_dim, 128) if self.order is None else self.order
        if head_dim % order:
            raise ValueError(f"order={order} does not divide the head dimension {head_dim}")
        if order & (order - 1):
            raise ValueError(f"order={order} is not a power of two")
        return order
