"""A guard against scoring on the text that was calibrated on."""

import numpy as np
import torch
from torch import Tensor

BLOCK = 32  # tokens: long enough that no two texts share a block by chance
MULTIPLIER = 0x9E3779B97F4A7C15  # any odd number; artifacts hold hashes made with it, so it stays


def blocks(tokens: Tensor) -> Tensor:
    """Hashes, int64[n // 32], of the non-overlapping 32-token blocks of the calibration's `tokens` (1-D)."""
    return torch.from_numpy(_hashes(tokens)[::BLOCK].view(np.int64).copy())


def overlap(tokens: Tensor, blocks: Tensor) -> float:
    """The share of `tokens` (1-D) that lie in a window of 32 tokens which is one of the calibration's `blocks`."""
    if len(tokens) < BLOCK:
        return 0.0
    known = np.isin(_hashes(tokens), blocks.cpu().numpy().view(np.uint64))
    covered = np.convolve(known, np.ones(BLOCK, dtype=np.int64)) > 0  # a known window covers its 32 tokens
    return float(covered.mean())


def check_disjoint(tokens: Tensor, blocks: Tensor) -> None:
    """Refuse evaluation `tokens` that share text with the calibration."""
    share = overlap(tokens, blocks)
    if share:
        raise ValueError(
            f"{round(share * len(tokens)):,} of the {len(tokens):,} evaluation tokens were calibrated on, which "
            "flatters the result: evaluate on another text, or calibrate on another"
        )


def _hashes(tokens: Tensor) -> np.ndarray:
    """A hash, uint64, of every window of 32 tokens: Σ token[i + j]·MULTIPLIER^(j + 1) modulo 2⁶⁴."""
    ids = tokens.cpu().numpy().astype(np.uint64)
    windows = max(0, len(ids) - BLOCK + 1)
    result = np.zeros(windows, dtype=np.uint64)
    for j in range(BLOCK):
        result += ids[j : j + windows] * np.uint64(pow(MULTIPLIER, j + 1, 2**64))
    return result
