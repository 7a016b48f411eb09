"""Calibration where no artifact is given: the same text and number of tokens for every command and for Python."""

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
from kvfold.text import default_text, tokenize

TOKENS = 2048  # one window; on the embedded model 1,024 to 8,192 tokens do equally well, means and fits alike

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def calibrate_automatically(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recipes: Sequence[Recipe],
    progress: Callable[[float], None] = lambda share: None,
) -> Artifact:
    """On the first `TOKENS` of Python's own documentation, in one window or in windows as long as the model takes."""
    longest = Geometry.from_config(model.config.to_dict()).max_context or TOKENS
    tokens = tokenize(default_text("calibration"), tokenizer, TOKENS)
    return calibrate(model, tokens, min(TOKENS, longest), recipes, progress=progress)


def kept(
    name: str, recipe: Recipe, load: Callable[[str], Loaded], run: Callable[[Loaded, Sequence[Recipe]], Artifact]
) -> Path:
    """The folder, in the user's cache, of what one recipe has to know about a model. Where it is missing, `load` gets
    the model and `run` calibrates it, automatically.

    It is kept for the model's weights, and made anew with other versions of what made it.
    """
    weights, loaded = digest_model(name), None
    if weights is None:  # they are not on this machine yet, or in other files than can be read here
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
                if not folder.is_dir():  # otherwise another process was faster, with the same result
                    raise
    return folder
