"""Where groups are clipped, by the formula of docs/format.md."""

import numpy as np


def limit(x: np.ndarray, clip: float) -> np.ndarray:
    """[..., n] -> [..., 1]"""
    return clip * np.sqrt((x**4).sum(-1, keepdims=True) / (x**2).sum(-1, keepdims=True))


def clipped(x: np.ndarray, clip: float) -> np.ndarray:
    return np.clip(x, -limit(x, clip), limit(x, clip))
