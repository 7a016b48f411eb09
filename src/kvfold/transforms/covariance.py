"""Rotations from second moments."""

import torch
from torch import Tensor


def eigenvectors(moments: Tensor) -> Tensor:
    """Symmetric float64[..., d, d] -> eigenvectors in columns, by descending eigenvalue. The entry of largest magnitude
    in an eigenvector is positive."""
    vectors = torch.linalg.eigh(moments).eigenvectors.flip(-1)
    largest = vectors.gather(-2, vectors.abs().argmax(dim=-2, keepdim=True))
    return vectors * largest.sign()


def bit_reversal(dims: int) -> Tensor:
    """int64[dims]: the numbers below `dims`, sorted by their reversed bits. Neighbours end up far apart."""
    bits = max(1, (dims - 1).bit_length())
    return torch.tensor(sorted(range(dims), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2)))
