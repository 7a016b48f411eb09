"""Hadamard rotations inside segments of permuted coordinates."""

from dataclasses import dataclass
from functools import cached_property

import torch
from scipy.linalg import hadamard
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PermutedHadamard:
    """x[order]·diag(H, …, H'): coordinates are sorted per KV head, then each segment is rotated by a Hadamard matrix.

    Sums of ±x are computed in float64, as in `Hadamard`, so the result for a token does not depend on the batch.
    """

    order: Tensor  # int64[kv_heads or 1, d]
    sizes: tuple[int, ...]  # of segments, powers of two

    def __post_init__(self) -> None:
        if odd := [size for size in self.sizes if size < 1 or size & (size - 1)]:
            raise ValueError(f"a segment of {odd[0]} coordinates has no Hadamard matrix: sizes are powers of two")
        if sum(self.sizes) != self.order.shape[-1]:
            raise ValueError(f"segments {self.sizes} do not add up to the head dimension {self.order.shape[-1]}")

    def apply(self, x: Tensor) -> Tensor:
        return self._rotated(_picked(x, self.order))

    dual = apply

    def invert(self, y: Tensor) -> Tensor:
        return _picked(self._rotated(y), self._inverse)

    def dense(self, dims: int, device: torch.device) -> Tensor:
        return self._dense

    def terms(self, dims: int, dtype: torch.dtype, device: torch.device) -> tuple[tuple[Tensor, ...], Tensor]:
        """One term: zeros and signs, which every type holds exactly."""
        return (self._signs[self._inverse].to(dtype),), self._factors

    def to(self, device: torch.device | str) -> "PermutedHadamard":
        return PermutedHadamard(self.order.to(device), self.sizes)

    def _rotated(self, x: Tensor) -> Tensor:
        """x·diag(H, …, H'), its own inverse."""
        return (x.double() @ self._signs).mul_(self._factors).float()

    @cached_property
    def _inverse(self) -> Tensor:
        """int64[kv_heads or 1, d]: where each coordinate of x goes."""
        return self.order.argsort(dim=-1)

    @cached_property
    def _signs(self) -> Tensor:
        """Entries 0 and ±1, float64[d, d]."""
        blocks = [torch.from_numpy(hadamard(size)) for size in self.sizes]
        return torch.block_diag(*blocks).to(self.order.device, torch.float64)

    @cached_property
    def _factors(self) -> Tensor:
        """What makes the columns of `_signs` orthonormal, float64[d]."""
        factors = [size**-0.5 for size in self.sizes for _ in range(size)]
        return torch.tensor(factors, dtype=torch.float64, device=self.order.device)

    @cached_property
    def _dense(self) -> Tensor:
        return (self._signs * self._factors).float()[self._inverse]


def _picked(x: Tensor, order: Tensor) -> Tensor:
    """The coordinates of x [..., heads, d] in the order of each head's KV head."""
    grouped = x.unflatten(-2, (len(order), -1))
    return grouped.take_along_dim(order.unsqueeze(1).expand(*grouped.shape[:-3], -1, -1, -1), dim=-1).flatten(-3, -2)
