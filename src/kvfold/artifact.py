"""Artifact: what calibration found, with the model it belongs to; a folder with kvfold.json and tensors.safetensors."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from kvfold.geometry import Geometry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METADATA, TENSORS = "kvfold.json", "tensors.safetensors"


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
        config = model.config.to_dict()
        geometry = Geometry.from_config(config)
        digest = hashlib.sha256()
        for name, parameter in sorted(model.named_parameters()):
            numbers = parameter.detach().flatten()[:256].to("cpu", torch.bfloat16).view(torch.uint8)
            digest.update(f"{name} {tuple(parameter.shape)} ".encode() + numbers.numpy().tobytes())
        return cls(
            architecture=type(model).__name__,
            layers=geometry.layers,
            q_heads=geometry.q_heads,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            rope=config.get("rope_parameters") or {},
            weights=digest.hexdigest(),
        )

    def check(self, model: "PreTrainedModel") -> None:
        """Refuse another model, naming the field that differs."""
        other = Fingerprint.of(model)
        for field in type(self).model_fields:
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                raise ValueError(
                    f"the artifact was made for another model: its {field} is {mine}, the model's is {theirs}"
                )


class Provenance(_Strict):
    """The text that was calibrated on, and with what."""

    tokens_sha256: str
    tokens: int
    context: int
    versions: dict[str, str]


class Metadata(_Strict):
    schema_version: Literal[1] = 1
    model: Fingerprint
    calibration: Provenance


@dataclass(frozen=True)
class Artifact:
    metadata: Metadata
    key_mean: Tensor  # float32[layers, kv_heads, head_dim]
    value_mean: Tensor

    def __post_init__(self) -> None:
        model = self.metadata.model
        shape = (model.layers, model.kv_heads, model.head_dim)
        for name in ("key_mean", "value_mean"):
            tensor = getattr(self, name)
            if tensor.shape != shape or tensor.dtype != torch.float32 or not torch.isfinite(tensor).all():
                raise ValueError(
                    f"{name} must be finite float32 of shape {shape}; "
                    f"it is {tensor.dtype} of shape {tuple(tensor.shape)}"
                )

    def means(self, layer: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        return self.key_mean[layer].to(device), self.value_mean[layer].to(device)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"key_mean": self.key_mean.contiguous(), "value_mean": self.value_mean.contiguous()}
        (folder / TENSORS).write_bytes(save(tensors))
        (folder / METADATA).write_text(self.metadata.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Self:
        try:
            metadata = Metadata.model_validate_json((folder / METADATA).read_text())
            tensors = load_file(folder / TENSORS)
            if tensors.keys() != {"key_mean", "value_mean"}:
                raise ValueError(f"expected tensors key_mean and value_mean, found {', '.join(sorted(tensors))}")
            return cls(metadata, **tensors)
        except FileNotFoundError as error:
            raise ValueError(
                f"{folder} is no artifact: there is no {Path(error.filename or TENSORS).name} in it"
            ) from None
        except (ValidationError, SafetensorError, ValueError) as error:
            raise ValueError(f"{folder} is no valid artifact: {error}") from None
