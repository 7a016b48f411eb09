"""Bit widths under a budget: blocks that matter more get more bits (the greedy algorithm of Block-GTQ)."""

import heapq
import math
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def allocate(scores: "Sequence[float] | Tensor", budget_bits: int, widths: Sequence[int] = range(1, 9)) -> list[int]:
    """A width b_i per block, with Σ b_i at most `budget_bits` and a small Σ s_i·4^(−b_i).

    Every block starts at the least width. Then, again and again, the block that gains most per bit goes to its next
    width b'. The gain is s_i·(4^(−b) − 4^(−b'))/(b' − b). Ties go to the lowest index.

    - Widths one apart: the gain is ¾·s_i·4^(−b). The budget is spent in full, and the sum is the least possible.
    - Widths further apart: a block keeps its width if the next one does not fit. A few bits may be left over.
    """
    weights = [float(score) for score in scores]
    if not all(0 <= weight < math.inf for weight in weights):
        raise ValueError(f"scores must be finite and not negative: {weights}")
    allowed = sorted(set(widths))
    least, most = len(weights) * allowed[0], len(weights) * allowed[-1]
    if not least <= budget_bits <= most:
        raise ValueError(f"{len(weights)} blocks of {allowed} bits take {least} to {most} bits, not {budget_bits}")

    wider = dict(pairwise(allowed))
    gains = {b: (4.0**-b - 4.0**-after) / (after - b) for b, after in wider.items()}
    bits = [allowed[0]] * len(weights)
    left = budget_bits - least
    heap = [(-weight * gains[b], i) for i, (weight, b) in enumerate(zip(weights, bits, strict=True)) if b in wider]
    heapq.heapify(heap)
    while heap:
        _, i = heapq.heappop(heap)
        after = wider[bits[i]]
        if after - bits[i] <= left:
            left -= after - bits[i]
            bits[i] = after
            if after in wider:
                heapq.heappush(heap, (-weights[i] * gains[after], i))
    return bits


def runs(widths: Sequence[int]) -> list[tuple[int, int]]:
    """Widths per coordinate -> (dims, bits) per run of equal widths."""
    return [(len(list(run)), bits) for bits, run in groupby(widths)]
