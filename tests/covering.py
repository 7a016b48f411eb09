"""Fewer cases of tests whose parameters are a cross product.

A test marked `pairs` runs cases in which every two values of two parameters meet. One marked `each_value` runs cases in
which every value occurs: for two parameters of which one already combines several things. With `--whole-product`
(`make test-all`) both run all their cases.
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Sequence

import pytest

STRENGTHS = {"each_value": 1, "pairs": 2}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole-product", action="store_true", help="run all cases of tests that cover pairs or values")


@pytest.hookimpl(trylast=True)  # after -k and -m: what they leave is covered
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("whole_product"):
        return
    tests = itertools.groupby(items, lambda item: item.nodeid.partition("[")[0])
    kept = [item for _, cases in tests for item in covered(list(cases))]
    config.hook.pytest_deselected(items=list(set(items) - set(kept)))  # to be counted
    items[:] = kept


def covered(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Those cases of one test that its mark asks for."""
    for mark, strength in STRENGTHS.items():
        if cases[0].get_closest_marker(mark):
            ids = [tuple(case.callspec._idlist) for case in cases]  # one of each decorator, joined in the case's name
            return [cases[i] for i in covering(ids, strength)]
    return cases


def covering(cases: Sequence[tuple[Hashable, ...]], strength: int) -> list[int]:
    """Which of `cases` to run so that any `strength` values that meet in one of them meet in a chosen one.

    Greedy: the next case is the one that brings the most that is new, and of equals the one that repeats the least.
    """
    brings = [list(itertools.combinations(enumerate(case), strength)) for case in cases]
    wanted, seen, chosen = set().union(*brings), Counter(), []
    while len(seen) < len(wanted):
        repeats = [sum(seen[values] for values in case) for case in brings]
        new = [sum(values not in seen for values in case) for case in brings]
        best = max(range(len(cases)), key=lambda i: (new[i], -repeats[i]))
        seen.update(brings[best])
        chosen.append(best)
    return sorted(chosen)
