"""A check before serving: what a recipe loses against the 16-bit cache of the same model, and whether that is allowed.

It takes minutes. Needles and tool calls fail if their mean loss exceeds the allowed loss. The 95 % interval of the loss
does not change the verdict: it tells the reader whether the few haystacks decide it, or whether more trials are needed.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.artifact import TEXT, Artifact, CheckResult, Measure
from kvfold.calibration.fit import versions
from kvfold.calibration.text_overlap import check_disjoint
from kvfold.engines.transformers import cache
from kvfold.evaluate.answers import QUESTION, answer
from kvfold.evaluate.intervals import Haystack, by_haystack, difference
from kvfold.evaluate.limits import Limits
from kvfold.evaluate.logits import compare
from kvfold.evaluate.needle import DEPTHS, hide, needle_suite
from kvfold.evaluate.report import REFERENCE, Report
from kvfold.evaluate.retrieval import Make
from kvfold.evaluate.run import row_of
from kvfold.evaluate.tool_calls import hide_records, tool_calls
from kvfold.geometry import Geometry
from kvfold.recipe import Recipe
from kvfold.recipes import parse
from kvfold.text import with_openings

SCORED = 2048  # tokens per text of which KL is measured, at least one passage: the tail is one token in a thousand
CALL_TRIALS = 3  # haystacks of tool calls, for one haystack per depth of needles
ANSWER = 192  # tokens left for a question and its answer, so that both lie in the context
LONGEST = {"cuda": 32_768, "cpu": 2048}  # contexts that take minutes


Advance = Callable[[float], None]


def default_context(geometry: Geometry, device: torch.device) -> int:
    """The longest context that the model takes, or that can be checked in minutes."""
    longest = LONGEST.get(device.type, LONGEST["cpu"])
    return min(geometry.max_context or longest, longest)


def check(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    artifact: Artifact,
    context: int,
    texts: Mapping[str, Tensor],
    limits: Limits = Limits(),  # noqa: B008
    trials: int = 1,
    advance: Advance = lambda share: None,
    name: str = "",  # of the model
    answers: bool = False,  # whether to ask both caches about the first text
) -> tuple[CheckResult, Report]:
    """Measure a recipe in contexts of `context` tokens out of each text (1-D). `advance` gets shares of 1."""
    length = context - ANSWER
    for text in texts.values():  # what cannot be measured fails here, before the long work
        check_disjoint(text, artifact.tensors[TEXT])
        try:
            hide(tokenizer, text, length, depth=0, trial=0)
            hide_records(tokenizer, text, length, trial=0)
        except ValueError as error:
            raise ValueError(f"contexts of {context:,} tokens cannot be checked: {error}") from None
    pair = parse(REFERENCE), recipe
    caches: list[Make] = [cache(model, each, artifact).empty for each in pair]
    passages = context * max(1, SCORED // context)
    scored = torch.cat([with_openings(text[:passages], context, tokenizer) for text in texts.values()])
    work = {"kl": passages, "needles": len(DEPTHS) * trials * length, "calls": CALL_TRIALS * trials * length}

    def part(name: str, caches: int) -> Advance:
        """Advances by shares of one part of the work, for one of so many caches."""
        return lambda share: advance(share * work[name] / sum(work.values()) / caches)

    own, scores = compare(model, scored, context, caches[0], {str(recipe): caches[1]}, part("kl", 1))
    suites = [
        needle_suite(model, tokenizer, make, texts, [length], trials=trials, advance=part("needles", 2))
        for make in caches
    ]
    calls = [
        tool_calls(model, tokenizer, make, texts, [length], CALL_TRIALS * trials, part("calls", 2)) for make in caches
    ]
    found = scores[str(recipe)]
    result = CheckResult(
        context=context,
        date=datetime.now(UTC).date(),
        versions=versions(),
        fit_sha256=artifact.fit_sha256(recipe),
        measures=(
            _divergence("KL", found.kl, limits.kl),
            _divergence("KL tail", found.kl_tail, limits.tail),
            _share("needles", [[(row.haystack, row.score) for row in rows] for rows in suites], limits.share),
            _share("valid calls", [[(row.haystack, row.valid) for row in rows] for rows in calls], limits.share),
            _share("exact calls", [[(row.haystack, row.exact) for row in rows] for rows in calls], limits.share),
        ),
    )
    geometry = Geometry.from_config(model.config.to_dict())
    rows = [
        replace(
            row_of(each, geometry, artifact, measured),
            suite=suite,
            tool_calls=called,
            answer=answer(model, tokenizer, make, next(iter(texts.values()))) if answers else None,
        )
        for each, measured, suite, called, make in zip(pair, (own, found), suites, calls, caches, strict=True)
    ]
    words = ", ".join(texts)
    asked = QUESTION if answers else None
    return result, Report(name, words, context, len(scored), None, None, dict(result.versions), rows, asked)


def _divergence(name: Literal["KL", "KL tail"], value: float, allowed: float) -> Measure:
    return Measure(name=name, unit="nats", value=value, reference=0.0, loss=value, allowed=allowed)


def _share(name: str, scores: list[list[tuple[Haystack, float]]], allowed: float) -> Measure:
    """What was found in haystacks, with the 16-bit cache and with the recipe."""
    reference, own = map(by_haystack, scores)
    less = difference(own, reference)
    means = [sum(each.values()) / len(each) for each in (own, reference)]
    return Measure(
        name=name,
        unit="share",
        value=means[0],
        reference=means[1],
        loss=0.0 - less.mean,  # and not -0.0
        low=0.0 - less.high,
        high=0.0 - less.low,
        allowed=allowed,
    )
