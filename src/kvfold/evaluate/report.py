"""The results of an evaluation: columns for people, and rows for JSON. Its HTML page is in page.py."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kvfold.evaluate.intervals import Interval, by_haystack, difference, interval
from kvfold.recipes import BAD_EXAMPLE

if TYPE_CHECKING:
    from kvfold.evaluate.layer_attention import LayerRow
    from kvfold.evaluate.needle import NeedleRow
    from kvfold.evaluate.tool_calls import ToolCallRow

REFERENCE = "bf16"
ALL_TEXTS = "all texts"
NOT_MEASURED = "–"


@dataclass(frozen=True)
class LayerBits:
    """Bits per number of one layer's keys and values: codes and metadata, without the open block."""

    layer: int
    keys: float
    values: float


@dataclass(frozen=True)
class Row:
    """One recipe. Shares (`top1`, `copy`, `needle`) lie between 0 and 1. None: not measured."""

    recipe: str
    bits_per_element_2k: float
    bits_per_element_128k: float
    slot_bytes: int
    perplexity: float
    kl: float
    kl_99: float  # the 99th percentile
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
    tasks: dict[str, float] | None = None  # scores of lm-eval, by task and metric
    layers: "list[LayerRow] | None" = None  # effects of quantized keys on attention, per layer
    layer_bits: list[LayerBits] | None = None
    answer: str | None = None  # to the question of the report
    for_evaluation: str | None = None  # why engines do not serve the recipe; None: they do

    @property
    def bad_example(self) -> bool:
        return self.recipe.partition(":")[0] == BAD_EXAMPLE


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
    noise_floor: float | None  # KL of the model with transformers' own cache from the model with 16-bit pages
    plain_perplexity: float | None  # of the model with transformers' own cache
    versions: dict[str, str]
    rows: list[Row]
    question: str | None = None  # what every cache was asked, about the beginning of the text

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

    @property
    def counted_at(self) -> str:
        """The context at which bits stand beside quality: the one nearer to what was measured."""
        return "2k" if self.context < 16_384 else "128k"

    def bits(self, row: Row) -> float:
        return row.bits_per_element_2k if self.counted_at == "2k" else row.bits_per_element_128k

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


def rows(report: Report) -> list[dict[str, Any]]:
    """Tidy rows for JSON and CSV. Each has the model, text and versions. Numbers that are not finite become None."""
    common = {
        "model": report.model,
        "text": report.text,
        "context": report.context,
        "noise_floor": report.noise_floor,
        "plain_perplexity": report.plain_perplexity,
        "question": report.question,
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


# Numbers as people read them.

SUMMARY_COLUMNS = ["measure", "tokens", "share", "95 %", f"against {REFERENCE}, points"]


def name_of(row: Row, report: Report) -> str:
    return f"{row.recipe} (reference)" if row is report.reference else row.recipe


def columns_of(report: Report) -> list[dict[str, list[str]]]:
    """What was measured: cells of all rows by the heading of their column. A group fits into a narrow terminal."""
    rows = report.ordered
    tasks = list(report.reference.tasks or ())
    groups: list[dict[str, list[str]]] = [
        {
            "bits\nat 2k": [f"{row.bits_per_element_2k:.2f}" for row in rows],
            "bits\nat 128k": [f"{row.bits_per_element_128k:.2f}" for row in rows],
            "perplexity": [spell_perplexity(row.perplexity) for row in rows],
            "increase": [NOT_MEASURED, *(_increase(report.increase(row)) for row in rows[1:])],
            "KL": [spell_kl(row.kl) for row in rows],
            "KL\n99.9 %": [spell_kl(row.kl_tail) for row in rows],
            "top-1": [f"{100 * row.top1:.1f} %" for row in rows],
        },
        {
            "copy": [spell_share(row.copy) for row in rows],
            "needle": [spell_share(row.needle) for row in rows],
            "perplexity\n> 16k": [spell_perplexity(row.perplexity_beyond_16k) for row in rows],
            "KL\n> 16k": [spell_kl(row.kl_beyond_16k) for row in rows],
            "KL 99.9 %\n> 16k": [spell_kl(row.kl_tail_beyond_16k) for row in rows],
        },
        {
            "attention\nKL": [spell_kl(_layer_mean(row, "softmax_kl")) for row in rows],
            "top-10\nkept": [spell_share(_layer_mean(row, "top10")) for row in rows],
            "logit\nerror": [_number(_layer_mean(row, "logit_mae"), ".3g") for row in rows],
        },
        *(
            {task.replace(" ", "\n"): [_number((row.tasks or {}).get(task), ".3f") for row in rows] for task in some}
            for some in (tasks[i : i + 3] for i in range(0, len(tasks), 3))
        ),
    ]
    measured = [{name: cells for name, cells in group.items() if set(cells) != {NOT_MEASURED}} for group in groups]
    return list(filter(None, measured))


def _layer_mean(row: Row, name: str) -> float | None:
    return fmean(getattr(layer, name) for layer in row.layers) if row.layers else None


def summary_rows(report: Report) -> list[list[str]]:
    """Of all texts together. A recipe is named once."""
    result = []
    for row in report.ordered:
        for i, summary in enumerate(one for one in report.summaries(row) if one.text == ALL_TEXTS):
            against, points = summary.difference, NOT_MEASURED
            if against is not None:
                points = f"{100 * against.mean:+.1f} ({100 * against.low:+.1f} to {100 * against.high:+.1f})"
            share, low, high = (100 * getattr(summary.found, end) for end in ("mean", "low", "high"))
            found = [summary.measure, f"{summary.length:,}", f"{share:.1f} %", f"{low:.0f} to {high:.0f}", points]
            result.append(["" if i else name_of(row, report), *found])
    return result


def _number(number: float | None, form: str) -> str:
    return NOT_MEASURED if number is None else format(number, form)


def _decimals(number: float) -> int:
    return 2 if abs(number) < 1000 else 0


def spell_perplexity(number: float | None) -> str:
    return NOT_MEASURED if number is None else f"{number:,.{_decimals(number)}f}"


def _increase(percent: float) -> str:
    return f"{percent:+,.{_decimals(percent)}f} %" if math.isfinite(percent) else NOT_MEASURED


def spell_kl(number: float | None) -> str:
    if number is None:
        return NOT_MEASURED
    return f"{number:.2g}" if abs(number) < 0.001 else f"{number:.4f}"


def spell_share(number: float | None) -> str:
    return NOT_MEASURED if number is None else f"{100 * number:.0f} %"
