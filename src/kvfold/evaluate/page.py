"""The HTML page of a report: one file that asks for nothing else, and reads well on a phone, in the dark and on paper.

This prepares its tables. page.html is the template: a section is there if what it shows was measured.
"""

import hashlib
import re
import shlex
from base64 import b64encode
from collections.abc import Sequence
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvfold.evaluate.drawings import pareto, tails
from kvfold.evaluate.intervals import Interval, by_haystack, interval
from kvfold.evaluate.report import REFERENCE, Report, columns_of, name_of, spell_kl, spell_perplexity, spell_share
from kvfold.files import check_folder

try:
    from jinja2 import Environment, StrictUndefined
except ImportError:
    raise ImportError("the HTML page needs jinja2: pip install 'kvfold[report]'") from None

if TYPE_CHECKING:
    from kvfold.artifact import CheckResult
    from kvfold.evaluate.needle import NeedleRow


class Table(NamedTuple):
    """What was found, as an interval or a number, is spelled by the template. The more, the stronger is its colour."""

    columns: list[str]
    rows: Sequence[tuple[str, Sequence[str | float | Interval]]]  # the name of a row, and its cells
    title: str = ""
    against: list[Interval | None] | None = None  # the differences to the reference, row by row


def write_html(report: Report, path: Path, artifact: str | None = None, check: "CheckResult | None" = None) -> None:
    """Write the page of an evaluation, or of a check. `artifact` is named in the lines that serve its recipes."""
    check_folder(path)
    template, script = (files("kvfold.evaluate").joinpath(name).read_text("utf-8") for name in ("page.html", "page.js"))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"kl": spell_kl, "perplexity": spell_perplexity, "share": spell_share, "shell": shlex.join}
    line, recipes = _line(report, check), report.ordered[1:]
    page = environment.from_string(template).render(
        report=report,
        check=check,
        artifact=artifact,
        recipes=recipes,
        line=line,
        plots=(pareto(report, line), tails(recipes)) if recipes else (),
        results=_results(report),
        found=_found(report),
        needles=_needles(report),
        answers=_answers(report),
        script=script,
        digest=b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    path.write_text(page, encoding="utf-8")


def _line(report: Report, check: "CheckResult | None") -> tuple[str, float] | None:
    """The dashed line of the plot: what is allowed, or the noise floor. None if it would squeeze the points."""
    kl = check.measures[0].allowed if check else report.noise_floor or 0.0
    name = f"allowed {kl:g}" if check else f"noise floor {spell_kl(kl)}"
    return (name, kl) if kl > min((row.kl for row in report.rows if row.kl > 0), default=0.0) / 1000 else None


def _results(report: Report) -> Table:
    columns = {name: cells for group in columns_of(report) for name, cells in group.items()}
    names = [name_of(row, report) for row in report.ordered]
    return Table(["recipe", *columns], [(name, cells) for name, *cells in zip(names, *columns.values(), strict=True)])


def _found(report: Report) -> list[Table]:
    """A table per measure and length: what was found in haystacks, and the difference to the reference."""
    rows = [(row.recipe, report.summaries(row)) for row in report.ordered]
    tables = []
    for measure, length in dict.fromkeys((one.measure, one.length) for one in rows[0][1]):
        chosen = [
            (recipe, [one for one in some if (one.measure, one.length) == (measure, length)]) for recipe, some in rows
        ]
        texts = chosen[0][1]
        columns = ["recipe", *(one.text for one in texts), f"against {REFERENCE}, points"]
        title = f"{measure.capitalize()} after {length:,} tokens, {texts[0].found.haystacks} haystacks"
        found = [(recipe, [one.found for one in some]) for recipe, some in chosen]
        tables.append(Table(columns, found, title, [some[0].difference for _, some in chosen]))
    return tables


def _needles(report: Report) -> list[Table]:
    """Recipes against depth: of the short haystacks, and of each length of the suite. Then by task."""
    tables = []
    if depths := report.reference.needle_by_depth:
        rows = [(row.recipe, list(row.needle_by_depth.values())) for row in report.ordered if row.needle_by_depth]
        tables.append(Table(["recipe", *depths], rows, "In short haystacks, by depth"))
    suites = {row.recipe: row.suite for row in report.ordered if row.suite}
    for length in dict.fromkeys(cell.length for cell in report.reference.suite or ()):
        there = {recipe: [cell for cell in cells if cell.length == length] for recipe, cells in suites.items()}
        tables.append(_by("depth", "{:.0%}", there, f"In {length:,} tokens, by depth"))
    return [*tables, _by("task", "{}", suites, "By task")] if suites else tables


def _by(field: str, name: str, suites: "dict[str, list[NeedleRow]]", title: str) -> Table:
    """Recipes against the values of a field."""
    values = dict.fromkeys(getattr(cell, field) for cells in suites.values() for cell in cells)
    rows = []
    for recipe, cells in suites.items():
        chosen = ([cell for cell in cells if getattr(cell, field) == value] for value in values)
        rows.append((recipe, [interval(by_haystack((cell.haystack, cell.score) for cell in some)) for some in chosen]))
    return Table(["recipe", *map(name.format, values)], rows, title)


def _answers(report: Report) -> list[tuple[str, str, str]]:
    """Names, and answers in two parts: the second begins with the first word that is not as expected."""
    said = [(row, row.answer) for row in report.ordered if row.answer is not None and report.question is not None]
    expected, result = re.findall(r"\s*\S+", report.reference.answer or ""), []
    for row, answer in said:
        words = re.findall(r"\s*\S+", answer)
        same = len([*takewhile(lambda pair: pair[0] == pair[1], zip(words, expected, strict=False))])
        kept, rest = ("".join(part).strip() for part in (words[:same], words[same:]))
        result.append((name_of(row, report), kept, rest or ("(ends here)" if same < len(expected) else "")))
    return result
