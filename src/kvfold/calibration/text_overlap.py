"""A guard against scoring on the text that was calibrated on."""

import numpy as np
import torch
from torch import Tensor

PASSAGE = 32  # tokens: long enough that no two texts share a passage by chance
MULTIPLIER = 0x9E3779B97F4A7C15  # any odd number; artifacts hold hashes made with it, so it stays


def passages(tokens: Tensor) -> Tensor:
    """Hashes, int64[n // 32], of the calibration's `tokens` (1-D), cut into passages that do not overlap."""
    return torch.from_numpy(_hashes(tokens)[::PASSAGE].view(np.int64).copy())


def overlap(tokens: Tensor, passages: Tensor) -> float:
    """The share of `tokens` (1-D) that lie in one of the calibration's `passages`, wherever it begins."""
    if len(tokens) < PASSAGE:
        return 0.0
    known = np.isin(_hashes(tokens), passages.cpu().numpy().view(np.uint64))
    covered = np.convolve(known, np.ones(PASSAGE, dtype=np.int64)) > 0  # a known passage covers its 32 tokens
    return float(covered.mean())


def check_disjoint(tokens: Tensor, passages: Tensor) -> None:
    """Refuse evaluation `tokens` that share text with the calibration."""
    share = overlap(tokens, passages)
    if share:
        raise ValueError(
            f"{round(share * len(tokens)):,} of the {len(tokens):,} evaluation tokens were calibrated on, which "
            "flatters the result: evaluate on another text, or calibrate on another"
        )


def _hashes(tokens: Tensor) -> np.ndarray:
    """A hash, uint64, of every window of 32 tokens: Σ token[i + j]·MULTIPLIER^(j + 1) modulo 2⁶⁴."""
    ids = tokens.cpu().numpy().astype(np.uint64)
    windows = max(0, len(ids) - PASSAGE + 1)
    result = np.zeros(windows, dtype=np.uint64)
    for j in range(PASSAGE):
        result += ids[j : j + windows] * np.uint64(pow(MULTIPLIER, j + 1, 2**64))
    return result
