"""Artifact: what calibration found, with the model it belongs to; a folder with kvfold.json and tensors.safetensors."""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from kvfold.files import write_whole
from kvfold.geometry import Geometry
from kvfold.models import weight_files
from kvfold.rope import Rope

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvfold.recipe import Recipe

METADATA, TENSORS = "kvfold.json", "tensors.safetensors"
TEXT = "text"
DIGESTED = 256  # numbers of each parameter, which tell one model from another
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Fingerprint(_Strict):
    """What tells one model from another."""

    architecture: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rope: dict[str, Any]
    weights: str  # sha256 over the first numbers of every parameter

    @classmethod
    def of(cls, model: "PreTrainedModel") -> Self:
        shape = cls.shape(model.config.to_dict())
        weights = _digest((name, parameter.shape, parameter.flatten()) for name, parameter in model.named_parameters())
        return cls(**{**shape, "architecture": type(model).__name__, "weights": weights})

    @staticmethod
    def shape(config: Mapping[str, Any]) -> dict[str, Any]:
        """All but the weights, as a configuration has it."""
        geometry = Geometry.from_config(config)
        return {
            "architecture": geometry.architecture,
            "layers": geometry.layers,
            "q_heads": geometry.q_heads,
            "kv_heads": geometry.kv_heads,
            "head_dim": geometry.head_dim,
            # without the older name of rope_type, which some engines add
            "rope": {name: value for name, value in (config.get("rope_parameters") or {}).items() if name != "type"},
        }

    def check(self, model: "PreTrainedModel") -> None:
        """Refuse another model, naming the field that differs."""
        self._compare(Fingerprint.of(model).model_dump())

    def check_files(self, config: Mapping[str, Any], weights: str | None) -> None:
        """The same for a model that is not loaded: its configuration, as transformers has it, and `digest_model`."""
        self._compare(self.shape(config) | ({} if weights is None else {"weights": weights}))

    def _compare(self, other: Mapping[str, Any]) -> None:
        for field, theirs in other.items():
            if (mine := getattr(self, field)) != theirs:
                hint = " (folding makes another model, with an artifact of its own)" if field == "weights" else ""
                raise ValueError(
                    f"the artifact was made for another model: its {field} is {mine}, the model's is {theirs}{hint}"
                )


def _digest(parameters: Iterable[tuple[str, Sequence[int], Tensor]]) -> str:
    """Of the name, shape and first numbers of each."""
    digest = hashlib.sha256()
    for name, shape, numbers in sorted(parameters, key=lambda parameter: parameter[0]):
        first = numbers.detach()[:DIGESTED].to("cpu", torch.bfloat16).view(torch.uint8)
        digest.update(f"{name} {tuple(shape)} ".encode() + first.numpy().tobytes())
    return digest.hexdigest()


def digest_model(name: str) -> str | None:
    """`Fingerprint.weights` of a model whose files are on this machine; None where they do not tell."""
    files = weight_files(name)
    return _digest(_first_numbers(files)) if files else None


def _first_numbers(files: Sequence[Path]) -> Iterator[tuple[str, Sequence[int], Tensor]]:
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                part = tensors.get_slice(name)
                shape = part.get_shape()
                rows = -(-DIGESTED // max(1, math.prod(shape[1:])))
                yield name, shape, (part[:rows] if shape else tensors.get_tensor(name)).flatten()


class Provenance(_Strict):
    """The text that was calibrated on, and with what."""

    tokens_sha256: str
    tokens: int
    context: int
    seed: int | None  # of the places in the text; None: from its beginning
    versions: dict[str, str]


class Shard(_Strict):
    """The KV heads of one rank of a tensor-parallel model."""

    rank: int
    ranks: int


class Metadata(_Strict):
    schema_version: Literal[2] = 2
    model: Fingerprint
    rope: Rope
    calibration: Provenance
    recipes: tuple[str, ...] = ()  # those with tensors of their own
    shard: Shard | None = None


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
            if slash and (recipe not in self.metadata.recipes or tensor.shape[:1] != shape[:1]):
                raise ValueError(f"{name} belongs to none of the recipes, or has not {model.layers} layers")
            if slash and tensor.shape[1:2] not in ((1,), (kv_heads,)):
                raise ValueError(f"{name} must be for 1 or {kv_heads} KV heads, not of shape {tuple(tensor.shape)}")
            if not slash and name not in ("key_mean", "value_mean", TEXT):
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
        metadata = self.metadata.model_dump_json(indent=2) + "\n"
        write_whole(folder, {TENSORS: tensors, METADATA: metadata.encode()})

    @classmethod
    def load(cls, where: str | Path) -> Self:
        """From a folder, or by its id from the Hub."""
        folder = Path(where)
        if not folder.exists() and HUB_ID.fullmatch(str(where)):
            from huggingface_hub import snapshot_download

            try:
                folder = Path(snapshot_download(str(where), allow_patterns=[METADATA, TENSORS]))
            except (OSError, ValueError) as error:
                raise ValueError(f"{where} is neither a folder nor what the Hugging Face Hub gives: {error}") from None
        try:
            metadata = Metadata.model_validate_json((folder / METADATA).read_text())
            artifact = cls(metadata, load_file(folder / TENSORS))
            artifact._try_recipes()
            return artifact
        except FileNotFoundError as error:
            raise ValueError(
                f"{folder} is no artifact: there is no {Path(error.filename or TENSORS).name} in it"
            ) from None
        except ValidationError as error:
            faults = {".".join(map(str, fault["loc"])): fault["msg"] for fault in error.errors()}
            if "schema_version" in faults:
                faults = {"schema_version": "that of another kvfold; calibrate again"}
            said = "; ".join(f"{place}: {message}" if place else message for place, message in faults.items())
            raise ValueError(f"{folder} is no valid artifact: {said}") from None
        except (SafetensorError, ValueError) as error:
            raise ValueError(f"{folder} is no valid artifact: {error}") from None


def push(folder: Path, hub_id: str, private: bool = False) -> str:
    """Upload a saved artifact to the Hub; returns its address there."""
    from huggingface_hub import HfApi

    Artifact.load(folder)  # what is not valid here would not be there
    api = HfApi()
    api.create_repo(hub_id, private=private, exist_ok=True)
    return str(api.upload_folder(repo_id=hub_id, folder_path=folder, allow_patterns=[METADATA, TENSORS]))
