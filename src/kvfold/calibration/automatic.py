"""Calibration if the user gives no artifact. Every command and the Python API use the same text and token count."""

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.artifact import SCHEMA, Artifact, Fingerprint, digest_model
from kvfold.calibration.fit import calibrate, versions
from kvfold.geometry import Geometry
from kvfold.models import cache_folder, default_device, keep, scratch_in
from kvfold.recipe import Recipe
from kvfold.recipes import method_source
from kvfold.text import default_text, tokenize, with_openings

# One passage. Slow RoPE blocks of a key hardly turn in 2,048 tokens. Fitted on so few, `fold2` finds 77 % of needles in
# contexts of 32,000 tokens. It finds 98 % if it was fitted on 8,192 or 32,768 (benchmarks/README.md). A CPU would take
# minutes for 8,192 tokens even of a small model.
TOKENS = {"cuda": 8192, "cpu": 2048}

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def calibrate_automatically(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recipes: Sequence[Recipe],
    progress: Callable[[float], None] = lambda share: None,
) -> Artifact:
    """Calibrate on the first `TOKENS` tokens of Python's documentation: one passage, or more if the model takes fewer
    tokens at a time."""
    read = tokens_on(model.device.type)
    context = usual_context(Geometry.from_config(model.config.to_dict()), model.device.type)
    tokens = with_openings(tokenize(default_text("calibration"), tokenizer, read), context, tokenizer)
    return calibrate(model, tokens, context, recipes, progress=progress)


def tokens_on(device: str) -> int:
    """How many tokens are read on a device of this type."""
    return TOKENS.get(device, TOKENS["cpu"])


def usual_context(geometry: Geometry, device: str) -> int:
    """How many of them the model sees at a time."""
    return min(tokens_on(device), geometry.max_context or tokens_on(device))


def kept(
    name: str,
    recipes: Sequence[Recipe],
    load: Callable[[str], Loaded],
    run: Callable[[Loaded, Sequence[Recipe]], Artifact],
) -> list[Path]:
    """The folders of artifacts in the user's cache, one for each recipe. If some are missing, `load` loads the model
    and `run` calibrates it for all of them at once.

    The folder's name has a hash of the model's weights, of the versions and of the method's source. If one of them
    changes, the artifact is made anew.
    """
    weights, loaded = digest_model(name), None
    if weights is None:  # the model is not on this machine yet, or not in safetensors files
        loaded = load(name)
        weights = digest_model(name) or Fingerprint.of(loaded[0]).weights
    folders = [_folder(weights, recipe) for recipe in recipes]
    missing = {folder: recipe for folder, recipe in zip(folders, recipes, strict=True) if not folder.is_dir()}
    if missing:
        with scratch_in(cache_folder() / "artifacts") as scratch:
            artifact = run(loaded or load(name), list(missing.values()))
            for folder, recipe in missing.items():
                artifact.only(recipe).save(scratch / folder.name)
                keep(scratch / folder.name, folder)
    return folders


def _folder(weights: Mapping[str, str], recipe: Recipe) -> Path:
    source = method_source(recipe) if recipe.learns else ""
    made_with = [weights, SCHEMA, versions(), platform.python_version(), tokens_on(default_device()), source]
    key = hashlib.sha256(json.dumps(made_with, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "artifacts" / f"{key}-{recipe.fitted_as if recipe.learns else 'means'}"


def joined(folders: Sequence[Path]) -> Artifact:
    """One artifact of all that `kept` returned. Results of checks stay behind."""
    artifacts = [Artifact.load(folder) for folder in folders]
    recipes = dict.fromkeys(name for artifact in artifacts for name in artifact.metadata.recipes)
    tensors = {name: tensor for artifact in artifacts for name, tensor in artifact.tensors.items()}
    changed = {"recipes": tuple(recipes), "checks": {}}
    return Artifact(artifacts[0].metadata.model_copy(update=changed), tensors)
