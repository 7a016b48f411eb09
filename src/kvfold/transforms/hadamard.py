"""Block-diagonal Hadamard rotation."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from scipy.linalg import hadamard
from torch import Tensor

from kvfold.transforms.base import Terms


@lru_cache(maxsize=64)
def _matrix(dims: int, order: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """diag(H, …, H) [dims, dims], with entries ±1 in float64 and orthonormal in float32."""
    signs = torch.block_diag(*[torch.from_numpy(hadamard(order))] * (dims // order)).to(device, torch.float64)
    return signs, (signs * order**-0.5).float()


@dataclass(frozen=True)
class Hadamard:
    """x·diag(H, …, H), its own inverse. H is the orthonormal Sylvester–Hadamard matrix of order `order`."""

    order: int

    def __post_init__(self) -> None:
        if self.order < 1 or self.order & (self.order - 1):
            raise ValueError(f"order={self.order} is not a power of two")

    def apply(self, x: Tensor) -> Tensor:
        """In float64, so that the result for a token does not depend on the batch.

        Sums of ±x are exact for 16-bit inputs, and for float32 inputs unless magnitudes differ by more than 2^22.
        """
        signs, _ = self._matrices(x.shape[-1], x.device)
        return (x.double() @ signs).mul_(self.order**-0.5).float()

    invert = dual = apply

    def dense(self, dims: int, device: torch.device) -> Tensor:
        _, orthonormal = self._matrices(dims, device)
        return orthonormal.unsqueeze(0)

    def terms(self, dims: int, dtype: torch.dtype, device: torch.device) -> Terms:
        """One term: signs, which every type holds exactly."""
        signs, _ = self._matrices(dims, device)
        matrix = signs.to(dtype).unsqueeze(0)
        return Terms(matrix, (matrix,), torch.full_like(signs[0], self.order**-0.5))

    def to(self, device: torch.device | str) -> "Hadamard":
        return self

    def _matrices(self, dims: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if dims % self.order:
            raise ValueError(f"order={self.order} does not divide the head dimension {dims}")
        return _matrix(dims, self.order, device)


def hadamard_matrix(dims: int) -> Tensor:
    """`Hadamard` of the largest order that divides `dims`, as a matrix float64[dims, dims]."""
    return Hadamard(dims & -dims).apply(torch.eye(dims)).double()
