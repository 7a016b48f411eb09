"""Verdicts of a check, against numbers written by hand."""

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from tiny_models import tiny

from kvfold.artifact import CheckResult, Measure
from kvfold.calibration import calibrate
from kvfold.evaluate import check as module
from kvfold.evaluate.check import check, default_context
from kvfold.evaluate.limits import Limits
from kvfold.evaluate.logits import Scores
from kvfold.evaluate.needle import NeedleRow
from kvfold.evaluate.report import Report
from kvfold.evaluate.tool_calls import ToolCallRow
from kvfold.geometry import Geometry
from kvfold.recipes import parse

# Of three haystacks: what the 16-bit cache and int4 find.
NEEDLES = {"bf16": (1.0, 0.75, 0.5), "int4": (1.0, 0.5, 0.25)}
VALID = {"bf16": (True, True, True), "int4": (True, True, True)}
EXACT = {"bf16": (True, False, True), "int4": (True, True, False)}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch):
    """A check of int4 whose measurements are those above. KL is 0.01, and once in 200 tokens 0.4."""
    asked: list[tuple] = []

    def cache_of(make) -> str:
        return make().recipe.name

    def compare(model, tokens, context, reference, caches, advance):
        asked.append(("KL", len(tokens), context, cache_of(reference)))
        advance(1.0)
        kls = torch.full((1000,), 0.01, dtype=torch.float64)
        kls[::200] = 0.4
        numbers = {"positions": kls.numpy(), "nll": kls.numpy(), "agreed": kls.numpy()}
        return Scores(**numbers, kls=0 * kls.numpy()), {name: Scores(**numbers, kls=kls.numpy()) for name in caches}

    def needle_suite(model, tokenizer, make, texts, lengths, trials, advance):
        asked.append(("needles", *lengths, trials))
        advance(1.0)
        scores = enumerate(NEEDLES[cache_of(make)])
        return [NeedleRow("a", lengths[0], 0.0, trial, "single", score) for trial, score in scores]

    def tool_calls(model, tokenizer, make, texts, lengths, trials, advance):
        asked.append(("calls", *lengths, trials))
        advance(1.0)
        name = cache_of(make)
        answers = enumerate(zip(VALID[name], EXACT[name], strict=True))
        return [ToolCallRow("a", lengths[0], trial, 0, *answer) for trial, answer in answers]

    for name, stand_in in (("compare", compare), ("needle_suite", needle_suite), ("tool_calls", tool_calls)):
        monkeypatch.setattr(module, name, stand_in)
    tokenizer = byte_tokenizer()
    model = tiny(vocab_size=len(tokenizer), max_position_embeddings=8192)
    artifact = calibrate(model, torch.arange(64), 64)
    texts = {name: torch.randint(0, 200, (9000,)) for name in ("a", "b")}

    def run(limits: Limits, trials: int = 1) -> tuple[CheckResult, Report, list[tuple], float]:
        asked.clear()
        shares: list[float] = []
        result, report = check(model, tokenizer, parse("int4"), artifact, 8000, texts, limits, trials, shares.append)
        return result, report, asked, sum(shares)

    return run


def test_losses_are_those_against_the_16_bit_cache(measured):
    result, _, asked, done = measured(Limits(kl=0.012, tail=0.3, share=0.1))
    kl, tail, needles, valid, exact = result.measures
    assert kl.value == pytest.approx((995 * 0.01 + 5 * 0.4) / 1000)
    assert tail.value == pytest.approx(0.4)
    assert (needles.reference, needles.value) == pytest.approx((2.25 / 3, 1.75 / 3))
    # Losses of haystacks are 0, ¼ and ¼. Three draws of them: their mean is 0 in 1 of 27 cases, ¼ in 8 of 27.
    assert (needles.loss, needles.low, needles.high) == pytest.approx((0.5 / 3, 0, 0.25))
    assert (valid.reference, valid.loss, valid.low, valid.high) == (1, 0, 0, 0)
    assert (exact.value, exact.loss, exact.low, exact.high) == pytest.approx((2 / 3, 0, -1, 1))
    assert [measure.passed for measure in result.measures] == [True, False, False, True, True]
    assert not result.passed
    assert result.faults == "KL tail is 0.4000, and 0.3 is allowed; needles lose 16.7 points, and 10 are allowed"
    assert [measure.undecided for measure in result.measures] == [False, False, True, False, True]
    assert done == pytest.approx(1)
    # one passage of each text; haystacks leave room for an answer
    assert asked == [("KL", 16000, 8000, "bf16"), *[("needles", 8000 - 192, 1)] * 2, *[("calls", 8000 - 192, 3)] * 2]


def test_a_report_has_what_was_measured_of_both_caches(measured):
    _, report, _, _ = measured(Limits())
    reference, row = report.ordered
    assert (reference.recipe, reference.kl, row.recipe) == ("bf16", 0, "int4")
    assert (row.kl, row.kl_99, row.kl_tail) == pytest.approx((0.01195, 0.01, 0.4))  # 5 of 1,000 have 0.4
    assert [[cell.score for cell in each.suite] for each in report.ordered] == [list(NEEDLES[n]) for n in NEEDLES]
    assert [[call.exact for call in each.tool_calls] for each in report.ordered] == [list(EXACT[n]) for n in EXACT]
    bits = {(4 + 32 / 32,) * 2}  # codes of 4 bits, and a scale and an offset of 16 bits for 32 of them
    assert {(layer.keys, layer.values) for layer in row.layer_bits} == bits
    assert (report.text, report.context, report.tokens) == ("a, b", 8000, 16000)
    assert (report.question, row.answer, report.noise_floor) == (None, None, None)


def test_more_trials_and_what_is_allowed(measured):
    result, _, asked, _ = measured(Limits(kl=0.02, tail=0.5, share=0.17), trials=4)
    assert result.passed
    assert result.faults == ""
    assert str(result).endswith(
        "at 8,000 tokens: passed (KL 0.0120, KL tail 0.4000, needles 58.3 of 75.0 %, valid calls 100.0 of 100.0 %, "
        "exact calls 66.7 of 66.7 %)"
    )
    assert [(what, trials) for what, _, trials in asked[1:]] == [("needles", 4)] * 2 + [("calls", 12)] * 2


@pytest.mark.parametrize(
    ("reference", "loss", "low", "high", "passed", "undecided", "blind"),
    [
        (0.9, 0.0, 0.0, 0.0, True, False, False),
        (0.9, 0.03, 0.03, 0.03, True, False, False),  # no more than is allowed
        (0.9, 0.02, -0.01, 0.06, True, True, False),
        (0.9, 0.05, -0.02, 0.12, False, True, False),
        (0.9, 0.5, 0.3, 0.7, False, False, False),
        (0.9, -0.05, -0.1, -0.01, True, False, False),  # better than 16 bits, by chance
        (0.03, 0.03, 0.0, 0.03, True, False, True),  # all that there was is lost, and it is too little to say so
        (0.0, 0.0, 0.0, 0.0, True, False, True),
    ],
)
def test_a_share_passes_by_its_mean_loss(reference, loss, low, high, passed, undecided, blind):
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
    assert (measure.passed, measure.undecided, measure.blind) == (passed, undecided, blind)


@pytest.mark.parametrize(
    ("longest", "device", "context"),
    [(131072, "cuda", 32768), (8192, "cuda", 8192), (None, "cuda", 32768), (8192, "cpu", 2048), (1024, "cpu", 1024)],
)
def test_contexts_that_take_minutes(longest, device, context):
    geometry = Geometry.uniform("any", 1, 1, 1, 64, longest)
    assert default_context(geometry, torch.device(device)) == context
