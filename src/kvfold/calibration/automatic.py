"""Calibration if the user gives no artifact. Every command and the Python API use the same text and token count."""

import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.artifact import SCHEMA, Artifact, Fingerprint, digest_model
from kvfold.calibration.fit import calibrate, versions
from kvfold.geometry import Geometry
from kvfold.models import cache_folder
from kvfold.recipe import Recipe
from kvfold.text import default_text, tokenize, with_openings

TOKENS = 2048  # one passage; on the embedded model, 1,024 to 8,192 tokens do equally well, for means and for fits

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def calibrate_automatically(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recipes: Sequence[Recipe],
    progress: Callable[[float], None] = lambda share: None,
) -> Artifact:
    """Calibrate on the first `TOKENS` tokens of Python's documentation: one passage, or more if the model takes fewer
    tokens at a time."""
    context = min(TOKENS, Geometry.from_config(model.config.to_dict()).max_context or TOKENS)
    tokens = with_openings(tokenize(default_text("calibration"), tokenizer, TOKENS), context, tokenizer)
    return calibrate(model, tokens, context, recipes, progress=progress)


def kept(
    name: str, recipe: Recipe, load: Callable[[str], Loaded], run: Callable[[Loaded, Sequence[Recipe]], Artifact]
) -> Path:
    """The folder of an artifact for one recipe, in the user's cache. If there is none, `load` loads the model and `run`
    calibrates it.

    The folder's name has a hash of the model's weights and of the versions. With other versions, the artifact is made
    anew.
    """
    weights, loaded = digest_model(name), None
    if weights is None:  # the model is not on this machine yet, or not in safetensors files
        loaded = load(name)
        weights = digest_model(name) or Fingerprint.of(loaded[0]).weights
    made_with = [weights, SCHEMA, versions(), platform.python_version(), TOKENS]
    key = hashlib.sha256(json.dumps(made_with, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_folder() / "artifacts" / f"{key}-{recipe.fitted_as if recipe.learns else 'means'}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        artifact = run(loaded or load(name), [recipe])
        with TemporaryDirectory(dir=folder.parent) as scratch:
            artifact.save(Path(scratch) / folder.name)
            try:
                (Path(scratch) / folder.name).rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was faster, with the same result
                    raise
    return folder
