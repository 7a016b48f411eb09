"""TurboQuant (its MSE form): a random rotation, a norm, and Lloyd–Max codes."""

from typing import ClassVar

from pydantic import Field

from kvfold.format.layout import SlotLayout, codebook_slot
from kvfold.recipe import Fit, Number, Recipe, Rotations


class TurboQuant(Recipe):
    """x̂ = n·level[code]·Rᵀ. R is a random rotation. It makes the coordinates of x/‖x‖ nearly normal.

    The stored norm n = ‖x‖/‖level[code]‖ keeps the length of x. The paper stores ‖x‖.
    """

    options: ClassVar = (*Recipe.options, "seed")
    key_bits: int = Field(ge=1, le=8)
    value_bits: int = Field(ge=1, le=8)
    seed: Number = 0

    def layouts(self, key_dim: int, value_dim: int, fit: Fit) -> tuple[SlotLayout, SlotLayout]:
        return codebook_slot([(key_dim, self.key_bits)]), codebook_slot([(value_dim, self.value_bits)])

    def rotations(self, key_dim: int, value_dim: int, fit: Fit) -> Rotations:
        from kvfold.transforms import Matrix, random_rotation

        sides = enumerate((key_dim, value_dim))
        key, value = (random_rotation(dims, 2 * self.seed + side).float().unsqueeze(0) for side, dims in sides)
        return Matrix.of_signs(key), Matrix.of_signs(value)
