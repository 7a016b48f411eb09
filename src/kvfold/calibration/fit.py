"""Calibration: one run of a text through a model, and what every recipe learns from it."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.artifact import TEXT, Artifact, Fingerprint, Metadata, Provenance
from kvfold.calibration.capture import capture
from kvfold.calibration.statistics import Statistics
from kvfold.calibration.text_overlap import text_hashes
from kvfold.fitted import Fitted
from kvfold.geometry import Geometry
from kvfold.recipe import Recipe
from kvfold.version import __version__


def calibrate(
    model: PreTrainedModel,
    tokens: Tensor,
    context: int = 2048,
    recipes: Sequence[Recipe] = (),
    *,
    seed: int | None = None,  # the tokens were drawn with it, for the record
    into: Artifact | None = None,
    checkpoint: Path | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Artifact:
    """Run `tokens` (1-D) through the model in passages of `context` tokens. Keep the means, and fit `recipes`.

    The new fits are added to the fits of `into`, which must be of the same model and text. `progress` gets shares of 1.
    With a `checkpoint`, an interrupted run continues from there. The caller deletes it after saving the artifact.
    """
    geometry = Geometry.from_config(model.config.to_dict())
    for recipe in recipes:
        Fitted(recipe, geometry).check()
    fingerprint, provenance = Fingerprint.of(model), _provenance(tokens, context, seed)
    if into is not None and (into.metadata.model, into.metadata.calibration) != (fingerprint, provenance):
        raise ValueError("the artifact to add to is of another model, text or version; write to another folder")
    statistics = capture(model, tokens, context, checkpoint=checkpoint, progress=lambda share: progress(0.7 * share))
    learning = {recipe.fitted_as: recipe for recipe in recipes if recipe.learns}
    tensors = {
        "key_mean": torch.stack([layer.k.mean for layer in statistics.layers]).float(),
        "value_mean": torch.stack([layer.read_v.mean for layer in statistics.layers]).float(),
        "key_first": torch.stack([layer.first for layer in statistics.layers]).float(),
        TEXT: text_hashes(tokens),
        **(into.tensors if into else {}),
    }
    for name, recipe in learning.items():
        tensors |= {f"{name}/{tensor}": fit for tensor, fit in fit_layers(recipe, statistics).items()}
        progress(0.3 / len(learning))
    names = dict.fromkeys((*(into.metadata.recipes if into else ()), *learning))
    checks = into.metadata.checks if into else {}
    metadata = Metadata(
        model=fingerprint, rope=statistics.rope, calibration=provenance, recipes=tuple(names), checks=checks
    )
    return Artifact(metadata, tensors)


def _provenance(tokens: Tensor, context: int, seed: int | None) -> Provenance:
    return Provenance(
        tokens_sha256=hashlib.sha256(tokens.to("cpu", torch.int64).numpy().tobytes()).hexdigest(),
        tokens=len(tokens),
        context=context,
        seed=seed,
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """The versions of the packages that decide the numbers."""
    return {"kvfold": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def fit_layers(recipe: Recipe, statistics: Statistics) -> dict[str, Tensor]:
    """The fits of a recipe for all layers, [layers, …]."""
    fits = [
        recipe.fit(layer, statistics.rope, (layer.k.mean, layer.read_v.mean) if recipe.centre else (None, None))
        for layer in statistics.layers
    ]
    return {name: torch.stack([fit[name] for fit in fits]) for name in fits[0]}
