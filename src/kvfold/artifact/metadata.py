"""Metadata: the contents of kvfold.json, and how it is read."""

import json
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

from kvfold.artifact.check_results import CheckResult
from kvfold.artifact.fingerprint import Fingerprint, Sha256, Strict
from kvfold.recipes import parse
from kvfold.rope import Rope

SCHEMA = 5


class Provenance(Strict):
    """The calibration text, and the versions of the packages that read it."""

    tokens_sha256: Sha256
    tokens: PositiveInt
    context: PositiveInt
    seed: NonNegativeInt | None  # the passages were drawn with it; None: the text was read from its beginning
    versions: dict[str, str]


class Shard(Strict):
    """The KV heads of one rank of a tensor-parallel model."""

    rank: NonNegativeInt
    ranks: PositiveInt


class Metadata(Strict):
    model: Fingerprint
    rope: Rope
    calibration: Provenance
    recipes: tuple[str, ...]  # recipes with fits, as `Recipe.fitted_as` names them
    shard: Shard | None = None
    checks: dict[str, CheckResult] = Field(default_factory=dict)  # by recipe, with all its options

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

    schema_version: Literal[5]
    tensors_sha256: Sha256  # of tensors.safetensors
    shard: Shard | None


def read(file: Path, text: bytes) -> Saved:
    """The contents of a kvfold.json. If it is not valid, the error names each fault."""
    try:
        return Saved.model_validate_json(text)
    except ValidationError as error:
        faults = {".".join(map(str, fault["loc"])): fault["msg"] for fault in error.errors()}
    if "schema_version" in faults and (old := _older(text)):
        raise ValueError(f"{file} is of another kvfold: {old}")
    said = "; ".join(f"{place}: {message}" if place else message for place, message in faults.items())
    raise ValueError(f"{file} is not valid: {said.replace('Value error, ', '')}")


def _older(text: bytes) -> str | None:
    """What to do with an artifact of another schema."""
    content = json.loads(text)
    match content:
        case {"schema_version": int(version), **others}:
            recipes = others.get("recipes")
            named = "".join(f" --recipe {name}" for name in recipes) if isinstance(recipes, list) else ""
            return (
                f"its schema_version is {version}, and {SCHEMA} is read. Make a new one: "
                f"`kvfold calibrate MODEL{named} --out ANOTHER_DIR`"
            )
    return None
