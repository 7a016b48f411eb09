"""One evaluation: every recipe on the same model and text, as a report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from kvfold.artifact import TEXT, Artifact
from kvfold.calibration.fit import versions
from kvfold.calibration.text_overlap import check_disjoint
from kvfold.engines.transformers import PackedCache, cache
from kvfold.evaluate.answers import QUESTION, answer
from kvfold.evaluate.layer_attention import LayerRow, diagnose
from kvfold.evaluate.logits import LONG, Scores, compare
from kvfold.evaluate.needle import TRIALS as NEEDLE_TRIALS
from kvfold.evaluate.needle import hide, needle_suite
from kvfold.evaluate.report import REFERENCE, LayerBits, Report, Row
from kvfold.evaluate.retrieval import Make, copy_accuracy, needle_accuracy
from kvfold.evaluate.tasks import check_tasks, lm_eval_tasks
from kvfold.evaluate.tool_calls import TRIALS as TOOL_TRIALS
from kvfold.evaluate.tool_calls import hide_records, tool_calls
from kvfold.fitted import Fitted
from kvfold.geometry import Geometry
from kvfold.kept_parts import NOTHING_KEPT, Parts
from kvfold.recipe import Recipe
from kvfold.recipes import parse
from kvfold.rope import Rope
from kvfold.text import with_openings

PLAIN = "transformers' own cache"
DIAGNOSED = 2048  # the attention of at most this many tokens is diagnosed


@dataclass(frozen=True)
class Haystacks:
    """What is measured in haystacks: their texts by name, and how many tokens they have."""

    texts: Mapping[str, Tensor]
    needle: Sequence[int] = ()  # lengths of the needle suite; none: no suite
    tool_calls: Sequence[int] = ()  # lengths of contexts before tool calls
    trials: int | None = None  # haystacks per depth of needles, and of tool calls; None: the numbers of each

    @property
    def measures(self) -> int:
        return bool(self.needle) + bool(self.tool_calls)

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuse lengths that a text is too short for, and lengths too short for what they hide."""
        for text in self.texts.values():
            for length in self.needle:
                hide(tokenizer, text, length, depth=0, trial=0)
            for length in self.tool_calls:
                hide_records(tokenizer, text, length, trial=0)


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recipes: Sequence[Recipe],
    tokens: Tensor,
    context: int,
    *,
    artifact: Artifact | None = None,
    names: tuple[str, str] = ("", ""),  # the names of model and text
    haystacks: Haystacks | None = None,  # of needles and tool calls
    tasks: Sequence[str] = (),  # of lm-eval
    layers: bool = False,  # whether to diagnose the attention of every layer
    answers: bool = False,  # whether to ask every cache about the text
    advance: Callable[[float], None] = lambda share: None,
    parts: Parts = NOTHING_KEPT,
    finished: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Evaluate `recipes` and the 16-bit cache on `tokens` (1-D). `advance` gets shares of 1. `finished` gets the report
    after each row."""
    geometry = Geometry.from_config(model.config.to_dict())
    if artifact is not None:
        for read in (tokens, *(haystacks.texts.values() if haystacks else ())):
            check_disjoint(read, artifact.tensors[TEXT])
    scored = with_openings(tokens, context, tokenizer)
    panel = {str(recipe): recipe for recipe in (parse(REFERENCE), *recipes)}
    # A recipe or length that does not fit the model fails here, before the long work.
    caches = {name: cache(model, recipe, artifact) for name, recipe in panel.items()}
    makes: dict[str, Make] = {name: packed.empty for name, packed in caches.items()}
    if haystacks:
        haystacks.check(tokenizer)
    check_tasks(tasks)
    rope = artifact.metadata.rope if artifact else None
    by_layer: dict[str, list[dict[str, Any]]] = {}
    if layers:
        by_layer = parts("layers", partial(_diagnosed, model, scored[: min(context, DIAGNOSED)], caches, rope))
    others = {name: make for name, make in makes.items() if name != REFERENCE}
    others[PLAIN] = partial(DynamicCache, config=model.config)
    own, scores = compare(
        model, scored, context, makes[REFERENCE], others, lambda share: advance(0.6 * share), parts.of("logits")
    )
    long = haystacks.measures if haystacks else 0
    part = 0.4 / len(panel) / (1 + long + bool(tasks))
    report = Report(
        model=names[0],
        text=names[1],
        context=context,
        tokens=len(tokens),
        noise_floor=scores[PLAIN].kl,
        plain_perplexity=scores[PLAIN].perplexity,
        versions=versions(),
        rows=[],
        question=QUESTION if answers else None,
    )
    for name, recipe in panel.items():
        asked, kept = (model, tokenizer, makes[name], tokens), parts.of(name)
        copied = kept("copy", partial(copy_accuracy, *asked))
        needles = kept("needle", partial(needle_accuracy, *asked))
        row = row_of(recipe, geometry, artifact, own if name == REFERENCE else scores[name])
        row = replace(row, copy=copied, needle=sum(needles.values()) / len(needles), needle_by_depth=needles)
        if answers:
            row = replace(row, answer=kept("answer", partial(answer, *asked)))
        advance(part)
        asked_for = _asked_for(
            model, tokenizer, makes[name], haystacks, tasks, lambda share: advance(part * share), kept
        )
        if layers:
            asked_for["layers"] = [LayerRow(**each) for each in by_layer[name]]
        report.rows.append(replace(row, **asked_for))
        finished(report)
    return report


def _diagnosed(
    model: PreTrainedModel, tokens: Tensor, caches: Mapping[str, PackedCache], rope: Rope | None
) -> dict[str, list[dict[str, Any]]]:
    """What `diagnose` finds, as JSON."""
    return {name: list(map(asdict, rows)) for name, rows in diagnose(model, tokens, caches, rope).items()}


def _asked_for(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    make: Make,
    haystacks: Haystacks | None,
    tasks: Sequence[str],
    advance: Callable[[float], None],
    parts: Parts,
) -> dict[str, Any]:
    """The optional measurements, which take long."""
    found: dict[str, Any] = {}
    if haystacks:
        texts, trials = haystacks.texts, haystacks.trials
        if lengths := haystacks.needle:
            found["suite"] = needle_suite(
                *(model, tokenizer, make, texts, lengths),
                trials=trials or NEEDLE_TRIALS,
                advance=advance,
                parts=parts.of("needle suite"),
            )
        if lengths := haystacks.tool_calls:
            found["tool_calls"] = tool_calls(
                *(model, tokenizer, make, texts, lengths),
                trials=trials or TOOL_TRIALS,
                advance=advance,
                parts=parts.of("tool calls"),
            )
    if tasks:
        found["tasks"] = parts("tasks", partial(lm_eval_tasks, model, tokenizer, make, tasks))
        advance(1)
    return found


def row_of(recipe: Recipe, geometry: Geometry, artifact: Artifact | None, scores: Scores) -> Row:
    """Sizes and scores of one recipe."""
    # without an artifact, `cache` calibrates by itself, and its layouts are not known here
    fitted = Fitted.of(recipe, geometry, artifact if recipe.learns else None)
    layouts = fitted.page_layouts()
    layout = layouts[geometry.packed[0]]
    beyond = scores.beyond(LONG)
    return Row(
        recipe=str(recipe),
        bits_per_element_2k=fitted.bits_per_element(2048),
        bits_per_element_128k=fitted.bits_per_element(131072),
        slot_bytes=layout.key.slot_bytes + layout.value.slot_bytes,
        perplexity=scores.perplexity,
        kl=scores.kl,
        kl_99=scores.kl_99,
        kl_tail=scores.kl_tail,
        top1=scores.top1,
        tokens=scores.tokens,
        copy=None,
        needle=None,
        needle_by_depth=None,
        perplexity_beyond_16k=beyond.perplexity if beyond else None,
        kl_beyond_16k=beyond.kl if beyond else None,
        kl_tail_beyond_16k=beyond.kl_tail if beyond else None,
        layer_bits=[LayerBits(layer, *layouts[layer].side_bits) for layer in geometry.packed],
        for_evaluation=fitted.for_evaluation,
    )
