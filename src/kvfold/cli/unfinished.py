"""Commands that go on where they were interrupted."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from kvfold.cli.output import err
from kvfold.files import check_target
from kvfold.kept_parts import NOTHING_KEPT, Parts
from kvfold.models import cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def unfinished(*files: Path | None) -> Iterator[None]:
    """Files from which a run goes on after an interruption. They are deleted when it is done. Ctrl-C says what is
    kept."""
    try:
        yield
    except KeyboardInterrupt:
        kept = [file for file in files if file and file.exists()]
        said = "Nothing is kept: no part was finished."
        if kept:
            said = f"{kept[-1]} keeps what is finished: the same command goes on from there."
        err.print(escape(f"Stopped. {said}"), soft_wrap=True, highlight=False)
        raise typer.Exit(130) from None
    for file in filter(None, files):
        file.unlink(missing_ok=True)


def parts_in_cache(source: str) -> Parts:
    """Of a command that writes no folder. If the cache folder cannot be written, nothing is kept, which is said."""
    file = cache_folder() / "unfinished" / f"{source[:16]}.jsonl"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        check_target(file)
    except OSError as error:
        err.print(escape(f"An interrupted run will begin anew: {error}"), soft_wrap=True, highlight=False)
        return NOTHING_KEPT
    return Parts.load(file, source)


def hash_of(name: str, model: "PreTrainedModel", *facts: Any) -> str:
    """A hash of a model, of how it runs, and of facts: JSON, data classes and tensors."""
    from kvfold.artifact import Fingerprint, digest_model
    from kvfold.calibration.fit import versions

    weights = digest_model(name) or Fingerprint.of(model).weights
    runs = [versions(), weights, model.config.to_json_string(), str(model.dtype), model.device.type]
    return hashlib.sha256(json.dumps([*runs, *facts], default=_plain, sort_keys=True).encode()).hexdigest()


def _plain(fact: Any) -> Any:
    if is_dataclass(fact) and not isinstance(fact, type):
        return vars(fact)
    from safetensors.torch import save

    return hashlib.sha256(save({"fact": fact.contiguous()})).hexdigest()
