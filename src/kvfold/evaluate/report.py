"""The results of an evaluation: a table for the terminal, rows for JSON, and a self-contained HTML page."""

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files
from io import StringIO
from pathlib import Path
from statistics import fmean
from string import Template
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from kvfold.evaluate.intervals import Interval, by_haystack, difference, interval
from kvfold.fitting_table import FittingTable, broken_name

if TYPE_CHECKING:
    from kvfold.evaluate.layer_attention import LayerRow
    from kvfold.evaluate.needle import NeedleRow
    from kvfold.evaluate.tool_calls import ToolCallRow

REFERENCE = "bf16"
ALL_TEXTS = "all texts"


@dataclass(frozen=True)
class Row:
    """One recipe. Shares (`top1`, `copy`, `needle`, `gsm8k`) lie between 0 and 1. None: not measured."""

    recipe: str
    bits_per_element_2k: float
    bits_per_element_128k: float
    slot_bytes: int
    perplexity: float
    kl: float
    kl_tail: float  # the 99.9th percentile
    top1: float
    tokens: int
    copy: float | None
    needle: float | None
    needle_by_depth: dict[str, float] | None
    perplexity_beyond_16k: float | None = None  # of the tokens that read more than 16,384 others
    kl_beyond_16k: float | None = None
    kl_tail_beyond_16k: float | None = None
    suite: "list[NeedleRow] | None" = None  # the needle suite
    tool_calls: "list[ToolCallRow] | None" = None
    gsm8k: float | None = None
    gsm8k_error: float | None = None  # the standard error
    tasks: dict[str, float] | None = None  # scores of lm-eval, by task and metric
    layers: "list[LayerRow] | None" = None  # effects of quantized keys on attention, per layer


@dataclass(frozen=True)
class Summary:
    """What one recipe found in the haystacks of one length, with 95 % intervals over haystacks."""

    measure: str
    text: str
    length: int
    found: Interval
    difference: Interval | None  # to the reference, on the same haystacks


# What is measured in haystacks: pairs of haystack and score. A haystack begins with its text and length.
MEASURES: dict[str, Callable[[Row], list[tuple[Any, float]]]] = {
    "needles": lambda row: [(cell.haystack, cell.score) for cell in row.suite or ()],
    "valid calls": lambda row: [(call.haystack, float(call.valid)) for call in row.tool_calls or ()],
    "exact calls": lambda row: [(call.haystack, float(call.exact)) for call in row.tool_calls or ()],
}


@dataclass(frozen=True)
class Report:
    model: str
    text: str
    context: int
    tokens: int
    noise_floor: float  # KL of the model with transformers' own cache from the model with 16-bit pages
    plain_perplexity: float  # of the model with transformers' own cache
    versions: dict[str, str]
    rows: list[Row]

    @property
    def reference(self) -> Row:
        for row in self.rows:
            if row.recipe == REFERENCE:
                return row
        raise ValueError(f"the report has no {REFERENCE} row to compare with")

    @property
    def ordered(self) -> list[Row]:
        """The reference, then the others as they came."""
        return [self.reference, *(row for row in self.rows if row is not self.reference)]

    def increase(self, row: Row) -> float:
        """How far the perplexity is above that of the reference, in percent."""
        return 100 * (row.perplexity / self.reference.perplexity - 1)

    def summaries(self, row: Row) -> list[Summary]:
        """Per measure and length: all texts, then each text if there are several."""
        result = []
        for measure, scores in MEASURES.items():
            own, reference = (by_haystack(scores(each)) for each in (row, self.reference))
            texts, lengths = (list(dict.fromkeys(key[place] for key in own)) for place in (0, 1))
            for length in lengths:
                for text in [ALL_TEXTS, *(texts if len(texts) > 1 else ())]:
                    there = [key for key in own if key[1] == length and text in (ALL_TEXTS, key[0])]
                    some, expected = ({key: each[key] for key in there} for each in (own, reference))
                    against = None if row is self.reference else difference(some, expected)
                    result.append(Summary(measure, text, length, interval(some), against))
        return result


def table(report: Report) -> Group:
    caption = (
        "Bits are those allocated for each number in the cache. "
        f"Noise floor: KL {_kl(report.noise_floor)} of the plain model against the 16-bit cache. "
        "Below it, differences mean nothing.\n"
        f"{report.model} · {report.text} · context {report.context:,} · {report.tokens:,} tokens"
    )
    measured, more = FittingTable("", "recipe", *COLUMNS), FittingTable("", "recipe", *_more_columns(report))
    for row in report.ordered:
        name, style = _name(row, report), "bold" if row is report.reference else ""
        measured.add_row(name, *_cells(row, report), style=style)
        more.add_row(name, *_more_cells(row), style=style)
    shown: list[RenderableType] = [measured, Text(), more, Text()]
    if report.summaries(report.reference):
        shown += [_summary_table(report), Text()]
    return Group(*shown, Text(caption, style="table.caption"))


def _summary_table(report: Report) -> FittingTable:
    result = FittingTable("", "recipe", *SUMMARY_COLUMNS)
    for row in report.ordered:
        for i, summary in enumerate(one for one in report.summaries(row) if one.text == ALL_TEXTS):
            name = "" if i else _name(row, report)
            result.add_row(name, *_summary_cells(summary), style="bold" if row is report.reference else "")
    return result


def rows(report: Report) -> list[dict[str, Any]]:
    """Tidy rows for JSON and CSV. Each has the model, text and versions. Numbers that are not finite become None."""
    common = {
        "model": report.model,
        "text": report.text,
        "context": report.context,
        "noise_floor": report.noise_floor,
        "plain_perplexity": report.plain_perplexity,
        **report.versions,
    }
    return [
        {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
        for row in ({**asdict(row), **_summary_fields(report.summaries(row)), **common} for row in report.ordered)
    ]


def _summary_fields(summaries: list[Summary]) -> dict[str, Any]:
    """All texts as fields with a number each, since CSV has no others, and every summary in a list."""
    fields: dict[str, Any] = {}
    for summary in summaries:
        if summary.text == ALL_TEXTS:
            name = f"{summary.measure.replace(' ', '_')}_{summary.length}"
            found, against = summary.found, summary.difference
            fields |= {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}
            for end in ("mean", "low", "high"):
                field = f"{name}_difference" if end == "mean" else f"{name}_difference_{end}"
                fields[field] = getattr(against, end, None)
    return {**fields, "summaries": [asdict(summary) for summary in summaries]}


def write_html(report: Report, path: Path) -> None:
    kl_plot, perplexity_plot = _plots(report)
    facts = {
        "Model": report.model,
        "Text": report.text,
        "Context": f"{report.context:,} tokens",
        "Scored": f"{report.tokens:,} tokens",
        "Noise floor": f"KL {_kl(report.noise_floor)}",
        "Plain model": f"perplexity {_perplexity(report.plain_perplexity)}",
        **report.versions,
    }
    page = _filled(
        "report.html",
        model=escape(report.model),
        noise=_kl(report.noise_floor),
        kl_plot=kl_plot,
        perplexity_plot=perplexity_plot,
        results=_results(report),
        needle=_needle(report) + _intervals(report) + _suite(report),
        facts="".join(f"<div><dt>{escape(key)}</dt><dd>{escape(fact)}</dd></div>" for key, fact in facts.items()),
    )
    _write(page, path)


def _write(text: str, path: Path) -> None:
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}")
    path.write_text(text, encoding="utf-8")


# Numbers as people read them.

LAYER_NUMBERS = ("softmax_kl", "top10", "logit_mae")
COLUMNS = ["bits\nat 2k", "bits\nat 128k", "perplexity", "increase", "KL", "KL\n99.9 %", "top-1"]
BEYOND_COLUMNS = ["perplexity\n> 16k", "KL\n> 16k", "KL 99.9 %\n> 16k"]
SUMMARY_COLUMNS = ["measure", "tokens", "share", "95 %", f"against {REFERENCE}, points"]


def _cells(row: Row, report: Report) -> list[str]:
    return [
        f"{row.bits_per_element_2k:.2f}",
        f"{row.bits_per_element_128k:.2f}",
        _perplexity(row.perplexity),
        "–" if row is report.reference else _increase(report.increase(row)),
        _kl(row.kl),
        _kl(row.kl_tail),
        f"{100 * row.top1:.1f} %",
    ]


def _name(row: Row, report: Report) -> str:
    return f"{row.recipe} (reference)" if row is report.reference else row.recipe


def _more_columns(report: Report) -> list[str]:
    """Copying, needles, and the columns of optional measurements, which are made for all recipes or for none."""
    measured = report.reference
    gsm8k = ["GSM8K"] if measured.gsm8k is not None else []
    layers = ["attention\nKL", "top-10\nkept", "logit\nerror"] if measured.layers else []
    beyond = BEYOND_COLUMNS if measured.kl_beyond_16k is not None else []
    return ["copy", "needle", *beyond, *layers, *gsm8k, *(task.replace(" ", "\n") for task in measured.tasks or ())]


def _more_cells(row: Row) -> list[str]:
    gsm8k = [] if row.gsm8k is None else [f"{100 * row.gsm8k:.1f} %" + _error(row.gsm8k_error)]
    layers, beyond = [], []
    if row.layers:
        kl, top, error = (fmean(getattr(layer, name) for layer in row.layers) for name in LAYER_NUMBERS)
        layers = [_kl(kl), _share(top), f"{error:.3g}"]
    if row.perplexity_beyond_16k is not None and row.kl_beyond_16k is not None and row.kl_tail_beyond_16k is not None:
        beyond = [_perplexity(row.perplexity_beyond_16k), _kl(row.kl_beyond_16k), _kl(row.kl_tail_beyond_16k)]
    found = [_share(row.copy), _share(row.needle)]
    return [*found, *beyond, *layers, *gsm8k, *(f"{score:.3f}" for score in (row.tasks or {}).values())]


def _summary_cells(summary: Summary) -> list[str]:
    found, against = summary.found, summary.difference
    points = "–"
    if against is not None:
        points = f"{100 * against.mean:+.1f} ({100 * against.low:+.1f} to {100 * against.high:+.1f})"
    share, low, high = (100 * number for number in (found.mean, found.low, found.high))
    return [summary.measure, f"{summary.length:,}", f"{share:.1f} %", f"{low:.0f} to {high:.0f}", points]


def _error(number: float | None) -> str:
    return "" if number is None else f" ± {100 * number:.1f}"


def _decimals(number: float) -> int:
    return 2 if abs(number) < 1000 else 0


def _perplexity(number: float) -> str:
    return f"{number:,.{_decimals(number)}f}"


def _increase(percent: float) -> str:
    return f"{percent:+,.{_decimals(percent)}f} %" if math.isfinite(percent) else "–"


def _kl(number: float) -> str:
    return f"{number:.2g}" if abs(number) < 0.001 else f"{number:.4f}"


def _share(number: float | None) -> str:
    return "–" if number is None else f"{100 * number:.0f} %"


# Plots.

# Placeholders. The page replaces them with its own colours, so one drawing serves light and dark.
INK, MUTED, LINE, ACCENT, PAPER = (f"#00000{i}" for i in range(1, 6))
COLOURS = {INK: "--ink", MUTED: "--muted", LINE: "--line", ACCENT: "--accent", PAPER: "--paper"}

STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": LINE,
    "axes.grid": True,
    "axes.labelcolor": MUTED,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "font.size": 10,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "kvfold",  # the same report gives the same page
    "text.color": INK,
    "text.parse_math": False,  # names are not formulas
    "xtick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.color": MUTED,
    "ytick.major.size": 0,
}

# Where a label may stand, as offsets in points from what it names; near ones first.
PLACES = [
    (distance * math.cos(math.radians(angle)), distance * math.sin(math.radians(angle)))
    for distance in (8, 16, 26, 40, 58, 80, 110)
    for angle in (0, 180, 25, 155, -25, -155, 45, 135, -45, -135, 65, 115, -65, -115)
]


def _plots(report: Report) -> tuple[str, str]:
    """KL and perplexity against bits per element, as SVG."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('the HTML report needs matplotlib: pip install "kvfold[report]"') from error
    with matplotlib.rc_context(STYLE):
        return _kl_plot(report), _perplexity_plot(report)


def _kl_plot(report: Report) -> str:
    from matplotlib.ticker import LogLocator

    measured = [row.kl for row in report.rows if 0 < row.kl < math.inf]
    # A log scale has no 0, so rows without a KL above 0 stand on the baseline. The baseline is the noise floor. A floor
    # far below all recipes would squeeze them together. Then the baseline is higher.
    baseline = max(report.noise_floor, min(measured, default=1.0) / 1000)
    where = "" if baseline == report.noise_floor else ", off the scale"
    axes = _axes(report, "kl", "KL divergence from the 16-bit cache")
    axes.set_yscale("log")
    axes.set_ylim(min([baseline, *measured]) / 3, max([10 * baseline, *measured]) * 2)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.yaxis.set_major_formatter("{x:g}")
    values = [baseline if row.kl <= 0 else row.kl for row in report.ordered]
    return _draw(report, axes, values, baseline, f"noise floor {_kl(report.noise_floor)}{where}")


def _perplexity_plot(report: Report) -> str:
    from matplotlib.ticker import SymmetricalLogLocator

    increases = [report.increase(row) for row in report.ordered]
    finite = [increase for increase in increases if math.isfinite(increase)]
    axes = _axes(report, "perplexity", "Perplexity increase over the 16-bit cache")
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(min([-0.3, *finite]) * 1.3, max([1.0, *finite]) * 1.6)
    axes.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=1, subs=(1, 3)))
    axes.yaxis.set_major_formatter(lambda tick, _: f"{tick:+,.0f} %" if tick else "0 %")
    return _draw(report, axes, increases, 0.0, "no increase")


def _axes(report: Report, name: str, title: str) -> Any:
    from matplotlib.figure import Figure

    bits = [row.bits_per_element_2k for row in report.rows]
    axes = Figure(figsize=(5, 4.1), layout="constrained").subplots()
    axes.set_gid(name)
    axes.patch.set_gid(f"{name}-frame")
    axes.set_title(title)
    axes.set_xlabel("bits per element at 2k tokens")
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 3, 4, 6, 8, 12, 16])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlim(min(bits) / 1.25, max(bits) * 1.15)
    return axes


def _draw(report: Report, axes: Any, values: list[float], baseline: float, baseline_name: str) -> str:
    """One point per row, in order. Values that are not finite stand at the top."""
    axes.minorticks_off()
    line = axes.axhline(baseline, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
    note = {"textcoords": "offset points", "color": MUTED, "fontsize": 9}
    above_line = axes.annotate(baseline_name, (0, baseline), (4, 4), ("axes fraction", "data"), **note)
    corner = axes.annotate("↙ better", (0, 0), (4, 4), "axes fraction", **note)
    names, points = [], []
    for i, (row, value) in enumerate(zip(report.ordered, values, strict=True)):
        finite, hollow = math.isfinite(value), row is report.reference
        (point,) = axes.plot(
            row.bits_per_element_2k,
            value if finite else axes.get_ylim()[1],
            marker="o" if finite else "^",
            markersize=8,
            markeredgewidth=1.8 if hollow else 0.8,
            markeredgecolor=ACCENT if hollow else PAPER,
            markerfacecolor=PAPER if hollow else ACCENT,
            clip_on=False,
            gid=f"{axes.get_gid()}-point-{i}",
        )
        points.append(point)
        names.append(row.recipe if finite else f"{row.recipe} ({value})")
    axes.figure.draw_without_rendering()  # settles the layout, before labels are placed
    taken = [thing.get_window_extent() for thing in (line, above_line, corner, *points)]
    labels: list[Any] = []
    for point, name in zip(points, names, strict=True):
        labels.append(_label(axes, point, name, points, taken, labels))
    return _svg(axes)


def _label(axes: Any, point: Any, name: str, points: list[Any], taken: list[Any], labels: list[Any]) -> Any:
    """Label a point at the nearest place where the label covers nothing and is near no other point."""
    from matplotlib.transforms import Bbox

    (at,) = point.get_xydata()
    own = point.get_window_extent()
    others = [other.get_window_extent() for other in points if other is not point]
    near_others = [other.padded(6) for other in others]
    label = axes.annotate(broken_name(name), at, (0, 0), textcoords="offset points", fontsize=9, in_layout=False)
    label.set_gid(point.get_gid().replace("point", "label"))
    width, height = label.get_window_extent().size
    pixels = axes.figure.dpi / 72  # of a point

    def extent(place: tuple[float, float]) -> Any:
        (x, y), (dx, dy) = axes.transData.transform(at), place
        below = 0.5 if abs(dy) < 1 else float(dy < 0)
        return Bbox.from_bounds(x + pixels * dx - width * (dx < 0), y + pixels * dy - height * below, width, height)

    def faults(place: tuple[float, float]) -> tuple[int, int, int]:
        box = extent(place)
        outside = 2 - axes.bbox.count_contains(box.get_points())
        covered = box.count_overlaps([*taken, *labels])
        confusing = box.count_overlaps(near_others) + Bbox.union([box, own]).count_overlaps([*labels, *others])
        return outside, covered, confusing

    dx, dy = best = min(PLACES, key=faults)
    label.set_position(best)
    label.set_horizontalalignment("left" if dx > 0 else "right")
    label.set_verticalalignment("center" if abs(dy) < 1 else "bottom" if dy > 0 else "top")
    leader = {"arrowstyle": "-", "color": MUTED, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 5}
    axes.annotate("", at, best, textcoords="offset points", arrowprops=leader, in_layout=False)
    return extent(best)


def _svg(axes: Any) -> str:
    buffer = StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    axes.figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)  # matplotlib's own ids, which repeat in every plot
    svg = re.sub("#00000[1-5]", lambda colour: f"var({COLOURS[colour[0]]})", svg)
    label = f"{axes.get_title()} of every recipe against its bits per element; the table below has the numbers"
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


# The page.


def _filled(template: str, **places: str) -> str:
    """A template file beside this module, with HTML in its `$places`."""
    text = files("kvfold.evaluate").joinpath(template).read_text(encoding="utf-8")
    return Template(text).substitute(places)


def _results(report: Report) -> str:
    rows = []
    for row in report.ordered:
        cells = [*_cells(row, report), *_more_cells(row)]
        rows.append((_name(row, report), [f"<td>{escape(cell)}</td>" for cell in cells]))
    return _html_table(["recipe", *COLUMNS, *_more_columns(report)], rows)


def _needle(report: Report) -> str:
    found = [(row.recipe, row.needle_by_depth) for row in report.ordered if row.needle_by_depth]
    if not found:
        return ""
    depths = list(found[0][1])
    rows = [(recipe, [_heat(shares[depth]) for depth in depths]) for recipe, shares in found]
    return _filled("needle_section.html", table=_html_table(["recipe", *depths], rows))


def _intervals(report: Report) -> str:
    """Per recipe, measure, length and text: the share and its interval."""
    rows = []
    for row in report.ordered:
        for summary in report.summaries(row):
            measure, tokens, share, *rest = _summary_cells(summary)
            cells = [measure, summary.text, tokens, str(summary.found.haystacks), share, *rest]
            rows.append((row.recipe, [f"<td>{escape(cell)}</td>" for cell in cells]))
    measure, tokens, *rest = SUMMARY_COLUMNS
    columns = ["recipe", measure, "text", tokens, "haystacks", *rest]
    return _filled("intervals_section.html", table=_html_table(columns, rows)) if rows else ""


def _suite(report: Report) -> str:
    """A table of the tasks of the needle suite, then per recipe a map of depth against length."""
    found = [(row.recipe, row.suite) for row in report.ordered if row.suite]
    if not found:
        return ""
    tasks, lengths, depths = (
        list(dict.fromkeys(getattr(cell, field) for cell in found[0][1])) for field in ("task", "length", "depth")
    )
    by_task = [(recipe, [_heat(_mean(cells, task=task)) for task in tasks]) for recipe, cells in found]
    maps = [_map(recipe, cells, lengths, depths) for recipe, cells in found]
    by_task_table = _html_table(["recipe", *tasks], by_task)
    return _filled("suite_section.html", tasks=by_task_table, maps="\n".join(maps))


def _map(recipe: str, cells: "list[NeedleRow]", lengths: list[int], depths: list[float]) -> str:
    rows = [
        (_share(depth), [_heat(_mean(cells, depth=depth, length=length)) for length in lengths]) for depth in depths
    ]
    table = _html_table(["depth", *(f"{length:,}" for length in lengths)], rows)
    return f"<figure><h3>{_breakable(recipe)}</h3>{table}</figure>"


def _mean(cells: "list[NeedleRow]", **where: Any) -> float:
    return fmean(cell.score for cell in cells if where.items() <= vars(cell).items())


def _heat(share: float) -> str:
    return f'<td style="--found:{share:.0%}">{_share(share)}</td>'


def _breakable(name: str) -> str:
    return re.sub("([:,])", r"\1<wbr>", escape(name))


def _html_table(columns: list[str], rows: list[tuple[str, list[str]]]) -> str:
    """A row is a name and its cells. Cells are HTML."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "\n".join(f'<tr><th scope="row">{_breakable(name)}</th>{"".join(cells)}</tr>' for name, cells in rows)
    return f'<div class="scroll" tabindex="0"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'
