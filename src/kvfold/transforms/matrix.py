"""Dense rotations of the head dimension, one for all KV heads or one per KV head."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from scipy.linalg import hadamard
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Matrix:
    """y = x·A with an orthogonal A, float32[kv_heads or 1, d, d].

    Computed in float64, so that the result for a token does not depend on the batch.
    """

    matrix: Tensor
    sizes: Tensor | None = None  # float32[d]: entries of a column are 0 or ± its size. None: they have several sizes

    @classmethod
    def of_signs(cls, matrix: Tensor) -> "Matrix":
        """With `sizes`, if there are any."""
        sizes = matrix.abs().amax(dim=(0, 1))
        return cls(matrix, sizes if torch.equal(matrix, matrix.sign() * sizes) else None)

    def apply(self, x: Tensor) -> Tensor:
        return _by_head(x.double(), self._doubled).float()

    @cached_property
    def _doubled(self) -> Tensor:
        return self.matrix.double()

    def invert(self, y: Tensor) -> Tensor:
        return _by_head(y.double(), self._doubled.mT).float()

    dual = apply

    def dense(self, dims: int, device: torch.device) -> Tensor:
        return self.matrix

    def terms(self, dims: int, dtype: torch.dtype, device: torch.device) -> tuple[tuple[Tensor, ...], Tensor]:
        """With `sizes`, one term: zeros and signs, which every type holds exactly.

        Otherwise two: A in 16 bits, and the rounding error of the first. Together they have at least 16 bits of A.
        """
        if self.sizes is not None:
            return (self.matrix.sign().to(dtype),), self.sizes.double()
        high = self.matrix.to(dtype)
        factors = torch.ones(dims, dtype=torch.float64, device=self.matrix.device)
        return (high, (self.matrix - high.float()).to(dtype)), factors

    def to(self, device: torch.device | str) -> "Matrix":
        return Matrix(self.matrix.to(device), None if self.sizes is None else self.sizes.to(device))


def _by_head(x: Tensor, matrices: Tensor) -> Tensor:
    """x [..., heads, d] times the matrix of each head's KV head."""
    if len(matrices) == 1:
        return x @ matrices[0]
    grouped = x.unflatten(-2, (len(matrices), -1))
    return torch.einsum("...hgd,hde->...hge", grouped, matrices).flatten(-3, -2)


@lru_cache(maxsize=256)
def random_rotation(dims: int, seed: int) -> Tensor:
    """A rotation float64[dims, dims] drawn from `seed`, the same on every machine.

    If `dims` is a power of two: random signs and a Hadamard matrix. Otherwise: uniform over all rotations.
    """
    generator = np.random.RandomState(seed)  # NumPy keeps its stream; newer generators may change theirs
    if dims & (dims - 1) == 0:
        signs = generator.randint(0, 2, dims) * 2 - 1
        return torch.from_numpy(signs[:, None] * hadamard(dims) * dims**-0.5)
    q, r = np.linalg.qr(generator.standard_normal((dims, dims)))
    return torch.from_numpy(q * np.sign(np.diag(r)))
