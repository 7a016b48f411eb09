"""95 % intervals by bootstrap: of mean scores over haystacks, and of KL over pieces of text.

Scores of one haystack hang together: they share its text and its cache. So haystacks are drawn, each with all its
scores, and the interval is that of the means of many such draws (percentiles). The difference of two caches is taken
haystack by haystack: what makes a haystack hard for both does not widen it. Neighbouring tokens hang together too, so
whole pieces of text are drawn.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Haystack = tuple[Any, ...]  # what tells a haystack from others: its text, its length, …

DRAWS = 10_000
TOKEN_DRAWS = 2000  # a draw has thousands of tokens
PIECE = 128  # tokens
SEED = 0  # equal scores give equal intervals
LEVEL = 95.0  # percent


@dataclass(frozen=True)
class Interval:
    """The mean over haystacks, and the interval around it."""

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


def interval(scores: Mapping[Haystack, float], level: float = LEVEL) -> Interval:
    """The mean of the scores of haystacks."""
    values = np.array(list(scores.values()), dtype=np.float64)
    drawn = np.random.default_rng(SEED).integers(len(values), size=(DRAWS, len(values)))
    low, high = _middle(values[drawn].mean(axis=1), level)
    return Interval(float(values.mean()), low, high, len(values))


def difference(scores: Mapping[Haystack, float], reference: Mapping[Haystack, float], level: float = LEVEL) -> Interval:
    """The mean of `scores` less `reference`, over the same haystacks."""
    if scores.keys() != reference.keys():
        raise ValueError("caches were measured on different haystacks: measure both on the same")
    return interval({haystack: score - reference[haystack] for haystack, score in scores.items()}, level)


def token_interval(
    tokens: np.ndarray, statistic: Callable[[np.ndarray], float], level: float = LEVEL
) -> tuple[float, float]:
    """The interval of a statistic of tokens, float64[tokens] in their order. Tokens behind the last whole piece are
    left out."""
    size = min(PIECE, len(tokens))
    pieces = tokens[: len(tokens) // size * size].reshape(-1, size)
    drawn = np.random.default_rng(SEED).integers(len(pieces), size=(TOKEN_DRAWS, len(pieces)))
    return _middle(np.array([statistic(pieces[chosen].ravel()) for chosen in drawn]), level)


def _middle(drawn: np.ndarray, level: float) -> tuple[float, float]:
    """Between which values `level` percent of the draws lie."""
    low, high = np.percentile(drawn, (50 - level / 2, 50 + level / 2))
    return float(low), float(high)
