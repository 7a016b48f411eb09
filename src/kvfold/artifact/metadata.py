"""Metadata: the contents of kvfold.json, and how it is read. Whoever wrote it is not trusted."""

import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, StringConstraints, ValidationError, model_validator

from kvfold.artifact.check_results import CheckResult
from kvfold.artifact.fingerprint import Count, Fingerprint, Sha256, Strict, Word
from kvfold.models import cache_folder
from kvfold.printable import printable
from kvfold.recipe import LONGEST
from kvfold.recipes import parse
from kvfold.rope import Rope

SCHEMA = 6
# More than any model needs. For each fault, pydantic copies what is around it: this is how much that may be.
MOST_BYTES, MOST_VALUES = 4 * 2**20, 50_000
MOST_RECIPES = 32
COPY = "copy the artifact again, or calibrate again, into another folder"

Spelled = Annotated[str, StringConstraints(max_length=LONGEST)]  # a recipe


class Provenance(Strict):
    """The calibration text, and the versions of the packages that read it."""

    tokens_sha256: Sha256
    tokens: Count
    context: Count
    # The passages were drawn with it. None: the text was read from its beginning.
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None
    versions: dict[Word, Word]


class Shard(Strict):
    """The KV heads of one rank of a tensor-parallel model."""

    rank: NonNegativeInt
    ranks: PositiveInt


class Metadata(Strict):
    model: Fingerprint
    rope: Rope
    calibration: Provenance
    recipes: tuple[Spelled, ...] = Field(max_length=MOST_RECIPES)  # those with fits, as `Recipe.fitted_as` names them
    shard: Shard | None = None
    checks: dict[Spelled, CheckResult] = Field(default_factory=dict)  # by recipe, with all its options

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if any(parse(name).fitted_as != name for name in self.recipes) or len(set(self.recipes)) < len(self.recipes):
            raise ValueError(f"recipes: {', '.join(self.recipes)} are not as calibration names them, each once")
        if others := [name for name in self.checks if str(parse(name)) != name]:
            raise ValueError(f"checks: {others[0]} is not as recipes are written")
        if self.rope.head_dim != self.model.key_dim:
            raise ValueError(f"rope.head_dim is {self.rope.head_dim}, and model.key_dim {self.model.key_dim}")
        if self.shard and (self.shard.rank >= self.shard.ranks or self.model.kv_heads % self.shard.ranks):
            raise ValueError(
                f"shard: {self.model.kv_heads} KV heads have no part {self.shard.rank} of {self.shard.ranks} equal ones"
            )
        return self


class Saved(Metadata):
    """What kvfold.json holds."""

    schema_version: Literal[6]
    tensors_sha256: Sha256  # of tensors.safetensors
    shard: Shard | None


class Older(BaseModel, strict=True):
    """What is read of an artifact of another schema."""

    schema_version: Annotated[int, Field(ge=0, le=1000)]
    recipes: tuple[str, ...] = ()


def read(file: Path) -> Saved:
    """The contents of a kvfold.json. If it is not valid, the error names its faults."""
    with file.open("rb") as stream:
        return valid(stream.read(MOST_BYTES + 1), file)


def valid(text: bytes, file: Path) -> Saved:
    """What the text of `file` says."""
    if len(text) > MOST_BYTES or sum(map(text.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise not_valid(file, "it is larger than any model needs")
    try:
        return Saved.model_validate_json(text)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
    faults = {".".join(map(str, fault["loc"])): fault["msg"] for fault in errors}
    if "schema_version" in faults and (old := _older(text)):
        raise ValueError(f"{file} is of another kvfold: {old}")
    said = "; ".join(f"{place}: {message}" if place else message for place, message in faults.items())
    raise not_valid(file, said.replace("Value error, ", ""))


def not_valid(file: Path, why: object) -> ValueError:
    return ValueError(f"{file} is not valid: {printable(why)}; {repair(file.parent, COPY)}")


def repair(folder: Path, otherwise: str) -> str:
    """What to do about a folder whose files are not those of an artifact."""
    if cache_folder() in folder.parents:
        return f"delete the folder, and the next command makes it again: `rm -r {shlex.quote(str(folder))}`"
    return otherwise


def _older(text: bytes) -> str | None:
    """What to do with an artifact of another schema."""
    try:
        old = Older.model_validate_json(text)
    except ValidationError:
        return None
    named = "".join(f" --recipe {shlex.quote(name)}" for name in _known(old.recipes[:MOST_RECIPES]))
    return (
        f"its schema_version is {old.schema_version}, and {SCHEMA} is read. Make a new one: "
        f"`kvfold calibrate MODEL{named} --out ANOTHER_DIR`"
    )


def _known(names: Iterable[str]) -> Iterator[str]:
    """Those that are recipes, as kvfold spells them."""
    for name in names:
        with suppress(ValueError):
            yield str(parse(name))
