"""One evaluation: every recipe on the same model and text, as a report."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import transformers
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.artifact import Artifact
from kvfold.engines.transformers import cache
from kvfold.evaluate.logits import Scores, compare
from kvfold.evaluate.report import REFERENCE, Report, Row
from kvfold.evaluate.retrieval import copy_accuracy, needle_accuracy
from kvfold.geometry import Geometry
from kvfold.recipe import Recipe
from kvfold.recipes import parse

PLAIN = "transformers' own cache"


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recipes: Sequence[Recipe],
    tokens: Tensor,
    context: int,
    *,
    artifact: Artifact | None = None,
    names: tuple[str, str] = ("", ""),  # of the model and of the text
    advance: Callable[[float], None] = lambda share: None,
) -> Report:
    """Evaluate `recipes` beside the 16-bit cache, on `tokens` (1-D); `advance` gets shares of 1."""
    geometry = Geometry.from_config(model.config.to_dict())
    panel = {str(recipe): recipe for recipe in (parse(REFERENCE), *recipes)}
    makes: dict[str, Callable[[], Cache]] = {
        name: partial(cache, model, recipe, artifact) for name, recipe in panel.items()
    }
    for make in makes.values():
        make()  # what does not fit the model fails here, before the long work
    others = {name: make for name, make in makes.items() if name != REFERENCE}
    others[PLAIN] = partial(DynamicCache, config=model.config)
    own, scores = compare(model, tokens, context, makes[REFERENCE], others, lambda share: advance(0.6 * share))
    rows = []
    for name, recipe in panel.items():
        copied = copy_accuracy(model, makes[name], tokens)
        needles = needle_accuracy(model, tokenizer, makes[name], tokens)
        rows.append(_row(recipe, geometry, own if name == REFERENCE else scores[name], copied, needles))
        advance(0.4 / len(panel))
    versions = {module.__name__: module.__version__ for module in (kvfold, torch, transformers)}
    return Report(
        model=names[0],
        text=names[1],
        context=context,
        tokens=len(tokens),
        noise_floor=scores[PLAIN].kl,
        plain_perplexity=scores[PLAIN].perplexity,
        versions=versions,
        rows=rows,
    )


def _row(recipe: Recipe, geometry: Geometry, scores: Scores, copied: float, needles: dict[str, float]) -> Row:
    layout = recipe.page_layout(0, geometry.head_dim)
    return Row(
        recipe=str(recipe),
        bits_per_element_2k=recipe.bits_per_element(geometry, 2048),
        bits_per_element_128k=recipe.bits_per_element(geometry, 131072),
        slot_bytes=layout.key.slot_bytes + layout.value.slot_bytes,
        perplexity=scores.perplexity,
        kl=scores.kl,
        top1=scores.top1,
        tokens=scores.tokens,
        copy=copied,
        needle=sum(needles.values()) / len(needles),
        needle_by_depth=needles,
    )
