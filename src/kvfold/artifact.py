"""Artifact: what calibration found, with the model it belongs to; a folder with kvfold.json and tensors.safetensors."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeInt,
    PositiveInt,
    StringConstraints,
    ValidationError,
    model_validator,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from kvfold import hub
from kvfold.files import write_whole
from kvfold.fit_tensors import check_fit
from kvfold.geometry import Geometry, text_config
from kvfold.models import weight_files
from kvfold.rope import Rope

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvfold.recipe import Recipe

METADATA, TENSORS = "kvfold.json", "tensors.safetensors"
SCHEMA = 3
TEXT = "text"
DIGESTED = 256  # numbers of each parameter, which tell one model from another
PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # not quantized
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Digests = Mapping[str, str]  # of parameters by name: see `_digest`


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Fingerprint(_Strict):
    """What tells one model from another: its language model, as all that is cached comes from there."""

    model_type: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rope: dict[str, Any]
    weights: Digests  # of the decoder's parameters, by their names in it

    @model_validator(mode="after")
    def _possible(self) -> Self:
        Geometry(self.model_type, self.layers, self.q_heads, self.kv_heads, self.head_dim)
        return self

    @classmethod
    def of(cls, model: "PreTrainedModel") -> Self:
        weights = {
            name: _digest(parameter.shape, parameter.flatten()[:DIGESTED])
            for name, parameter in model.get_decoder().named_parameters()
            if parameter.dtype in PLAIN.values() and parameter.ndim <= 2
        }
        return cls(**cls.shape(model.config.to_dict()), weights=weights)

    @staticmethod
    def shape(config: Mapping[str, Any]) -> dict[str, Any]:
        """All but the weights, as a configuration has it."""
        geometry, text = Geometry.from_config(config), text_config(config)
        return {
            "layers": geometry.layers,
            "q_heads": geometry.q_heads,
            "kv_heads": geometry.kv_heads,
            "head_dim": geometry.head_dim,
            "model_type": text.get("model_type", ""),
            # without the older name of rope_type, which some engines add
            "rope": {name: value for name, value in text.get("rope_parameters", {}).items() if name != "type"},
        }

    def check(self, model: "PreTrainedModel") -> None:
        """Refuse another model, naming what differs."""
        self._compare(Fingerprint.of(model).model_dump())

    def check_files(self, config: Mapping[str, Any], weights: Digests | None) -> None:
        """The same for a model that is not loaded: its configuration, as transformers has it, and `digest_model`."""
        self._compare({**self.shape(config), "weights": weights or {}})

    def _compare(self, other: Mapping[str, Any]) -> None:
        for field, theirs in other.items():
            if field != "weights" and (mine := getattr(self, field)) != theirs:
                raise ValueError(
                    f"the artifact was made for another model: its {field} is {mine}, the model's is {theirs}"
                )
        if changed := self._changed(other["weights"]):
            raise ValueError(
                f"the artifact was made for another model: its weights are others, {changed} among them "
                "(folding makes another model, with an artifact of its own)"
            )

    def _changed(self, theirs: Digests) -> str | None:
        """A parameter of both that differs. Theirs may have other tensors too, and their names something in front, such
        as `model.` or `language_model.model.`: that with which most names are found."""
        fronts = Counter[str]()
        for name in theirs:
            parts = name.split(".")
            fronts.update(
                name.removesuffix(end) for i in range(len(parts)) if (end := ".".join(parts[i:])) in self.weights
            )
        for front, _ in fronts.most_common(1):
            for name, digest in self.weights.items():
                if theirs.get(front + name, digest) != digest:
                    return name
        return None


def _digest(shape: Sequence[int], numbers: Tensor) -> str:
    """Of a parameter's shape and first numbers, in bfloat16, so that its 16-bit copies are the same."""
    first = numbers.detach().to("cpu", torch.bfloat16).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tuple(shape)} ".encode() + first).hexdigest()[:16]


def digest_model(name: str) -> Digests | None:
    """The tensors in the files of a model on this machine, by their names there; None where the files do not tell.

    Left out are those that are quantized, and stacks of experts, which transformers turns over when it loads them.
    """
    digests = {}
    for file in weight_files(name):
        with safe_open(file, framework="pt") as tensors:
            for tensor in tensors.keys():  # noqa: SIM118
                part = tensors.get_slice(tensor)
                shape = part.get_shape()
                if part.get_dtype() in PLAIN and len(shape) <= 2:
                    rows = -(-DIGESTED // max(1, math.prod(shape[1:])))
                    numbers = part[:rows] if shape else tensors.get_tensor(tensor)
                    digests[tensor] = _digest(shape, numbers.flatten()[:DIGESTED])
    return digests or None


class Provenance(_Strict):
    """The text that was calibrated on, and with what."""

    tokens_sha256: Sha256
    tokens: PositiveInt
    context: PositiveInt
    seed: NonNegativeInt | None  # of the places in the text; None: from its beginning
    versions: dict[str, str]


class Shard(_Strict):
    """The KV heads of one rank of a tensor-parallel model."""

    rank: NonNegativeInt
    ranks: PositiveInt


class Metadata(_Strict):
    model: Fingerprint
    rope: Rope
    calibration: Provenance
    recipes: tuple[str, ...]  # those with tensors of their own
    shard: Shard | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        from kvfold.recipes import parse

        if any(parse(name).fitted_as != name for name in self.recipes) or len(set(self.recipes)) < len(self.recipes):
            raise ValueError(f"recipes: {', '.join(self.recipes)} are not as calibration names them, each once")
        if self.rope.head_dim != self.model.head_dim:
            raise ValueError(f"rope.head_dim is {self.rope.head_dim}, and model.head_dim {self.model.head_dim}")
        if self.shard and (self.shard.rank >= self.shard.ranks or self.model.kv_heads % self.shard.ranks):
            raise ValueError(
                f"shard: {self.model.kv_heads} KV heads have no part {self.shard.rank} of {self.shard.ranks} equal ones"
            )
        return self


class _Saved(Metadata):
    """What kvfold.json holds."""

    schema_version: Literal[3]
    tensors_sha256: Sha256  # of tensors.safetensors
    shard: Shard | None


@dataclass(frozen=True)
class Artifact:
    """Means for any recipe that centres, and what was fitted for the recipes that learn more.

    Tensors are [layers, kv_heads or 1, …]: `key_mean` and `value_mean`, `RECIPE/NAME` for each name of a recipe's fit,
    and `text`, the hashes by which evaluation recognises text that was calibrated on.
    """

    metadata: Metadata
    tensors: dict[str, Tensor]

    def __post_init__(self) -> None:
        model, shard = self.metadata.model, self.metadata.shard
        kv_heads = model.kv_heads // shard.ranks if shard else model.kv_heads
        shape = (model.layers, kv_heads, model.head_dim)
        for name in ("key_mean", "value_mean"):
            tensor = self.tensors.get(name)
            if tensor is None or tensor.shape != shape or tensor.dtype != torch.float32:
                found = "missing" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
                raise ValueError(f"{name} must be finite float32 of shape {shape}; it is {found}")
        for name, tensor in self.tensors.items():
            if not torch.isfinite(tensor).all():
                raise ValueError(f"{name} must be finite")
            recipe, slash, _ = name.rpartition("/")
            if slash and recipe not in self.metadata.recipes:
                raise ValueError(f"{name} belongs to none of the recipes")
            if slash:
                check_fit(name, tensor, *shape)
            elif name not in ("key_mean", "value_mean", TEXT):
                raise ValueError(f"unknown tensor {name}")
        text = self.tensors.get(TEXT)
        if text is None or text.dtype != torch.int64 or text.ndim != 1:
            raise ValueError(f"{TEXT} must be the hashes of the text that was calibrated on, int64 of one dimension")
        for recipe in self.metadata.recipes:
            if not any(name.startswith(f"{recipe}/") for name in self.tensors):
                raise ValueError(f"there is no tensor of {recipe}")

    def _try_recipes(self) -> None:
        """Refuse tensors that a recipe cannot work with, before it does."""
        from kvfold.recipes import parse

        kv_heads, head_dim = self.tensors["key_mean"].shape[1:]
        for name in self.metadata.recipes:
            try:
                for codec in parse(name).codecs(head_dim, self.fit(parse(name), 0)):
                    codec.transform.inverse(codec.transform.forward(torch.zeros(1, kv_heads, head_dim)))
            except (KeyError, IndexError, RuntimeError) as error:
                raise ValueError(f"the tensors of {name} are not what it needs: {error}") from None

    def fit(self, recipe: "Recipe", layer: int) -> dict[str, Tensor]:
        """The tensors of one layer that a recipe asks for, by name."""
        if recipe.learns and recipe.fitted_as not in self.metadata.recipes:
            has = ", ".join(self.metadata.recipes) or "means alone"
            raise ValueError(
                f"the artifact was not calibrated for {recipe.fitted_as}, it holds {has}: "
                f"run `kvfold calibrate MODEL --recipe {recipe.fitted_as} --out DIR`"
            )
        own = {name.rpartition("/"): tensor for name, tensor in self.tensors.items()}
        fit = {name: tensor[layer] for (of, _, name), tensor in own.items() if of == recipe.fitted_as}
        return {"key_mean": self.tensors["key_mean"][layer], "value_mean": self.tensors["value_mean"][layer], **fit}

    def shard(self, rank: int, ranks: int) -> "Artifact":
        """The part of one of several ranks, each with an equal share of the KV heads in order, without k-means."""
        kv_heads = self.metadata.model.kv_heads
        if self.metadata.shard or not 0 <= rank < ranks or kv_heads % ranks:
            raise ValueError(f"{kv_heads} KV heads have no part {rank} of {ranks} equal ones")
        # the nearest centroid is found over all KV heads of a token, which no rank has
        joint = (
            {name.rpartition("/")[0] for name in self.tensors if name.endswith("_centroids")} if ranks > 1 else set()
        )
        recipes = tuple(name for name in self.metadata.recipes if name not in joint)
        tensors = {
            name: tensor.chunk(ranks, dim=1)[rank].contiguous() if name != TEXT and tensor.shape[1] > 1 else tensor
            for name, tensor in self.tensors.items()
            if name.rpartition("/")[0] not in joint
        }
        shard = Shard(rank=rank, ranks=ranks)
        return Artifact(self.metadata.model_copy(update={"shard": shard, "recipes": recipes}), tensors)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = save({name: tensor.contiguous() for name, tensor in self.tensors.items()})
        front = {"schema_version": SCHEMA, "tensors_sha256": hashlib.sha256(tensors).hexdigest()}
        metadata = json.dumps({**front, **self.metadata.model_dump(mode="json")}, indent=2) + "\n"
        write_whole(folder, {TENSORS: tensors, METADATA: metadata.encode()})

    @classmethod
    def load(cls, where: str | Path) -> Self:
        """From a folder, or by its id from the Hub."""
        folder = Path(where)
        if not folder.exists() and HUB_ID.fullmatch(str(where)):
            folder = _download(str(where))
        try:
            text, content = (folder / METADATA).read_bytes(), (folder / TENSORS).read_bytes()
        except FileNotFoundError as error:
            raise ValueError(f"{folder} is no artifact: there is no {Path(error.filename).name} in it") from None
        except OSError as error:
            raise ValueError(f"{folder} is no artifact: {error.filename}: {error.strerror}") from None
        saved = _read(folder / METADATA, text)
        if hashlib.sha256(content).hexdigest() != saved.tensors_sha256:
            raise ValueError(
                f"{folder / TENSORS} is damaged, or not the one that {METADATA} was written with: "
                "its SHA-256 is not tensors_sha256; copy the artifact again, or calibrate again"
            )
        try:
            metadata = Metadata(**{field: getattr(saved, field) for field in Metadata.model_fields})
            artifact = cls(metadata, load(content))
            artifact._try_recipes()
        except (SafetensorError, ValueError) as error:
            raise ValueError(f"{folder / TENSORS} is not valid: {error}") from None
        return artifact


def _read(file: Path, text: bytes) -> _Saved:
    try:
        return _Saved.model_validate_json(text)
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


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        with hub.asked():
            return Path(snapshot_download(hub_id, allow_patterns=[METADATA, TENSORS]))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{hub_id} is neither a folder nor what the Hugging Face Hub gives: {hub.why(error)}"
        ) from None


def push(folder: Path, hub_id: str, private: bool = False) -> str:
    """Upload a saved artifact to the Hub; returns its address there."""
    from huggingface_hub import HfApi

    Artifact.load(folder)  # what is not valid here would not be there
    if hub.silent():
        raise OSError(f"cannot push to {hub_id}: {hub.unreachable()}")
    api = HfApi()
    api.create_repo(hub_id, private=private, exist_ok=True)
    return str(api.upload_folder(repo_id=hub_id, folder_path=folder, allow_patterns=[METADATA, TENSORS]))
