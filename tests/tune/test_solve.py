"""The solver, against all choices one by one."""

from itertools import product

import numpy as np
import pytest

from kvfold.tune.solve import solve, weigh


@pytest.mark.parametrize("sizes", [[48, 64, 80, 144], [100, 101, 117], [96], [64, 32, 80, 32]], ids=str)
def test_the_least_cost_within_every_budget(sizes: list[int]):
    rng = np.random.default_rng(0)
    costs = rng.exponential(size=(5, len(sizes)))
    every = [
        (sum(costs[layer, choice] for layer, choice in enumerate(chosen)), sum(sizes[choice] for choice in chosen))
        for chosen in product(range(len(sizes)), repeat=5)
    ]
    for budget in range(5 * min(sizes), 5 * max(sizes) + 20, 7):
        chosen = solve(costs, sizes, budget)
        assert sum(sizes[choice] for choice in chosen) <= budget
        found = sum(costs[layer, choice] for layer, choice in enumerate(chosen))
        assert found == pytest.approx(min(cost for cost, size in every if size <= budget), rel=1e-12)


def test_bytes_that_gain_nothing_are_not_spent():
    assert solve(np.ones((3, 3)), [20, 10, 30], 1000) == [1, 1, 1]
    assert solve(np.array([[3.0, 1.0], [3.0, 1.0], [3.0, 3.0]]), [10, 20], 1000) == [1, 1, 0]


def test_too_few_bytes():
    with pytest.raises(ValueError, match="3 layers take at least 30 bytes, not 29"):
        solve(np.ones((3, 2)), [10, 20], 29)


def test_every_test_counts_alike():
    rng = np.random.default_rng(1)
    key, value, scale = rng.random((2, 3, 2)), rng.random((2, 4, 2)), np.array([0.5, 40.0])
    costs = weigh(key, value, scale)
    assert costs.shape == (2, 12)
    for layer, i, j in product(range(2), range(3), range(4)):
        text, copies = (key[layer, i] + value[layer, j]).tolist()
        assert costs[layer, 4 * i + j] == pytest.approx((text / 0.5 + copies / 40) / 2)
