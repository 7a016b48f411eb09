"""FittingTable: a table for the terminal. Whatever the terminal's width, no cell is cut."""

import re
import textwrap
from collections.abc import Iterator

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

LEFT = ("recipe", "needs", "key dims×bits", "value dims×bits", "op", "kernel", "measure", "part")  # columns of words
PROSE = ("what it is", "why", "found")  # columns of sentences
NAME, SENTENCE = 24, 30  # characters: of a recipe's name in one line, at most, and of a line of a sentence, at least


class FittingTable:
    """Columns that do not fit beside the others follow in a further table, which begins with the first column again.

    Columns stand two spaces apart, or one if that makes them fit. Sentences wrap, and recipes with options break after
    a colon or a comma. Columns of words are left-justified, columns of numbers right-justified.
    """

    def __init__(self, title: str, *columns: str) -> None:
        self.title, self.columns = title, columns
        self.rows: list[tuple[list[Text], str]] = []  # with a style

    def add_row(self, *cells: str | Text, style: str = "") -> None:
        named = zip(self.columns, cells, strict=True)
        broken = (broken_name(str(cell)) if column == "recipe" else cell for column, cell in named)
        self.rows.append(([cell if isinstance(cell, Text) else Text(cell) for cell in broken], style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title, style="table.title")
        for i, part in enumerate(self._parts(options.max_width)):
            if i:
                yield Text()
            yield part

    def _parts(self, width: int) -> Iterator[Table]:
        wanted = [max(map(_width, texts)) for texts in zip(self.columns, *(row for row, _ in self.rows), strict=True)]
        least = [min(own, SENTENCE) if self.columns[i] in PROSE else own for i, own in enumerate(wanted)]
        gap = 1 if sum(least) + len(least) - 1 <= width < sum(least) + 2 * (len(least) - 1) else 2
        begin, taken = 1, least[0]
        for i, own in enumerate(least):
            if i > begin and taken + gap + own > width:
                yield self._part([0, *range(begin, i)], least, wanted, width, gap)
                begin, taken = i, least[0]
            taken += gap + own if i else 0
        yield self._part([0, *range(begin, len(least))], least, wanted, width, gap)

    def _part(self, numbers: list[int], least: list[int], wanted: list[int], width: int, gap: int) -> Table:
        left = width - sum(least[i] for i in numbers) - gap * (len(numbers) - 1)
        table = Table(box=box.SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False)
        for i in numbers:
            column = self.columns[i]
            table.add_column(
                column,
                justify="left" if column in LEFT or column in PROSE else "right",
                vertical="top" if any(self.columns[i] in PROSE for i in numbers) else "bottom",
                width=min(wanted[i], least[i] + max(left, 0)),
                overflow="fold",
            )
        for row, style in self.rows:
            table.add_row(*(row[i] for i in numbers), style=style)
        return table


def _width(cell: str | Text) -> int:
    return max(map(cell_len, str(cell).split("\n")))


def broken_name(recipe: str) -> str:
    """Lines of at most 24 characters. They break after a colon or a comma if there is one."""
    lines = textwrap.fill(re.sub("([:,])", r"\1 ", recipe), NAME, break_on_hyphens=False)
    return re.sub("([:,]) ", r"\1", lines)
