"""Verdicts of a check, against numbers written by hand."""

import random
import re
import sys
from statistics import fmean, pstdev

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from tiny_models import tiny

from kvfold.artifact import CheckResult, Measure
from kvfold.calibration import calibrate
from kvfold.evaluate import check as module
from kvfold.evaluate.check import check, default_context, looks
from kvfold.evaluate.intervals import PIECE
from kvfold.evaluate.limits import Limits
from kvfold.evaluate.logits import Scores
from kvfold.evaluate.needle import TASKS, NeedleRow
from kvfold.evaluate.report import Report
from kvfold.evaluate.tool_calls import ToolCallRow
from kvfold.geometry import Geometry
from kvfold.recipes import parse

# Of four haystacks in turn: what the 16-bit cache and int4 find.
NEEDLES = {"bf16": (1.0, 0.75, 0.5, 0.75), "int4": (1.0, 0.5, 0.25, 0.75)}
VALID = {"bf16": (True,) * 4, "int4": (True,) * 4}
EXACT = {"bf16": (True, False, True, True), "int4": (True, True, False, True)}
COPIES = 25  # of a haystack's calls, which are all alike


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch):
    """A check of int4 whose measurements are those above. KL is 0.01, and once in 200 tokens 0.4."""
    asked: list[tuple] = []

    def cache_of(make) -> str:
        return make().recipe.name

    def compare(model, tokens, context, reference, caches, advance):
        asked.append(("KL", len(tokens), context, cache_of(reference)))
        advance(1.0)
        kls = torch.full((len(tokens),), 0.01, dtype=torch.float64)
        kls[::200] = 0.4
        numbers = {"positions": kls.numpy(), "nll": kls.numpy(), "agreed": kls.numpy()}
        return Scores(**numbers, kls=0 * kls.numpy()), {name: Scores(**numbers, kls=kls.numpy()) for name in caches}

    def needle_suite(model, tokenizer, make, texts, lengths, trials, advance, first):
        asked.append(("needles", *lengths, first, trials))
        advance(1.0)
        scores = NEEDLES[cache_of(make)]
        return [
            NeedleRow("a", lengths[0], 0.0, trial, task, scores[trial % 4])
            for trial in range(first, first + trials)
            for task in TASKS
        ]

    def tool_calls(model, tokenizer, make, texts, lengths, trials, advance, first):
        asked.append(("calls", *lengths, first, trials))
        advance(1.0)
        valid, exact = VALID[cache_of(make)], EXACT[cache_of(make)]
        return [
            ToolCallRow("a", lengths[0], trial, call, valid[trial % 4], exact[trial % 4])
            for trial in range(first, first + trials)
            for call in range(COPIES)
        ]

    for name, stand_in in (("compare", compare), ("needle_suite", needle_suite), ("tool_calls", tool_calls)):
        monkeypatch.setattr(module, name, stand_in)
    monkeypatch.setattr("kvfold.evaluate.intervals.TOKEN_DRAWS", 200)
    tokenizer = byte_tokenizer()
    model = tiny(vocab_size=len(tokenizer), max_position_embeddings=8192)
    artifact = calibrate(model, torch.arange(64), 64)
    texts = {"a": torch.randint(0, 200, (9000,)), "b": torch.randint(0, 200, (40_000,))}

    def run(limits: Limits, most: int) -> tuple[CheckResult, Report, list[tuple], float]:
        asked.clear()
        shares: list[float] = []
        result, report = check(model, tokenizer, parse("int4"), artifact, 8000, texts, limits, most, shares.append)
        return result, report, asked, sum(shares)

    return run


def normal_interval(losses: list[float]) -> tuple[float, float]:
    """98.3 % of the means of many haystacks: 2.394 standard errors, from a table."""
    return tuple(fmean(losses) + sign * 2.394 * pstdev(losses) / len(losses) ** 0.5 for sign in (-1, 1))


def test_losses_are_those_against_the_16_bit_cache(measured):
    result, _, asked, done = measured(Limits(kl=0.02, tail=0.3, share=0.3), 400)
    kl, tail, needles, valid, exact = result.measures
    kls = asked[0][1] // 200 * [0.4, *199 * [0.01]]
    assert kl.value == pytest.approx(fmean(kls))
    assert (tail.value, tail.low, tail.high) == pytest.approx((0.4, 0.4, 0.4))
    pieces = [fmean(kls[i : i + PIECE]) for i in range(0, len(kls), PIECE)]
    assert (kl.low, kl.high) == pytest.approx(normal_interval(pieces), abs=8e-5)
    assert (needles.reference, needles.value) == pytest.approx((0.75, 0.625))
    assert (needles.loss, needles.low, needles.high) == pytest.approx(
        (0.125, *normal_interval(25 * [0, 0.25, 0.25, 0])), abs=0.003
    )
    assert (exact.value, exact.loss) == (0.75, 0)
    assert (exact.low, exact.high) == pytest.approx(normal_interval(125 * [0, -1, 1, 0]), abs=0.005)
    assert (valid.reference, valid.loss) == (1, 0)
    assert (valid.low, valid.high) == pytest.approx((-3 / 12_500, 3 / 12_500)), "no draw differs: the rule of three"
    assert [measure.verdict for measure in result.measures] == ["passed", "failed", "passed", "passed", "passed"]
    assert result.verdict == "failed"
    assert result.reasons == "KL tail is 0.4000 (0.4000 to 0.4000), and 0.3 is allowed"
    assert done == pytest.approx(1 / 4), "it failed at the first of three looks"
    # What there is of the texts, up to 100 passages; haystacks leave room for an answer.
    assert asked == [
        ("KL", 8000 + 40_000, 8000, "bf16"),
        *[("needles", 8000 - 192, 0, 100)] * 2,
        *[("calls", 8000 - 192, 0, 500)] * 2,
    ]


def test_more_is_read_of_what_is_not_decided(measured):
    """Exact calls are: lost in a quarter of haystacks, and won in another."""
    result, report, asked, done = measured(Limits(kl=0.02, tail=0.5, share=0.17), 8)
    assert [(what, first, trials) for what, *_, first, trials in asked if what == "needles"] == [
        ("needles", first, trials) for first, trials in ((0, 2), (2, 2), (4, 4)) for _ in range(2)
    ]
    assert [(first, trials) for what, *_, first, trials in asked if what == "calls"] == [
        (first, trials) for first, trials in ((0, 10), (10, 10), (20, 20)) for _ in range(2)
    ]
    assert [what for what, *_ in asked].count("KL") == 1
    assert [measure.verdict for measure in result.measures] == [
        "passed", "passed", "not decided", "passed", "not decided",
    ]  # fmt: skip
    assert result.verdict == "not decided"
    assert re.fullmatch(
        r"needles lose 12\.5 points \([\d.]+ to [\d.]+\), and 17 are allowed; "
        r"exact calls lose 0\.0 points \(-[\d.]+ to [\d.]+\), and 17 are allowed",
        result.reasons,
    )
    assert [len(row.suite) for row in report.ordered] == [8 * len(TASKS)] * 2
    assert done < 1, "KL was not read again"


def test_nothing_more_is_read_of_what_is_decided(measured):
    result, _, asked, _ = measured(Limits(kl=0.02, tail=0.5, share=0.5), 160)
    assert result.verdict == "passed"
    assert len(asked) == 5
    assert re.search(
        r"at 8,000 tokens: passed \(KL 0\.01\d\d, KL tail 0\.4000, needles 62\.5 of 75\.0 %, valid calls 100\.0 of "
        r"100\.0 %, exact calls 75\.0 of 75\.0 %\)$",
        str(result),
    )


@pytest.mark.parametrize(("most", "after"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [2, 4, 8]), (10, [3, 5, 10])])
def test_it_looks_three_times_at_most(most, after):
    assert looks(most) == after


def test_few_calls_do_not_show_that_nothing_is_lost(measured, monkeypatch):
    """10 haystacks with 6 equal calls each. A recipe that loses 5 % of calls shows none of its losses in 5 % of such
    checks, so 60 calls do not decide for 3 %."""
    monkeypatch.setattr(sys.modules[__name__], "COPIES", 6)
    monkeypatch.setitem(EXACT, "int4", EXACT["bf16"])
    monkeypatch.setitem(NEEDLES, "int4", NEEDLES["bf16"])
    result, *_ = measured(Limits(kl=0.02, tail=0.5, share=0.03), 2)
    assert result.verdict == "not decided"
    result, *_ = measured(Limits(kl=0.02, tail=0.5, share=0.03), 40)
    assert result.verdict == "passed"


def test_an_interval_does_not_end_at_minus_zero():
    """In a haystack all is lost, and in four nothing: many draws miss the one."""
    scores = [[((i,), 1.0) for i in range(5)], [((i,), float(i > 0)) for i in range(5)]]
    few = module._share("needles", [10 * each for each in scores], 0.03)
    assert (few.loss, str(few.low), few.verdict) == (0.2, "0.0", "not decided")


def test_looking_three_times_does_not_make_verdicts_wrong(monkeypatch):
    """The recipe loses as much as is allowed: a fifth. So either verdict is wrong."""
    monkeypatch.setattr("kvfold.evaluate.intervals.DRAWS", 2000)
    wrong = 0
    for seed in range(100):
        rng = random.Random(seed)
        reference = [((i,), 1.0) for i in range(100) for _ in range(2)]
        own = [(haystack, float(rng.random() > 0.2)) for haystack, _ in reference]
        measures = (module._share("needles", [reference[: 2 * n], own[: 2 * n]], 0.2) for n in (25, 50, 100))
        wrong += any(measure.verdict != "not decided" for measure in measures)
    assert wrong <= 5, "5 % and chance; intervals of 95 % at each look are wrong far more often"


def test_a_report_has_what_was_measured_of_both_caches(measured):
    _, report, _, _ = measured(Limits(), 4)
    reference, row = report.ordered
    assert (reference.recipe, reference.kl, row.recipe) == ("bf16", 0, "int4")
    assert (row.kl, row.kl_99, row.kl_tail) == pytest.approx((0.01195, 0.01, 0.4))  # one token of 200 has 0.4
    assert [[cell.score for cell in each.suite] for each in report.ordered] == [
        [score for trial in range(4) for score in len(TASKS) * [NEEDLES[n][trial]]] for n in NEEDLES
    ]
    assert [[call.exact for call in each.tool_calls][::COPIES] for each in report.ordered] == [
        5 * list(EXACT[n]) for n in EXACT
    ]
    bits = {(4 + 32 / 32,) * 2}  # codes of 4 bits, and a scale and an offset of 16 bits for 32 of them
    assert {(layer.keys, layer.values) for layer in row.layer_bits} == bits
    assert (report.text, report.context, report.tokens) == ("a, b", 8000, 16000)
    assert (report.question, row.answer, report.noise_floor) == (None, None, None)


@pytest.mark.parametrize(
    ("reference", "loss", "low", "high", "verdict", "blind"),
    [
        (0.9, 0.0, 0.0, 0.0, "passed", False),
        (0.9, 0.03, 0.03, 0.03, "passed", False),  # no more than is allowed
        (0.9, 0.02, -0.01, 0.06, "not decided", False),
        (0.9, 0.05, -0.02, 0.12, "not decided", False),
        (0.9, 0.02, -0.01, 0.03, "passed", False),
        (0.9, 0.05, 0.03, 0.07, "not decided", False),
        (0.9, 0.05, 0.031, 0.07, "failed", False),
        (0.9, 0.5, 0.3, 0.7, "failed", False),
        (0.9, -0.05, -0.1, -0.01, "passed", False),  # better than 16 bits, by chance
        (0.03, 0.03, -0.01, 0.07, "passed", True),  # all that there was is lost, and it is too little to say so
        (0.0, 0.0, -0.05, 0.05, "passed", True),
    ],
)
def test_the_interval_gives_the_verdict(reference, loss, low, high, verdict, blind):
    measure = Measure(
        name="needles",
        unit="share",
        value=reference - loss,
        reference=reference,
        loss=loss,
        low=low,
        high=high,
        allowed=0.03,
    )
    assert (measure.verdict, measure.blind) == (verdict, blind)


@pytest.mark.parametrize(
    ("longest", "device", "context"),
    [(131072, "cuda", 32768), (8192, "cuda", 8192), (None, "cuda", 32768), (8192, "cpu", 2048), (1024, "cpu", 1024)],
)
def test_contexts_that_take_minutes(longest, device, context):
    geometry = Geometry.uniform("any", 1, 1, 1, 64, longest)
    assert default_context(geometry, torch.device(device)) == context
