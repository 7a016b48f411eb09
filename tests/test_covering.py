"""Which cases of a cross product are run."""

import itertools
from types import SimpleNamespace

import pytest
from covering import covering, pytest_collection_modifyitems

PRODUCTS = [(2, 3), (2, 2, 2), (5, 4, 3), (3, 3, 3, 3), (1, 6, 2)]


def together(cases, strength):
    """The values of `strength` parameters that meet in a case."""
    return {
        (axes, tuple(case[axis] for axis in axes))
        for case in cases
        for axes in itertools.combinations(range(len(case)), strength)
    }


@pytest.mark.parametrize("strength", [1, 2])
@pytest.mark.parametrize("sizes", PRODUCTS, ids=str)
def test_every_value_or_pair_of_values_occurs(sizes, strength):
    cases = list(itertools.product(*map(range, sizes)))
    chosen = covering(cases, strength)
    assert chosen == sorted(set(chosen))
    assert together([cases[i] for i in chosen], strength) == together(cases, strength)


def test_few_cases_are_enough():
    def count(*sizes: int, strength: int = 2) -> int:
        return len(covering(list(itertools.product(*map(range, sizes))), strength))

    # no fewer are possible
    assert [count(2, 2, 2), count(3, 3, 3, 3), count(5, 4, 3), count(15, 5, 2)] == [4, 9, 20, 75]
    assert count(15, 5, strength=1) == 15


def test_values_occur_equally_often():
    chosen = covering(list(itertools.product(range(8), range(4))), 1)
    assert sorted(i % 4 for i in chosen) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_values_that_never_meet_are_not_asked_for():
    cases = [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 0, 0)]  # no (1, 1, …)
    assert together([cases[i] for i in covering(cases, 2)], 2) == together(cases, 2)


class Item:
    """As pytest collects a case of a test of three parameters."""

    def __init__(self, mark: str | None, ids: tuple[str, ...]) -> None:
        self.mark, self.nodeid = mark, f"tests/test_it.py::test_{mark}[{'-'.join(ids)}]"
        self.callspec = SimpleNamespace(_idlist=ids)

    def get_closest_marker(self, name: str) -> bool:
        return name == self.mark


def collected(mark: str | None) -> list[Item]:
    return [Item(mark, ids) for ids in itertools.product("abcd", ("0-0", "1-1", "2-2"), "xy")]


def thin(items: list[Item], whole: bool = False) -> list[Item]:
    """What is deselected."""
    deselected: list[Item] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    pytest_collection_modifyitems(SimpleNamespace(getoption=lambda _: whole, hook=hook), items)
    return deselected


@pytest.mark.parametrize(("whole", "counts"), [(False, [4, 12, 24]), (True, [24, 24, 24])])
def test_marked_tests_run_fewer_cases_unless_all_are_asked_for(whole, counts):
    marks = ("each_value", "pairs", None)
    items = [item for mark in marks for item in collected(mark)]
    deselected = thin(items, whole)
    assert [sum(item.mark == mark for item in items) for mark in marks] == counts
    assert len(deselected) == 3 * 24 - sum(counts)


@pytest.mark.pairs
@pytest.mark.parametrize("a", range(2))
@pytest.mark.parametrize(("b", "c"), [(0, 0), (0, 1), (1, 0)])
@pytest.mark.parametrize("d", [{}, {"e": 1}])
def test_pytest_names_the_values_of_each_decorator(request, a, b, c, d):
    assert request.node.callspec._idlist == [f"d{int(bool(d))}", f"{b}-{c}", str(a)]


def test_what_is_left_by_name_is_run():
    items = collected("pairs")[17:18]
    assert thin(items) == []
    assert len(items) == 1
