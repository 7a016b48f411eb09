"""Pages that outlive a server: under which name they are stored, and whether they are what was stored."""

import hashlib
import json
from collections.abc import Mapping

from kvfold.artifact import Artifact
from kvfold.engines.serving import Config
from kvfold.recipes import method_source
from kvfold.version import __version__

CHECKSUM_BYTES = 16


def name_of_pages(config: Config, weights: Mapping[str, str], *model: str | None) -> str:
    """Pages have the same name only if the same recipe and artifact packed them, of the same model, in the same version
    of kvfold. `weights` is the model's `digest_model`; `model` is what else decides its keys and values."""
    fit = None if config.artifact is None else Artifact.load(config.artifact).fit_sha256(config.recipe)
    recipe = [config.recipe.model_dump(mode="json"), method_source(config.recipe)]
    packed_by = json.dumps([__version__, recipe, fit, weights, model], sort_keys=True)
    return f"kvfold-{hashlib.sha256(packed_by.encode()).hexdigest()[:16]}"


def checksum(name: str, page: memoryview | bytes) -> bytes:
    """Of a stored page and its name. It changes if a byte changes, and if the page gets another's name."""
    digest = hashlib.blake2b(name.encode(), digest_size=CHECKSUM_BYTES)
    digest.update(page)
    return digest.digest()
