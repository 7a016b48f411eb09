"""Lloyd–Max quantization of N(0, 1): the 2^bits levels with the least mean squared error (Max 1960, Lloyd 1982)."""

import math
from functools import lru_cache

import numpy as np
import torch
from scipy.optimize import fsolve
from scipy.special import ndtr, ndtri
from torch import Tensor

MAX_BITS = 8


@lru_cache
def levels(bits: int) -> tuple[float, ...]:
    """The levels in ascending order. A level is the mean of its cell. Cells end halfway between levels.

    Only the negative levels are solved for, because ndtr is accurate in the negative tail. The others mirror them.
    """
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"Lloyd–Max levels are for 1 to {MAX_BITS} bits, not {bits}")
    quantiles = (np.arange(2 ** (bits - 1)) + 0.5) / 2**bits
    start = math.sqrt(3) * ndtri(quantiles)  # Panter–Dite: the density of levels is about the cube root of N(0, 1)'s
    below = fsolve(lambda x: x - _cells(x)[1], start, xtol=1e-13, band=(1, 1))
    return (*below.tolist(), *(-below[::-1]).tolist())


def boundaries(bits: int) -> Tensor:
    """The midpoints between neighbouring levels, float32[2^bits − 1]."""
    table = torch.tensor(levels(bits), dtype=torch.float64)
    return ((table[1:] + table[:-1]) / 2).float()


def quantize(x: Tensor, bits: int) -> Tensor:
    """float32[..., n] of unit variance -> uint8[..., n], the indices of the nearest levels.

    NaN and Inf are not looked for. The caller scales x to unit variance and finds them in the scale.
    """
    _, between = _tables(bits, x.device)
    return torch.bucketize(x.contiguous(), between, out_int32=True).to(torch.uint8)


def dequantize(codes: Tensor, bits: int) -> Tensor:
    """uint8[..., n] -> float32[..., n], the levels."""
    table, _ = _tables(bits, codes.device)
    return table[codes.int()]  # uint8 itself would index as a mask


@lru_cache
def _tables(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The levels and the boundaries between them, float32 on `device`."""
    return torch.tensor(levels(bits), dtype=torch.float32, device=device), boundaries(bits).to(device)


@lru_cache
def level_table(device: torch.device) -> Tensor:
    """float32[512]: the levels of b-bit codebooks begin at entry 2^b."""
    tables = [torch.zeros(2), *(torch.tensor(levels(bits)) for bits in range(1, 9))]
    return torch.cat(tables).float().to(device)


@lru_cache
def boundary_table(device: torch.device) -> Tensor:
    """float32[512]: the boundaries between the levels of b-bit codebooks begin at entry 2^b."""
    between = [boundaries(bits) for bits in range(1, 9)]
    return torch.cat([torch.zeros(2), *(torch.cat((edges, edges.new_zeros(1))) for edges in between)]).to(device)


def _cells(below: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Probability and mean of the cells of the negative levels. The last cell ends at 0, the middle of all levels."""
    edges = np.concatenate(([-np.inf], (below[1:] + below[:-1]) / 2, [0.0]))
    mass = np.diff(ndtr(edges))
    density = np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
    return mass, -np.diff(density) / mass
