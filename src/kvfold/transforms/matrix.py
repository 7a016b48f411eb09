"""Dense maps of the head dimension, one for all KV heads or one per KV head."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from scipy.linalg import hadamard
from torch import Tensor

from kvfold.transforms.base import Terms


@dataclass(frozen=True, eq=False)
class Matrix:
    """y = x·A. A is `matrix`, an invertible float32[kv_heads or 1, d, d], rounded to what 16 bits hold.

    Every entry of A is a number of both bfloat16 and float16. So tensor cores multiply 16-bit vectors by A itself, with
    one matrix. Queries and outputs take D = A⁻ᵀ, for which q·D · k·A = q·k. Rounded, no A is quite orthogonal.

    Computed in float64, so that the result for a token does not depend on the batch.
    """

    matrix: Tensor
    sizes: Tensor | None = None  # float32[d]: entries of a column are 0 or ± its size, and are not rounded: D = A

    @classmethod
    def of_signs(cls, matrix: Tensor) -> "Matrix":
        """With `sizes`, if there are any."""
        sizes = matrix.abs().amax(dim=(0, 1))
        return cls(matrix, sizes if torch.equal(matrix, matrix.sign() * sizes) else None)

    def apply(self, x: Tensor) -> Tensor:
        return _by_head(x.double(), self._forward).float()

    def dual(self, q: Tensor) -> Tensor:
        return _by_head(q.double(), self._dual).float()

    def invert(self, y: Tensor) -> Tensor:
        return _by_head(y.double(), self._dual.mT).float()

    @cached_property
    def _forward(self) -> Tensor:
        """A, float64[kv_heads or 1, d, d]."""
        return (self.matrix if self.sizes is not None else self.matrix.bfloat16().half()).double()

    @cached_property
    def _dual(self) -> Tensor:
        """D, float64[kv_heads or 1, d, d]."""
        if self.sizes is not None:
            return self._forward
        return torch.from_numpy(np.linalg.inv(self._forward.cpu().numpy())).mT.to(self.matrix.device)

    def dense(self, dims: int, device: torch.device) -> Tensor:
        return self._dual.float()

    def terms(self, dims: int, dtype: torch.dtype, device: torch.device) -> Terms:
        """With `sizes`, signs and zeros. Otherwise A, and D rounded to 16 bits with what this lacks."""
        if self.sizes is not None:
            signs = self.matrix.sign().to(dtype)
            return Terms(signs, (signs,), self.sizes.double())
        high = self._dual.to(dtype)
        low = (self._dual - high.double()).to(dtype)
        return Terms(self._forward.to(dtype), (high, low), torch.ones(dims, dtype=torch.float64, device=high.device))

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
