"""`kvfold selftest`: every kernel against its definition."""

from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.text import Text

from kvfold.cli.inputs import check_files
from kvfold.cli.options import CsvFile, JsonFile, Target
from kvfold.cli.output import collect_rows, out, table, write_json


def selftest(target: Target = None, json_file: JsonFile = None, csv_file: CsvFile = None) -> None:
    """Check every kernel that a recipe can get on this device against its definition.

    Example: `kvfold selftest --csv selftest.csv`
    """
    from kvfold.bench import selftest as run

    check_files(json_file, csv_file)
    rows = collect_rows("Checking", lambda advance: run.run(advance, target), json_file, csv_file)
    if not write_json(json_file, rows):
        _print_checks(rows)
    if wrong := [row for row in rows if not row["ok"]]:
        first = wrong[0]
        raise ValueError(
            f"{len(wrong)} of {len(rows)} checks are WRONG on {first['device']}, the first in {first['path']} of "
            f"{first['recipe']} by {first['kernel']}: {first['problem']}"
        )


def _print_checks(rows: list[dict[str, Any]]) -> None:
    """One table per path, kernel and reason."""
    choice = itemgetter("path", "kernel", "reason")
    paths = list(dict.fromkeys(row["path"] for row in rows))
    ordered = sorted(rows, key=lambda row: (paths.index(row["path"]), choice(row)))
    for (path, kernel, reason), group in groupby(ordered, choice):
        shown = []
        for row in group:
            numbers = ("–" if row[name] is None else f"{row[name]:.1e}" for name in ("error", "allowed_error"))
            dims = "/".join(map(str, dict.fromkeys((row["head_dim"], row["value_dim"]))))
            shape = f"{row['q_heads']}:{row['kv_heads']}, {dims}, {row['page']}"
            shown.append((row["recipe"], shape, *numbers, "ok" if row["ok"] else Text("WRONG", style="bold red")))
        columns = ("recipe", "heads, d, page", "error", "allowed", "")
        out.print(table(f"{path}: {kernel}, since {reason}", columns, shown), "")
    first = rows[0]
    out.print(
        f"{sum(row['ok'] for row in rows)} of {len(rows)} checks are ok on {first['device']} with kvfold "
        f"{first['kvfold']}, torch {first['torch']} and triton {first['triton'] or '–'}.",
        highlight=False,
    )
