"""Tables in terminals of any width."""

from io import StringIO

import pytest
from rich.console import Console

from kvfold.fitting_table import FittingTable

COLUMNS = ("recipe", "bits", "tokens of a request", "kernel", "95 % interval", "why")
ROWS = (
    (
        "fold4",
        "4.16",
        "1,234,567",
        "gluon",
        "-35.6 (-47.5 to -23.8)",
        "evenly spaced levels are integers when multiplied",
    ),
    ("gtq-k3v3:block=64,score=mean,seed=12", "2.25", "8", "triton", "–", "[short]"),
)


def printed(table: FittingTable, width: int) -> list[str]:
    console = Console(width=width, file=StringIO())
    console.print(table)
    return console.file.getvalue().splitlines()


def filled() -> FittingTable:
    table = FittingTable("Some [title]", *COLUMNS)
    for row in ROWS:
        table.add_row(*row)
    return table


@pytest.mark.parametrize("width", [44, 60, 80, 100, 132, 200])
def test_no_cell_is_cut_in_any_terminal(width: int):
    lines = printed(filled(), width)
    assert lines[0] == "Some [title]"
    assert max(map(len, lines)) <= width
    shown = "\n".join(lines)
    assert "…" not in shown
    numbers = [cell for row in ROWS for cell in row[1:5]]
    for cell in (*COLUMNS, *numbers, "fold4", "gtq-k3v3:block=64,", "score=mean,seed=12", "[short]"):
        assert cell in shown, "a name, a number or a column is broken"
    assert all(word in shown for word in ROWS[0][5].split())


def test_what_does_not_fit_follows_with_the_first_column_again():
    table = FittingTable("", "measure", "first number", "second number")
    table.add_row("needles", "1", "2")
    rule = "─"
    assert [line.rstrip() for line in printed(table, 25)] == [
        "measure  first number",
        rule * 21,
        "needles             1",
        "",
        "measure  second number",
        rule * 22,
        "needles              2",
    ]


def test_columns_move_together_if_that_makes_them_fit():
    table = FittingTable("", "measure", "a", "b")
    table.add_row("needles", "1", "2")
    assert printed(table, 13)[0] == "measure  a  b"
    assert printed(table, 12)[0] == "measure a b"
    assert printed(table, 10)[0] == "measure  a"
