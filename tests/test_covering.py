"""Which cases of a cross product are run."""

import itertools
from types import SimpleNamespace

import pytest
from covering import covering, pytest_collection_modifyitems


def together(cases, strength):
    """The values of `strength` parameters that meet in a case."""
    return {
        (axes, tuple(case[axis] for axis in axes))
        for case in cases
        for axes in itertools.combinations(range(len(case)), strength)
    }


@pytest.mark.parametrize(("sizes", "fewest"), [((2, 2, 2), 4), ((3, 3, 3, 3), 9), ((5, 4, 3), 20), ((1, 6, 2), 12)])
def test_every_value_and_pair_of_values_occurs_in_few_cases(sizes, fewest):
    cases = list(itertools.product(*map(range, sizes)))
    for strength, count in ((1, max(sizes)), (2, fewest)):
        chosen = covering(cases, strength)
        assert len(chosen) == count
        assert together([cases[i] for i in chosen], strength) == together(cases, strength)


class Item:
    """As pytest collects a case of a test of three parameters."""

    def __init__(self, mark: str | None, ids: tuple[str, ...]) -> None:
        self.mark, self.nodeid = mark, f"tests/test_it.py::test_{mark}[{'-'.join(ids)}]"
        self.callspec = SimpleNamespace(_idlist=ids)

    def get_closest_marker(self, name: str) -> bool:
        return name == self.mark


@pytest.mark.parametrize(("whole", "counts"), [(False, [4, 12, 24]), (True, [24, 24, 24])])
def test_marked_tests_run_fewer_cases_unless_all_are_asked_for(whole, counts):
    marks, hook = ("each_value", "pairs", None), SimpleNamespace(pytest_deselected=lambda items: None)
    items = [Item(mark, ids) for mark in marks for ids in itertools.product("abcd", ("0-0", "1-1", "2-2"), "xy")]
    pytest_collection_modifyitems(SimpleNamespace(getoption=lambda _: whole, hook=hook), items)
    assert [sum(item.mark == mark for item in items) for mark in marks] == counts


@pytest.mark.pairs
@pytest.mark.parametrize("a", range(2))
@pytest.mark.parametrize(("b", "c"), [(0, 0), (0, 1), (1, 0)])
@pytest.mark.parametrize("d", [{}, {"e": 1}])
def test_pytest_names_the_values_of_each_decorator(request, a, b, c, d):
    assert request.node.callspec._idlist == [f"d{int(bool(d))}", f"{b}-{c}", str(a)]
