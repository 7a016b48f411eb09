"""What commands print and write: tables, progress bars, files of rows."""

import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kvfold.files import append_rows

if TYPE_CHECKING:
    from kvfold.artifact import CheckResult
    from kvfold.evaluate.report import Report

out, err = Console(), Console(stderr=True)

STYLES = {"passed": "", "failed": "bold red", "not decided": "bold yellow"}  # of verdicts
WORDS = (
    "recipe",
    "what it is",
    "needs",
    "op",
    "kernel",
    "why",
    "measure",
    "part",
    "found",
)  # other columns hold numbers


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """A table for the terminal. What is too wide is wrapped, or folded within a word: no cell is cut."""
    shown = Table(
        title=Text(title) if title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for column in columns:
        shown.add_column(column, justify="left" if column in WORDS else "right", overflow="fold")
    for row in rows:
        shown.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return shown


def report_tables(report: "Report") -> Group:
    """What was measured, what was found in haystacks, and what it was measured on."""
    from kvfold.evaluate.report import SUMMARY_COLUMNS, columns_of, name_of, spell_kl, summary_rows

    caption = (
        "Bits are those allocated for each number in the cache. "
        f"Noise floor: KL {spell_kl(report.noise_floor)} of the plain model against the 16-bit cache. "
        "Below it, differences mean nothing.\n"
        f"{report.model} · {report.text} · context {report.context:,} · {report.tokens:,} tokens"
    )
    names = [name_of(row, report) for row in report.ordered]
    tables = [table("", ["recipe", *group], zip(names, *group.values(), strict=True)) for group in columns_of(report)]
    if report.summaries(report.reference):
        tables.append(table("", ["recipe", *SUMMARY_COLUMNS], summary_rows(report)))
    return Group(*(part for one in tables for part in (one, "")), Text(caption, style="table.caption"))


def check_table(title: str, result: "CheckResult") -> Table:
    """The measures of a check, each with what is allowed. Shares are in percent, their losses in points."""
    title = f"{title} at {result.context:,} tokens, {result.date}"
    columns = ("measure", "16 bits", "packed", "loss", "95 % interval", "allowed", "verdict")
    rows: list[tuple[str | Text, ...]] = []
    for measure in result.measures:
        spell = "{:.4f}".format if measure.unit == "nats" else lambda share: f"{100 * share:.1f}"
        interval = f"{spell(measure.low)} to {spell(measure.high)}"
        numbers = map(spell, (measure.reference, measure.value, measure.loss))
        verdict = Text(measure.verdict, style=STYLES[measure.verdict])
        rows.append((measure.name, *numbers, interval, spell(measure.allowed), verdict))
    return table(title, columns, rows)


@contextmanager
def progress(what: str) -> Iterator[Callable[[float], None]]:
    """A progress bar on the error stream. Yields a function that advances it by a share of 1."""
    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda share: bar.advance(task, share)


def collect_rows(
    what: str,
    run: Callable[[Callable[[float], None]], Iterable[Any]],
    json_file: str | None,
    csv_file: Path | None,
    add: bool = False,
) -> list[dict[str, Any]]:
    """The rows of a run. Each is written to the CSV file as it comes, or added to it. If the run fails, its rows so far
    are written to the JSON file too. An older file stays until there is a row."""
    rows: list[dict[str, Any]] = []
    try:
        with progress(what) as advance:
            for row in map(asdict, run(advance)):
                rows.append(row)
                (add_to_csv if add or len(rows) > 1 else write_csv)(csv_file, [row])
    except BaseException:
        if rows and json_file != "-":
            write_json(json_file, rows)
        raise
    return rows


def write_json(file: str | None, rows: list[dict[str, Any]]) -> bool:
    """Write rows to a file, or with `-` to the terminal. True if they went to the terminal, in place of a table."""
    if file is None:
        return False
    text = json.dumps(rows, indent=2)
    if file == "-":
        sys.stdout.write(text + "\n")
    else:
        Path(file).write_text(text + "\n")
    return file == "-"


def write_csv(file: Path | None, rows: list[dict[str, Any]]) -> None:
    """Write one line per row. Columns of lists or dictionaries are left out."""
    if file is None:
        return
    columns = list(_flat(rows[0]))
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def add_to_csv(file: Path | None, rows: list[dict[str, Any]]) -> None:
    """The same, behind the lines that are there."""
    if file is not None:
        append_rows(file, list(map(_flat, rows)))


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not isinstance(value, dict | list)}
