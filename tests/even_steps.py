"""The steps that evenly spaced levels try, in float64."""

import numpy as np

from kvfold.quantizers import even


def nearest(x: np.ndarray, bits: int) -> np.ndarray:
    """The nearest of the levels … -1.5, -0.5, 0.5, 1.5 …, by trying all."""
    levels = np.arange(2**bits) - (2**bits - 1) / 2
    return levels[np.abs(x[..., None] - levels).argmin(-1)]


def tried(x: np.ndarray, bits: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """For every step: the step, the levels nearest to x [..., n], and the squared cosine of x with these levels."""
    size = np.sqrt((x**2).mean(-1, keepdims=True)) if bits < 4 else np.abs(x).max(-1, keepdims=True)
    found = []
    for step in (size * multiple for multiple in even.STEPS[bits]):
        levels = nearest(x / step, bits)
        cosine = (x * levels).sum(-1) ** 2 / (x**2).sum(-1) / (levels**2).sum(-1)
        found.append((step, levels, cosine))
    return found


def chosen(x: np.ndarray, levels: np.ndarray, bits: int, tie: float) -> list[np.ndarray]:
    """Per step, whether it has these levels, but for float32 at the boundaries, and no other step has a larger cosine,
    but for `tie` of it."""
    steps = tried(x, bits)
    largest = np.max([cosine for _, _, cosine in steps], axis=0)
    found = []
    for step, own, cosine in steps:
        further = np.abs(x / step - levels) - np.abs(x / step - own)
        found.append((further <= 1e-4).all(-1) & (cosine >= largest * (1 - tie)))
    return found
