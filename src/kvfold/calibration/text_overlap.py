"""A guard against evaluation on the calibration text, by hashes of 32 successive tokens (n-grams)."""

import numpy as np
import torch
from torch import Tensor

NGRAM = 32  # tokens: long enough that no two texts share an n-gram by chance
MULTIPLIER = 0x9E3779B97F4A7C15  # any odd number; artifacts hold hashes made with it, so it stays


def text_hashes(tokens: Tensor) -> Tensor:
    """int64[n // 32]: hashes of the n-grams of the calibration's `tokens` (1-D) that begin at tokens 0, 32, 64, …"""
    return torch.from_numpy(_hashes(tokens)[::NGRAM].view(np.int64).copy())


def overlap(tokens: Tensor, calibrated: Tensor) -> float:
    """The share of `tokens` (1-D) that lie in an n-gram of the calibration. `calibrated` are its `text_hashes`."""
    if len(tokens) < NGRAM:
        return 0.0
    known = np.isin(_hashes(tokens), calibrated.cpu().numpy().view(np.uint64))
    covered = np.convolve(known, np.ones(NGRAM, dtype=np.int64)) > 0  # a known n-gram covers its 32 tokens
    return float(covered.mean())


def check_disjoint(tokens: Tensor, calibrated: Tensor) -> None:
    """Refuse evaluation `tokens` that share text with the calibration. `calibrated` are its `text_hashes`."""
    share = overlap(tokens, calibrated)
    if share:
        raise ValueError(
            f"{round(share * len(tokens)):,} of the {len(tokens):,} evaluation tokens were calibrated on, which "
            "flatters the result: evaluate on another text, or calibrate on another"
        )


def _hashes(tokens: Tensor) -> np.ndarray:
    """uint64[n − 31]: the hashes of all n-grams, Σ token[i + j]·MULTIPLIER^(j + 1) modulo 2⁶⁴."""
    ids = tokens.cpu().numpy().astype(np.uint64)
    count = max(0, len(ids) - NGRAM + 1)
    result = np.zeros(count, dtype=np.uint64)
    for j in range(NGRAM):
        result += ids[j : j + count] * np.uint64(pow(MULTIPLIER, j + 1, 2**64))
    return result
