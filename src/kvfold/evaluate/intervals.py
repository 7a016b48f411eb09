"""95 % intervals of mean scores, by bootstrap over haystacks.

Scores of one haystack hang together: they share its text and its cache. So haystacks are drawn, each with all its
scores, and the interval is that of the means of many such draws (percentiles). The difference of two caches is taken
haystack by haystack: what makes a haystack hard for both does not widen it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Haystack = tuple[Any, ...]  # what tells a haystack from others: its text, its length, …

DRAWS = 10_000
SEED = 0  # equal scores give equal intervals
PERCENTILES = (2.5, 97.5)


@dataclass(frozen=True)
class Interval:
    """The mean over haystacks, and the 95 % interval around it."""

    mean: float
    low: float
    high: float
    haystacks: int


def by_haystack(scores: Iterable[tuple[Haystack, float]]) -> dict[Haystack, float]:
    """The mean score of each haystack."""
    found: dict[Haystack, list[float]] = {}
    for haystack, score in scores:
        found.setdefault(haystack, []).append(score)
    return {haystack: sum(several) / len(several) for haystack, several in found.items()}


def interval(scores: Mapping[Haystack, float]) -> Interval:
    """The mean of the scores of haystacks."""
    values = np.array(list(scores.values()), dtype=np.float64)
    drawn = np.random.default_rng(SEED).integers(len(values), size=(DRAWS, len(values)))
    low, high = np.percentile(values[drawn].mean(axis=1), PERCENTILES)
    return Interval(float(values.mean()), float(low), float(high), len(values))


def difference(scores: Mapping[Haystack, float], reference: Mapping[Haystack, float]) -> Interval:
    """The mean of `scores` less `reference`, over the same haystacks."""
    if scores.keys() != reference.keys():
        raise ValueError("caches were measured on different haystacks: measure both on the same")
    return interval({haystack: score - reference[haystack] for haystack, score in scores.items()})
