"""What a rotation is multiplied by: numpy's definitions, beside `kvfold.transforms`."""

import numpy as np


def eight_bits(x: np.ndarray) -> np.ndarray:
    """The nearest multiples of 2^-24 that have eight significant bits: bfloat16 and float16 hold them."""
    mantissa, exponent = np.frexp(x.astype(np.float32))
    return np.rint(np.ldexp(np.rint(mantissa.astype(np.float64) * 2**8), exponent - 8 + 24)) / 2**24


def as_multiplied(matrix: np.ndarray) -> np.ndarray:
    """A rotation [..., d, d] as it is applied: rounded, unless every column has zeros and entries of one size."""
    sizes = np.abs(matrix).max(axis=tuple(range(matrix.ndim - 1)))
    return matrix if np.array_equal(matrix, np.sign(matrix) * sizes) else eight_bits(matrix)


def hadamard(dims: int, order: int) -> np.ndarray:
    """diag(H, …, H), H[i, j] = (−1)^popcount(i & j) / √order."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(order)] for i in range(order)]
    return np.kron(np.eye(dims // order), np.array(signs)) / np.sqrt(order)
