"""A method of your own in one file: keys are turned to their principal axes, and the strongest axes get twice the bits.

    export KVFOLD_METHODS=examples/own_method.py
    kvfold eval embedded -r principal-int2 -r int2

`examples/README.md` says what a method has to define.
"""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, PositiveInt
from torch import Tensor

from kvfold.format.layout import Segment, SlotLayout, affine_slot
from kvfold.recipe import Fit, Recipe
from kvfold.recipes import add
from kvfold.transforms import Matrix, Rotation
from kvfold.transforms.covariance import eigenvectors

if TYPE_CHECKING:
    from kvfold.calibration.statistics import LayerStatistics
    from kvfold.rope import Rope


class Principal(Recipe):
    """k' = k·U with U the eigenvectors of the keys' second moment per KV head; then integers, values too."""

    options: ClassVar = (*Recipe.options, "strong")
    bits: int = Field(ge=1, le=4)
    strong: PositiveInt = 16  # axes with twice the bits

    def layouts(self, key_dim: int, value_dim: int, fit: Fit) -> tuple[SlotLayout, SlotLayout]:
        """The slots of a token: which coordinates have how many bits, in keys and in values."""
        strong, weak = Segment(0, self.strong, 2 * self.bits), Segment(self.strong, key_dim, self.bits)
        return SlotLayout((strong, weak)), affine_slot(value_dim, self.bits)

    def rotations(self, key_dim: int, value_dim: int, fit: Fit) -> tuple[Rotation | None, Rotation | None]:
        """The linear maps of keys and of values before they are quantized. Queries are turned to match."""
        return Matrix(fit["key_rotation"]), None

    def fit(self, layer: "LayerStatistics", rope: "Rope", means: tuple[Tensor | None, Tensor | None]) -> Fit:
        """What is learned from a layer: tensors by name. The first dimension is the KV heads, or 1."""
        return {"key_rotation": eigenvectors(layer.k.second(means[0])).float()}


add(Principal(name="principal-int2", bits=2, summary="principal axes of keys, the strongest with 4 bits, the rest 2"))
