"""Artifact: what calibration found for one model. In memory, in a folder and on the Hub."""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvfold import hub
from kvfold.artifact.check_results import CheckResult
from kvfold.artifact.fit_tensors import LARGEST, check_numbers, check_shape, in_range
from kvfold.artifact.metadata import COPY, SCHEMA, Metadata, Saved, Shard, not_valid, read, repair, valid
from kvfold.files import write_whole
from kvfold.models import CARRIED
from kvfold.recipe import Recipe
from kvfold.recipes import parse

METADATA, TENSORS, CARD = "kvfold.json", "tensors.safetensors", "README.md"
TEXT = "text"
MEANS = "key_mean", "value_mean", "key_first"  # the last: what keys at position 0 are near
MOST_BYTES, MOST_HEADER = 2**30, 2**20  # of tensors.safetensors; a few megabytes are usual
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Artifact:
    """Means, for any recipe that centres, and the fits of recipes that learn more.

    Tensors are [packed layers, kv_heads or 1, …]: MEANS, and `RECIPE/NAME` per tensor of a recipe's fit.
    `text` holds hashes of the calibration text, so that evaluation recognises it.
    """

    metadata: Metadata
    tensors: dict[str, Tensor]

    def __post_init__(self) -> None:
        _check_shapes(self.metadata, self.tensors)
        for name, tensor in self.tensors.items():
            if not torch.isfinite(tensor).all():
                raise ValueError(f"{name} must be finite")
            if name in MEANS and not in_range(tensor):
                raise ValueError(f"{name} must be at most {LARGEST:,.0f}, which 16 bits hold")
            if "/" in name:
                check_numbers(name, tensor)

    def _try_recipes(self) -> None:
        """Refuse tensors that a recipe cannot work with, before it is used. One layer and KV head are tried: all others
        have tensors of the same shapes."""
        means = [self.tensors[name][:1, :1] for name in MEANS[:2]]  # [1, 1, d]
        model = self.metadata.model
        for name in self.metadata.recipes:
            fit = {key: tensor[:1] for key, tensor in self.fit(parse(name), model.packed[0]).items()}
            try:
                codecs = parse(name).codecs(model.key_dim, model.value_dim, fit)
                for codec, mean in zip(codecs, means, strict=True):
                    codec.transform.inverse(codec.transform.forward(torch.zeros_like(mean)))
            except (KeyError, IndexError, RuntimeError) as error:
                raise ValueError(f"the tensors of {name} are not what it needs: {error}") from None

    def fit(self, recipe: Recipe, layer: int) -> dict[str, Tensor]:
        """The means of one packed layer and what the recipe learned for it, by name."""
        if recipe.learns and recipe.fitted_as not in self.metadata.recipes:
            has = ", ".join(self.metadata.recipes) or "means alone"
            raise ValueError(
                f"the artifact was not calibrated for {recipe.fitted_as}, it holds {has}: run `{recipe.fitted_by}`"
            )
        row = self.metadata.model.packed.index(layer)
        own = {name.rpartition("/"): tensor for name, tensor in self.tensors.items()}
        fit = {name: tensor[row] for (of, _, name), tensor in own.items() if of == recipe.fitted_as}
        return {**{name: self.tensors[name][row] for name in MEANS}, **fit}

    def fit_sha256(self, recipe: Recipe) -> str:
        """A hash of all that the recipe takes from the artifact: the means, and its own tensors."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            if name in MEANS or name.rpartition("/")[0] == recipe.fitted_as:
                digest.update(save({name: tensor.contiguous()}))
        return digest.hexdigest()

    def check_result(self, recipe: Recipe) -> CheckResult | None:
        """What `kvfold check` found, unless means or fits have changed since."""
        result = self.metadata.checks.get(str(recipe))
        return result if result is not None and result.fit_sha256 == self.fit_sha256(recipe) else None

    def with_check(self, recipe: Recipe, result: CheckResult) -> "Artifact":
        """With the result of a check. It replaces the recipe's previous one."""
        checks = {**self.metadata.checks, str(recipe): result}
        return Artifact(self.metadata.model_copy(update={"checks": checks}), self.tensors)

    def only(self, recipe: Recipe) -> "Artifact":
        """The means, and the fits of one recipe."""
        own = (recipe.fitted_as,) if recipe.learns else ()
        tensors = {name: tensor for name, tensor in self.tensors.items() if name.rpartition("/")[0] in ("", *own)}
        return Artifact(self.metadata.model_copy(update={"recipes": own, "checks": {}}), tensors)

    def shard(self, rank: int, ranks: int) -> "Artifact":
        """The part of one rank: an equal share of the KV heads, in order. Recipes with centroids are left out if there
        is more than one rank."""
        kv_heads = self.metadata.model.kv_heads
        if self.metadata.shard or not 0 <= rank < ranks or kv_heads % ranks:
            raise ValueError(f"{kv_heads} KV heads have no part {rank} of {ranks} equal ones")
        # the nearest centroid depends on all KV heads of a token, and no rank has them all
        joint = (
            {name.rpartition("/")[0] for name in self.tensors if name.endswith("_centroids")} if ranks > 1 else set()
        )
        recipes = tuple(name for name in self.metadata.recipes if name not in joint)
        tensors = {
            name: tensor.chunk(ranks, dim=1)[rank].contiguous() if name != TEXT and tensor.shape[1] > 1 else tensor
            for name, tensor in self.tensors.items()
            if name.rpartition("/")[0] not in joint
        }
        changed = {"shard": Shard(rank=rank, ranks=ranks), "recipes": recipes, "checks": {}}
        return Artifact(self.metadata.model_copy(update=changed), tensors)

    def save(self, folder: Path) -> None:
        check_place(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = save({name: tensor.contiguous() for name, tensor in self.tensors.items()})
        front = {"schema_version": SCHEMA, "tensors_sha256": hashlib.sha256(tensors).hexdigest()}
        metadata = (json.dumps({**front, **self.metadata.model_dump(mode="json")}, indent=2) + "\n").encode()
        valid(metadata, folder / METADATA)  # what is written can be read
        write_whole(folder, {TENSORS: tensors, METADATA: metadata})

    @classmethod
    def load(cls, where: str | Path) -> Self:
        """From a folder, or from the Hub by its id. Nothing in it is trusted."""
        folder = find(where)
        try:
            saved = read(folder / METADATA)
            tensors = _tensors(folder / TENSORS, saved)
        except FileNotFoundError as error:
            make = f"make one with `kvfold calibrate MODEL --out {shlex.quote(str(folder))}`"
            raise ValueError(
                f"{folder} is no artifact: there is no {Path(error.filename).name} in it; {repair(folder, make)}"
            ) from None
        except OSError as error:
            raise ValueError(f"{folder} is no artifact: {error.filename}: {error.strerror}") from None
        try:
            metadata = Metadata(**{field: getattr(saved, field) for field in Metadata.model_fields})
            artifact = cls(metadata, tensors)
            artifact._try_recipes()
        except ValueError as error:
            raise not_valid(folder / TENSORS, error) from None
        return artifact


def check_place(folder: Path) -> None:
    """Refuse a folder with a model, whose engines would read an artifact's tensors as weights, and one with tensors
    that are no artifact's."""
    if (folder / "config.json").exists() or any(folder.glob("*.gguf")):
        raise FileExistsError(
            f"{folder} holds a model, and engines would read an artifact there as weights: write to {folder / CARRIED}"
        )
    if (folder / TENSORS).exists() and not (folder / METADATA).exists():
        raise FileExistsError(f"{folder / TENSORS} belongs to no artifact: move it away, or write to another folder")


def _tensors(file: Path, saved: Saved) -> dict[str, Tensor]:
    """The tensors of a file. None is read before all have the shapes that `saved` asks for."""
    with file.open("rb") as stream:
        if os.fstat(stream.fileno()).st_size > MOST_BYTES:
            raise not_valid(file, f"it is larger than {MOST_BYTES // 2**30} GiB")
        if hashlib.file_digest(stream, "sha256").hexdigest() != saved.tensors_sha256:
            raise ValueError(
                f"{file} is damaged, or not the one that {METADATA} was written with: its SHA-256 is not "
                f"tensors_sha256; {repair(file.parent, COPY)}"
            )
        stream.seek(0)
        if int.from_bytes(stream.read(8), "little") > MOST_HEADER:
            raise not_valid(file, "its header is longer than that of any artifact")
    try:
        with safe_open(file, framework="pt") as opened:
            mapped = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, they are still on the disk
            _check_shapes(saved, mapped)
            return {name: tensor.clone() for name, tensor in mapped.items()}
    except (SafetensorError, ValueError) as error:
        raise not_valid(file, error) from None


def _check_shapes(metadata: Metadata, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors of other names, types or shapes than the metadata ask for. Reads no number of them."""
    model, shard = metadata.model, metadata.shard
    kv_heads = model.kv_heads // shard.ranks if shard else model.kv_heads
    heads = (len(model.packed), kv_heads)
    for name, dims in zip(MEANS, (model.key_dim, model.value_dim, model.key_dim), strict=True):
        tensor, shape = tensors.get(name), (*heads, dims)
        if tensor is None or tensor.shape != shape or tensor.dtype != torch.float32:
            found = "missing" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            raise ValueError(f"{name} must be finite float32 of shape {shape}; it is {found}")
    for name, tensor in tensors.items():
        recipe, slash, _ = name.rpartition("/")
        if slash and recipe not in metadata.recipes:
            raise ValueError(f"{name} belongs to none of the recipes")
        if slash:
            check_shape(name, tensor, *heads, model.key_dim, model.value_dim)
        elif name not in (*MEANS, TEXT):
            raise ValueError(f"unknown tensor {name}")
    text = tensors.get(TEXT)
    if text is None or text.dtype != torch.int64 or text.ndim != 1:
        raise ValueError(f"{TEXT} must be the hashes of the text that was calibrated on, int64 of one dimension")
    for recipe in metadata.recipes:
        if not any(name.startswith(f"{recipe}/") for name in tensors):
            raise ValueError(f"there is no tensor of {recipe}")


def find(where: str | Path) -> Path:
    """The folder of an artifact. If there is none of this name, and it may be a Hub id, it is downloaded."""
    if Path(where).exists() or not HUB_ID.fullmatch(str(where)):
        return Path(where)
    from huggingface_hub import snapshot_download

    try:
        with hub.asked():
            return Path(snapshot_download(str(where), allow_patterns=[METADATA, TENSORS, CARD]))
    except (OSError, ValueError) as error:
        raise ValueError(f"{where} is neither a folder nor what the Hugging Face Hub gives: {hub.why(error)}") from None
