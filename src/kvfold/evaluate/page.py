"""The HTML page of a report: one file that asks for nothing else, and reads well on a phone, in the dark and on paper.

A section is there if what it shows was measured.
"""

import hashlib
import math
import re
import shlex
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from kvfold.evaluate.drawings import Point, fits_in, layer_bits, pareto, tails
from kvfold.evaluate.intervals import Interval, by_haystack, interval
from kvfold.evaluate.report import (
    COLUMNS,
    NOT_MEASURED,
    REFERENCE,
    Report,
    Row,
    Summary,
    cells_of,
    more_cells,
    more_columns,
    name_of,
    spell_kl,
    spell_perplexity,
    spell_share,
)
from kvfold.files import check_folder
from kvfold.recipes import BAD_EXAMPLE

if TYPE_CHECKING:
    from kvfold.artifact import CheckResult, Measure
    from kvfold.evaluate.needle import NeedleRow


def write_html(report: Report, path: Path, artifact: str | None = None, check: "CheckResult | None" = None) -> None:
    """Write the page of an evaluation, or of a check. `artifact` is named in the lines that serve its recipes."""
    check_folder(path)
    script = _file("page.js")
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    sections = (
        _verdict(report, check),
        "" if check else _headlines(report),
        _plots(report, check),
        _serve(report, artifact, check),
        _results(report),
        _found(report),
        _needles(report),
        _layers(report),
        _answers(report),
        _facts(report),
    )
    page = Template(_file("page.html")).substitute(
        model=escape(report.model),
        measured=escape(f"{report.text} · context {report.context:,} · {report.tokens:,} tokens"),
        script=script,
        digest=digest,
        sections="\n".join(filter(None, sections)),
    )
    path.write_text(page, encoding="utf-8")


def _file(name: str) -> str:
    return files("kvfold.evaluate").joinpath(name).read_text(encoding="utf-8")


def _section(heading: str, explained: str, *parts: str) -> str:
    """`explained` is HTML."""
    return "\n".join((f"<section>\n<h2>{heading}</h2>", f"<p>{explained}</p>", *parts, "</section>"))


# The sections.


def _verdict(report: Report, check: "CheckResult | None") -> str:
    if check is None:
        return ""
    row = report.ordered[-1]
    if check.verdict == "passed":
        smaller = f"{16 / report.bits(row):.1f} times smaller at {report.counted_at} tokens"
        why = f"Its cache is {smaller}, and it loses no more than is allowed."
    else:
        why = f"{escape(check.reasons)}."
    said = f"<strong>{escape(row.recipe)}: {check.verdict}.</strong> {why}"
    columns = ["measure", "verdict", "loss", "allowed", "95 %", "16 bits", "packed"]
    rows = [(measure.name, _cells(_measured(measure))) for measure in check.measures]
    blind = [measure.name for measure in check.measures if measure.blind]
    notes = [f"{', '.join(blind)}: 16 bits find too little here to tell what is lost."] if blind else []
    notes += ["More trials narrow the intervals."] if check.verdict == "not decided" else []
    return "\n".join(
        (
            f'<section id="verdict" class="{check.verdict.replace(" ", "-")}">',
            f"<p>{said} Checked on {check.date} at {check.context:,} tokens.</p>",
            _table(columns, rows),
            *(f'<p class="note">{escape(note)}</p>' for note in notes),
            "</section>",
        )
    )


def _measured(measure: "Measure") -> list[str]:
    spell: Callable[[float], str] = "{:.4f}".format if measure.unit == "nats" else lambda share: f"{100 * share:.1f} %"
    points: Callable[[float], str] = spell if measure.unit == "nats" else lambda share: f"{100 * share:.1f}"
    span = f"{points(measure.low)} to {points(measure.high)}"
    found = [spell(measure.reference), spell(measure.value)]
    return [measure.verdict, points(measure.loss), points(measure.allowed), _minus(span), *found]


def _headlines(report: Report) -> str:
    """Per recipe what is gained and what is lost."""
    tiles = [
        f"<div><h3>{_breakable(row.recipe)}</h3><p><b>{16 / row.bits_per_element_128k:.1f}×</b> smaller</p>"
        f"<p>at 128k tokens<br>{16 / row.bits_per_element_2k:.1f}× at 2k<br>"
        f"KL {spell_kl(row.kl)}<br>top-1 {100 * row.top1:.1f} %{'<br>a bad example' if _is_bad(row) else ''}</p></div>"
        for row in report.ordered[1:]
    ]
    return f'<div class="tiles">\n{"".join(tiles)}\n</div>' if tiles else ""


def _plots(report: Report, check: "CheckResult | None") -> str:
    rows = report.ordered
    if len(rows) == 1:
        return ""
    points = [Point(row.recipe, report.bits(row), row.kl, row is rows[0], _is_bad(row)) for row in rows]
    bad = "".join(f" {escape(row.recipe)} is a bad example, which the line leaves out." for row in rows if _is_bad(row))
    if check is not None:
        kl = check.measures[0].allowed
        name, dashed = f"allowed {kl:g}", "The dashed line is what is allowed."
    else:
        kl = report.noise_floor or 0.0
        name = f"noise floor {spell_kl(kl)}"
        dashed = "The dashed line is what the plain model differs by: below it, differences mean nothing."
    line = (name, kl) if fits_in(points, kl) else None
    tail = tails([(row.recipe, (row.kl, row.kl_99, row.kl_tail)) for row in rows[1:]])
    return f"""<section class="plots">
<figure><h2>Quality against memory</h2>
{pareto(points, line, report.counted_at)}
<figcaption>KL divergence from the 16-bit cache against bits. Lower and further left is better. No recipe beats a full
point in both: the line joins them. The diamond is the 16-bit cache.{bad} {dashed if line else ""}</figcaption></figure>
<figure><h2>Tails</h2>
{tail}
<figcaption>Most tokens lose little, and a few lose much. 1 token in 100 has a higher KL than the full diamond, 1 in
1,000 a higher one than the full circle.</figcaption></figure>
</section>"""


def _serve(report: Report, artifact: str | None, check: "CheckResult | None") -> str:
    """A line per recipe that engines serve, unless it is a bad example. None if the recipe has not passed its check."""
    if check is not None and check.verdict != "passed":
        return ""
    more = [*(["--artifact", artifact] if artifact else []), *(["--require-check"] if check is not None else [])]
    lines = [
        shlex.join(["kvfold", "serve", report.model, "-r", row.recipe, *more])
        for row in report.ordered[1:]
        if row.for_evaluation is None and (check is not None or not _is_bad(row))
    ]
    others = [
        f"<p class='note'>{escape(row.recipe)} is for evaluation: {escape(row.for_evaluation)}.</p>"
        for row in report.ordered[1:]
        if row.for_evaluation
    ]
    if check is None:
        said = "is there as a bad example, to show what 2 bits cost if nothing is done about it: do not serve it"
        others += [f"<p class='note'>{escape(row.recipe)} {said}.</p>" for row in report.ordered[1:] if _is_bad(row)]
    commands = [
        f'<div class="command"><code>{escape(line)}</code><button type="button" hidden>Copy</button></div>'
        for line in lines
    ]
    explained = "An OpenAI server with vLLM. <code>--engine sglang</code> takes SGLang."
    return _section("Serve it", explained, *commands, *others) if lines else ""


def _is_bad(row: Row) -> bool:
    return row.recipe.partition(":")[0] == BAD_EXAMPLE


def _results(report: Report) -> str:
    columns = [*COLUMNS, *more_columns(report)]
    rows = [[*cells_of(row, report), *more_cells(row)] for row in report.ordered]
    measured = [i for i in range(len(columns)) if any(row[i] != NOT_MEASURED for row in rows)]
    named = [
        (name_of(row, report), _cells(cells[i] for i in measured))
        for row, cells in zip(report.ordered, rows, strict=True)
    ]
    explained = "Every recipe beside the 16-bit cache of the same model, on the same text."
    return _section("Results", explained, _table(["recipe", *(columns[i] for i in measured)], named))


def _found(report: Report) -> str:
    """A table per measure and length: what was found in haystacks, and the difference to the reference."""
    summaries = [(row.recipe, report.summaries(row)) for row in report.ordered]
    tables = []
    for measure, length in dict.fromkeys((one.measure, one.length) for one in summaries[0][1]):
        chosen = [
            (recipe, [one for one in some if (one.measure, one.length) == (measure, length)])
            for recipe, some in summaries
        ]
        texts = [one.text for one in chosen[0][1]]
        columns = ["recipe", *texts, f"against {REFERENCE}, points"]
        rows = [(recipe, [*map(_heat, (one.found for one in some)), _against(some[0])]) for recipe, some in chosen]
        count = chosen[0][1][0].found.haystacks
        title = f"{measure.capitalize()} after {length:,} tokens, {count} haystacks"
        tables.append(_heat_map(title, columns, rows))
    explained = (
        "<em>Needles</em>: the share of hidden facts that was found. <em>Valid calls</em>: tool calls in JSON that "
        "could be run. <em>Exact calls</em>: those with every argument right. Small numbers are 95 % intervals over "
        "haystacks. If the interval of a difference holds 0, the two caches are not told apart."
    )
    return _section("Long contexts", explained, '<div class="maps heat">', *tables, "</div>") if tables else ""


def _against(summary: Summary) -> str:
    found = summary.difference
    if found is None:
        return f"<td>{NOT_MEASURED}</td>"
    mean, low, high = (100 * number for number in (found.mean, found.low, found.high))
    return _minus(f"<td>{mean:+.1f}<small>{low:+.0f} to {high:+.0f}</small></td>")


def _needles(report: Report) -> str:
    """Heat maps of recipes against depth: of the short haystacks, and of each length of the suite. Then by task."""
    short = [(row.recipe, row.needle_by_depth) for row in report.ordered if row.needle_by_depth]
    suites = [(row.recipe, row.suite) for row in report.ordered if row.suite]
    maps = []
    if short:
        depths = list(short[0][1])
        rows = [(recipe, [_heat(found[depth]) for depth in depths]) for recipe, found in short]
        maps.append(("In short haystacks, by depth", ["recipe", *depths], rows))
    if suites:
        first = suites[0][1]
        for length in dict.fromkeys(cell.length for cell in first):
            there = [(recipe, [cell for cell in cells if cell.length == length]) for recipe, cells in suites]
            shares = [f"{depth:.0%}" for depth in dict.fromkeys(cell.depth for cell in first)]
            maps.append((f"In {length:,} tokens, by depth", *_map(there, "depth", shares)))
        maps.append(("By task", *_map(suites, "task", list(dict.fromkeys(cell.task for cell in first)))))
    tasks = (
        " Tasks ask for one fact alone (<em>single</em>), one among lookalikes (<em>distractor</em>), one of several "
        "(<em>multi</em>), three that stand together (<em>m-key</em>), three values of one key (<em>m-value</em>), and "
        "several all over the text (<em>m-query</em>)."
    )
    explained = (
        "Facts are hidden in a text and asked for at its end. The stronger the colour, the more were found. "
        "Columns say how deep a fact was hidden." + (f"{tasks} Small numbers are 95 % intervals." if suites else "")
    )
    tables = [_heat_map(*one) for one in maps]
    return _section("Needles", explained, '<div class="maps heat">', *tables, "</div>") if tables else ""


def _map(
    suites: "list[tuple[str, list[NeedleRow]]]", field: str, names: list[str]
) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Columns and rows of a heat map: recipes against the values of a field."""
    values = list(dict.fromkeys(getattr(cell, field) for cell in suites[0][1]))

    def found(cells: "list[NeedleRow]", value: object) -> Interval:
        return interval(by_haystack((cell.haystack, cell.score) for cell in cells if getattr(cell, field) == value))

    return ["recipe", *names], [(recipe, [_heat(found(cells, value)) for value in values]) for recipe, cells in suites]


def _layers(report: Report) -> str:
    packed = [(row, row.layer_bits) for row in report.ordered[1:] if row.layer_bits]
    if not packed:
        return ""
    most = math.ceil(max(max(layer.keys, layer.values) for _, layers in packed for layer in layers))
    figures = []
    for row, layers in packed:
        keys, values = (
            sum(side) / len(layers) for side in zip(*((one.keys, one.values) for one in layers), strict=True)
        )
        figures.append(
            f"<figure><h3>{_breakable(row.recipe)}</h3><p class='legend'><i class='keys'></i>keys {keys:.2f} "
            f"<i class='values'></i>values {values:.2f}</p>{layer_bits(layers, most)}</figure>"
        )
    explained = "Bits of each number, metadata included, the open block not. Keys upwards, values downwards."
    return _section("Bits per layer", explained, f'<div class="maps small">{"".join(figures)}</div>')


def _answers(report: Report) -> str:
    said = [(row, row.answer) for row in report.ordered if row.answer is not None]
    if not said or report.question is None:
        return ""
    expected = report.reference.answer or ""
    cards = [
        f"<figure><h3>{_breakable(name_of(row, report))}</h3>"
        f"<blockquote>{_departed(answer, expected)}</blockquote></figure>"
        for row, answer in said
    ]
    explained = (
        f"Every cache read the beginning of the text and was asked: <em>{escape(report.question)}</em> "
        "Words are marked from the first one on that the 16-bit cache does not give."
    )
    return _section("Answers", explained, f'<div class="maps small">{"".join(cards)}</div>')


def _departed(answer: str, expected: str) -> str:
    """The answer, marked from the first word on that is not as expected."""
    words, others = (re.findall(r"\s*\S+", text) for text in (answer, expected))
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(words, others, strict=False)))
    kept, rest = (escape("".join(part).strip()) for part in (words[:same], words[same:]))
    if same < len(others) and not rest:
        rest = "(ends here)"
    return f"{kept} <mark>{rest}</mark>" if rest else kept


def _facts(report: Report) -> str:
    facts = {
        "Model": report.model,
        "Text": report.text,
        "Context": f"{report.context:,} tokens",
        "Scored": f"{report.tokens:,} tokens",
        "Noise floor": f"KL {spell_kl(report.noise_floor)}" if report.noise_floor is not None else None,
        "Plain model": f"perplexity {spell_perplexity(report.plain_perplexity)}" if report.plain_perplexity else None,
        **report.versions,
    }
    shown = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(fact)}</dd></div>" for key, fact in facts.items() if fact)
    return f'<section>\n<h2>How this was measured</h2>\n<dl class="facts">{shown}</dl>\n</section>'


# Tables.


def _heat_map(title: str, columns: Sequence[str], rows: Sequence[tuple[str, list[str]]]) -> str:
    return f'<figure style="--columns:{len(columns) - 1}"><h3>{title}</h3>{_table(columns, rows)}</figure>'


def _heat(found: Interval | float) -> str:
    """A cell that is the darker, the more was found."""
    if isinstance(found, Interval):
        share, small = found.mean, f"<small>{100 * found.low:.0f}–{100 * found.high:.0f}</small>"
    else:
        share, small = found, ""
    return f'<td style="--found:{share:.0%}">{spell_share(share)}{small}</td>'


def _minus(numbers: str) -> str:
    return numbers.replace("-", "−")


def _cells(texts: Iterable[str]) -> list[str]:
    return [f"<td>{escape(text)}</td>" for text in texts]


def _breakable(name: str) -> str:
    return re.sub("([:,])", r"\1<wbr>", escape(name))


def _table(columns: Sequence[str], rows: Sequence[tuple[str, list[str]]]) -> str:
    """A row is a name and its cells. Cells are HTML."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "\n".join(f'<tr><th scope="row">{_breakable(name)}</th>{"".join(cells)}</tr>' for name, cells in rows)
    return f'<div class="scroll" tabindex="0"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'
