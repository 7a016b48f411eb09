"""Intervals against their definition, one draw after the other in plain Python, and against known distributions."""

import random
from statistics import fmean

import numpy as np
import pytest

from kvfold.evaluate.intervals import PIECE, by_haystack, difference, interval, token_interval


def brute_force(haystacks: list[list[float]], draws: int = 4000) -> tuple[float, float]:
    """Draw haystacks with all their scores, take the mean of all scores; then the 2.5 % and 97.5 % of the means."""
    rng = random.Random(1)
    means = sorted(
        fmean(score for haystack in rng.choices(haystacks, k=len(haystacks)) for score in haystack)
        for _ in range(draws)
    )
    return means[round(0.025 * draws)], means[round(0.975 * draws)]


@pytest.mark.parametrize("count", [5, 15, 30])
def test_an_interval_is_that_of_haystacks_drawn_again(count: int):
    """Scores of a haystack hang together here, so an interval over single scores would be far narrower."""
    rng = random.Random(count)
    haystacks = [[min(1.0, max(0.0, rng.gauss(level, 0.05))) for _ in range(6)] for level in
                 (rng.random() for _ in range(count))]  # fmt: skip
    found = interval(by_haystack(((i,), score) for i, scores in enumerate(haystacks) for score in scores))
    low, high = brute_force(haystacks)
    assert found.mean == pytest.approx(fmean(map(fmean, haystacks)))
    assert found.haystacks == count
    assert found.low == pytest.approx(low, abs=0.015)
    assert found.high == pytest.approx(high, abs=0.015)
    single_low, single_high = brute_force([[score] for scores in haystacks for score in scores], 500)
    assert found.high - found.low > 1.5 * (single_high - single_low)


def test_tokens_are_drawn_in_pieces():
    """Tokens of a piece hang together here, so an interval over single tokens would be far narrower."""
    rng = random.Random(3)
    pieces = [[level + rng.gauss(0, 0.1) for _ in range(PIECE)] for level in (rng.random() for _ in range(24))]
    tokens = np.array([token for piece in pieces for token in piece] + [100.0] * (PIECE - 1))  # and no whole piece
    assert token_interval(tokens, np.mean) == pytest.approx(brute_force(pieces, 2000), abs=0.015)
    low, high = token_interval(tokens, np.max)
    assert low < high == tokens[: 24 * PIECE].max()
    few = token_interval(tokens[:50], np.mean)
    assert few == pytest.approx((tokens[:50].mean(),) * 2), "less than a piece is one"


def test_a_higher_level_is_wider():
    """Of a normal distribution, 95 % lie within 1.960 deviations, and 98.3 % within 2.394."""
    scores = {(i,): random.Random(i).gauss(0, 1) for i in range(400)}
    usual, wide = interval(scores), interval(scores, 100 - 5 / 3)
    assert (wide.high - wide.low) / (usual.high - usual.low) == pytest.approx(2.394 / 1.960, abs=0.03)


def test_differences_are_taken_haystack_by_haystack():
    """Haystacks that are hard for both caches do not widen the interval."""
    rng = random.Random(0)
    reference = {(i,): rng.random() for i in range(20)}
    scores = {key: score - 0.1 + 0.01 * (key[0] % 2) for key, score in reference.items()}
    less = difference(scores, reference)
    low, high = brute_force([[scores[key] - reference[key]] for key in reference])
    assert (less.mean, less.low, less.high) == pytest.approx((-0.095, low, high), abs=5e-4)
    assert interval(scores).high - interval(scores).low > 0.15


def test_equal_scores_give_equal_intervals_and_none_at_all_where_nothing_varies():
    scores = {(i,): i / 7 for i in range(8)}
    assert interval(scores) == interval(dict(scores))
    same = interval(dict.fromkeys(scores, 0.25))
    assert (same.mean, same.low, same.high, same.haystacks) == (0.25, 0.25, 0.25, 8)
    less = difference(scores, scores)
    assert (less.mean, less.low, less.high) == (0, 0, 0)


def test_different_haystacks_are_not_compared():
    with pytest.raises(ValueError, match="different haystacks"):
        difference({(0,): 1.0}, {(1,): 1.0})
