"""A check before serving: what a recipe loses against the 16-bit cache of the same model, and whether that is allowed.

The interval of a loss decides: the recipe passes if all of it is allowed, and fails if none of it is. If it reaches to
both sides, more is read, and the check looks again, up to three times. The 5 % that may lie outside are split over the
looks (Bonferroni), so each has an interval of 98.3 %. A check that has failed reads no more.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.artifact import TEXT, Artifact, CheckResult, Measure
from kvfold.calibration.fit import versions
from kvfold.calibration.text_overlap import check_disjoint
from kvfold.engines.transformers import cache
from kvfold.evaluate.answers import QUESTION, answer
from kvfold.evaluate.intervals import Haystack, by_haystack, difference, token_interval
from kvfold.evaluate.limits import MOST_TRIALS, Limits
from kvfold.evaluate.logits import Scores, compare
from kvfold.evaluate.needle import DEPTHS, NeedleRow, hide, needle_suite
from kvfold.evaluate.report import REFERENCE, Report
from kvfold.evaluate.retrieval import Make
from kvfold.evaluate.run import row_of
from kvfold.evaluate.tool_calls import ToolCallRow, hide_records, tool_calls
from kvfold.geometry import Geometry
from kvfold.recipe import Recipe
from kvfold.recipes import parse
from kvfold.text import with_openings

LOOKS = 3
LEVEL = 100 - 5 / LOOKS  # percent, of the intervals of one look
# A trial has this of each text, and one haystack of needles for each depth.
SCORED = 2048  # tokens of which KL is measured, at least one passage: the tail is one token in a thousand
CALL_HAYSTACKS = 5
ANSWER = 192  # tokens left for a question and its answer, so that both lie in the context
LONGEST = {"cuda": 32_768, "cpu": 2048}  # contexts that take minutes

Advance = Callable[[float], None]
Kind = Callable[[int, int, Advance], list[Measure]]
Suite = tuple[PreTrainedModel, PreTrainedTokenizerBase, Make, Mapping[str, Tensor], list[int]]


def default_context(geometry: Geometry, device: torch.device) -> int:
    """The longest context that the model takes, or that can be checked in minutes."""
    longest = LONGEST.get(device.type, LONGEST["cpu"])
    return min(geometry.max_context or longest, longest)


def looks(most: int) -> list[int]:
    """After how many trials to look: a quarter of the most, half and all of them."""
    return sorted({-(-most // 2**i) for i in range(LOOKS)})


def check(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    artifact: Artifact,
    context: int,
    texts: Mapping[str, Tensor],
    limits: Limits = Limits(),  # noqa: B008
    most: int = MOST_TRIALS,
    advance: Advance = lambda share: None,
    name: str = "",  # of the model
    answers: bool = False,  # whether to ask both caches about the first text
) -> tuple[CheckResult, Report]:
    """Measure a recipe in contexts of `context` tokens out of each text (1-D), with up to `most` trials. `advance` gets
    shares of 1, which is what all of them would read."""
    for text in texts.values():  # what cannot be measured fails here, before the long work
        check_disjoint(text, artifact.tensors[TEXT])
        try:
            hide(tokenizer, text, context - ANSWER, depth=0, trial=0)
            hide_records(tokenizer, text, context - ANSWER, trial=0)
        except ValueError as error:
            raise ValueError(f"contexts of {context:,} tokens cannot be checked: {error}") from None
    pair = parse(REFERENCE), recipe
    caches: list[Make] = [cache(model, each, artifact).empty for each in pair]
    trials = Trials(model, tokenizer, caches, texts, context, limits)
    result = CheckResult(
        context=context,
        date=datetime.now(UTC).date(),
        versions=versions(),
        fit_sha256=artifact.fit_sha256(recipe),
        measures=trials.until_decided(most, advance),
    )
    geometry = Geometry.from_config(model.config.to_dict())
    rows = [
        replace(
            row_of(each, geometry, artifact, scores),
            suite=suite,
            tool_calls=calls,
            answer=answer(model, tokenizer, make, next(iter(texts.values()))) if answers else None,
        )
        for each, scores, suite, calls, make in zip(
            pair, trials.scores, trials.suites, trials.calls, caches, strict=True
        )
    ]
    words = ", ".join(texts)
    asked = QUESTION if answers else None
    return result, Report(name, words, context, trials.read, None, None, dict(result.versions), rows, asked)


class Trials:
    """What was read so far, with the 16-bit cache and with a recipe."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        caches: Sequence[Make],
        texts: Mapping[str, Tensor],
        context: int,
        limits: Limits,
    ) -> None:
        self.model, self.tokenizer, self.caches, self.texts = model, tokenizer, caches, texts
        self.context, self.limits = context, limits
        self.length = context - ANSWER  # of haystacks
        self.passages = context * max(1, SCORED // context)  # tokens of a text
        self.read = 0  # tokens of passages
        self.scores = Scores(), Scores()
        self.suites: tuple[list[NeedleRow], ...] = [], []
        self.calls: tuple[list[ToolCallRow], ...] = [], []

    def until_decided(self, most: int, advance: Advance) -> tuple[Measure, ...]:
        """Read until the intervals decide, or until all `most` trials are read."""
        work: dict[Kind, int] = {  # tokens of a trial
            self.divergences: self.passages,
            self.needles: len(DEPTHS) * self.length,
            self.tool_calls: CALL_HAYSTACKS * self.length,
        }
        found: dict[Kind, list[Measure]] = {}
        done = dict.fromkeys(work, 0)
        for trials in looks(most):
            for kind in work:
                if kind not in found or any(measure.verdict == "not decided" for measure in found[kind]):
                    share = work[kind] * (trials - done[kind]) / (most * sum(work.values()))
                    found[kind] = kind(done[kind], trials, _part(advance, share))
                    done[kind] = trials
            measures = tuple(measure for kind in work for measure in found[kind])
            if any(measure.verdict == "failed" for measure in measures):
                break
        return measures

    def divergences(self, first: int, last: int, advance: Advance) -> list[Measure]:
        """KL and its tail, with the passages of trials from `first` to before `last`, as far as the texts have them."""
        parts = []
        for text in self.texts.values():
            part = text[first * self.passages : last * self.passages]
            parts.append(with_openings(part[: len(part) // self.context * self.context], self.context, self.tokenizer))
        if len(tokens := torch.cat(parts)):
            make, packed = self.caches
            own, others = compare(self.model, tokens, self.context, make, {"packed": packed}, advance)
            for scores, more in zip(self.scores, (own, others["packed"]), strict=True):
                scores.extend(more)
            self.read += len(tokens)
        return [
            _divergence("KL", self.scores[1], lambda scores: scores.kl, self.limits.kl),
            _divergence("KL tail", self.scores[1], lambda scores: scores.kl_tail, self.limits.tail),
        ]

    def needles(self, first: int, last: int, advance: Advance) -> list[Measure]:
        trials = last - first
        for make, rows in zip(self.caches, self.suites, strict=True):
            rows += needle_suite(*self._haystacks(make), trials=trials, advance=_part(advance, 1 / 2), first=first)
        scores = [[(row.haystack, row.score) for row in rows] for rows in self.suites]
        return [_share("needles", scores, self.limits.share)]

    def tool_calls(self, first: int, last: int, advance: Advance) -> list[Measure]:
        first, trials = first * CALL_HAYSTACKS, (last - first) * CALL_HAYSTACKS
        for make, rows in zip(self.caches, self.calls, strict=True):
            rows += tool_calls(*self._haystacks(make), trials=trials, advance=_part(advance, 1 / 2), first=first)
        valid = [[(row.haystack, row.valid) for row in rows] for rows in self.calls]
        exact = [[(row.haystack, row.exact) for row in rows] for rows in self.calls]
        return [_share("valid calls", valid, self.limits.share), _share("exact calls", exact, self.limits.share)]

    def _haystacks(self, make: Make) -> Suite:
        return self.model, self.tokenizer, make, self.texts, [self.length]


def _part(advance: Advance, share: float) -> Advance:
    """Advances by shares of a part."""
    return lambda of_part: advance(of_part * share)


def _divergence(name: str, scores: Scores, statistic: Callable[[Scores], float], allowed: float) -> Measure:
    low, high = token_interval(scores.kls, lambda kls: statistic(Scores(kls=kls)), LEVEL)
    value = statistic(scores)
    return Measure(name=name, unit="nats", value=value, reference=0.0, loss=value, low=low, high=high, allowed=allowed)


def _share(name: str, scores: Sequence[Sequence[tuple[Haystack, float]]], allowed: float) -> Measure:
    """What was found in haystacks, with the 16-bit cache and with the recipe.

    The interval reaches at least 3/n to both sides of the mean of n scores. If none of them is lost, as many as 3/n may
    still be lost elsewhere (the rule of three), which drawing haystacks again does not show.
    """
    reference, own = map(by_haystack, scores)
    less = difference(own, reference, LEVEL)
    least = 3 / len(scores[0])
    means = [sum(each.values()) / len(each) for each in (own, reference)]
    return Measure(
        name=name,
        unit="share",
        value=means[0],
        reference=means[1],
        loss=0.0 - less.mean,  # and not -0.0
        low=0.0 - max(less.high, less.mean + least),
        high=0.0 - min(less.low, less.mean - least),
        allowed=allowed,
    )
