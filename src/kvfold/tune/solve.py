"""Which choice every layer gets: the least cost within a budget of bytes, exactly."""

from collections.abc import Sequence
from math import gcd

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]


def weigh(key: Costs, value: Costs, scale: Costs) -> Costs:
    """[layers, choices]: what choices cost, from curves [layers, options, tests] of keys and of values.

    Every test counts alike: its KL is divided by `scale` [tests]. Choices are pairs of options, values innermost.
    """
    both = key[:, :, None] + value[:, None]  # [layers, key options, value options, tests]
    costs: Costs = (np.maximum(both, 0) / scale).mean(axis=-1).reshape(len(key), -1)
    return costs


def solve(costs: Costs, sizes: Sequence[int], budget: int) -> list[int]:
    """The choice per layer with the least sum of `costs` [layers, choices], whose `sizes` [choices] sum up to at most
    `budget`.

    Dynamic programming over bytes: exact, since sizes are multiples of a common unit. Of equal costs, the smaller size
    is taken.
    """
    layers, least = len(costs), min(sizes)
    left = budget - layers * least
    if left < 0:
        raise ValueError(f"{layers} layers take at least {layers * least:,} bytes, not {budget:,}")
    unit = gcd(*(size - least for size in sizes)) or 1
    extra = [(size - least) // unit for size in sizes]
    most = min(left // unit, layers * max(extra))
    best = np.full(most + 1, np.inf)  # by units spent beyond the least size, over the layers so far
    best[0] = 0
    taken = np.zeros((layers, most + 1), dtype=np.int64)
    for layer, row in enumerate(costs):
        sums = np.full((len(sizes), most + 1), np.inf)
        for choice, (units, cost) in enumerate(zip(extra, row, strict=True)):
            if units <= most:
                sums[choice, units:] = best[: most + 1 - units] + cost
        taken[layer] = sums.argmin(axis=0)
        best = sums.min(axis=0)
    spent = int(best.argmin())
    chosen = []
    for layer in reversed(range(layers)):
        chosen.append(int(taken[layer, spent]))
        spent -= extra[chosen[-1]]
    return chosen[::-1]
