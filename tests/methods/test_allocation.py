from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvfold.methods.allocation import allocate

score_lists = st.lists(st.floats(0, 1e6), min_size=1, max_size=4)


def error(scores, bits):
    return sum(score * 4.0**-b for score, b in zip(scores, bits, strict=True))


@st.composite
def cases(draw):
    scores = draw(score_lists)
    return scores, draw(st.integers(len(scores), 8 * len(scores)))


@given(cases())
def test_no_allocation_is_better(case):
    scores, budget = case
    bits = allocate(scores, budget)
    assert sum(bits) == budget
    candidates = (b for b in product(range(1, 9), repeat=len(scores)) if sum(b) == budget)
    assert error(scores, bits) == pytest.approx(min(error(scores, b) for b in candidates), rel=1e-12)


@given(cases(), st.sampled_from([(1, 2, 4, 8), (1, 4, 8), (1, 3)]))
def test_gaps_between_widths(case, widths):
    """The rule again, with every step that fits looked at anew."""
    scores, budget = case
    budget = min(budget, widths[-1] * len(scores))
    bits = [1] * len(scores)

    def steps():
        """(gain per bit, −index, width) of each block's next step, if it fits."""
        for i, b in enumerate(bits):
            for after in [width for width in widths if width > b][:1]:
                if after - b <= budget - sum(bits):
                    yield scores[i] * ((4.0**-b - 4.0**-after) / (after - b)), -i, after

    while step := max(steps(), default=None):
        bits[-step[1]] = step[2]
    assert allocate(scores, budget, widths) == bits


def test_by_hand():
    assert allocate([1.0, 1.0, 1.0], 5) == [2, 2, 1]  # ties go to the lowest index
    assert allocate([16.0, 1.0], 6) == [4, 2]  # a factor of 16 is worth two bits
    assert allocate(torch.tensor([0.0, 1.0]), 9) == [1, 8]
    assert allocate([0.0, 1.0], 10) == [2, 8]  # the budget is spent in full
    assert allocate([100.0, 1.0], 6, widths=(1, 2, 4, 8)) == [4, 2]
    assert allocate([100.0, 1.0], 8, widths=(1, 2, 4, 8)) == [4, 4]
    assert allocate([100.0, 1.0], 7, widths=(1, 2, 4, 8)) == [4, 2]  # one bit is left over
    assert allocate([3.0, 4.0], 8, widths=[4]) == [4, 4]


@pytest.mark.parametrize("budget", [2, 25])
def test_budgets_out_of_reach_are_refused(budget):
    with pytest.raises(ValueError, match=f"take 3 to 24 bits, not {budget}"):
        allocate([1.0, 2.0, 3.0], budget)


@pytest.mark.parametrize("score", [-1.0, float("nan"), float("inf")])
def test_scores_that_make_no_sense_are_refused(score):
    with pytest.raises(ValueError, match="finite and not negative"):
        allocate([1.0, score], 4)
