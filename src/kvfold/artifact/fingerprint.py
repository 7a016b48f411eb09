"""Fingerprint: which model an artifact belongs to, from a loaded model or from its files."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Self

import torch
from pydantic import BaseModel, ConfigDict, StringConstraints, model_validator
from safetensors import safe_open
from torch import Tensor

from kvfold.geometry import Geometry, LayerShape, text_config
from kvfold.models import weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAKE = "make one with `kvfold calibrate MODEL --out DIR`"
DIGESTED = 256  # numbers per parameter that are hashed
PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # not quantized

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Digests = Mapping[str, str]  # the `_digest` of parameters, by name


class Strict(BaseModel):
    """A part of kvfold.json."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Fingerprint(Strict):
    """What tells one model from another. Only its language model counts: the KV cache comes from there."""

    model_type: str
    layers: int
    packed: tuple[int, ...]  # the layers that an artifact describes
    q_heads: int  # of packed layers, as are the next three
    kv_heads: int
    key_dim: int
    value_dim: int
    rope: dict[str, Any]
    weights: Digests  # of the decoder's parameters, by their names in the decoder

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if others := [layer for layer in self.packed if not 0 <= layer < self.layers]:
            raise ValueError(f"packed: the model has layers 0 to {self.layers - 1}, and no layer {others[0]}")
        if self.geometry.packed != self.packed:
            raise ValueError(f"packed: {self.packed} are not ascending numbers of layers")
        return self

    @property
    def geometry(self) -> Geometry:
        """The packed layers. All others count as layers without a cache."""
        layers = [LayerShape("linear", 0, 0, 0, 0)] * self.layers
        for layer in self.packed:
            layers[layer] = LayerShape("full", self.q_heads, self.kv_heads, self.key_dim, self.value_dim)
        return Geometry(self.model_type, tuple(layers))

    @property
    def sha256(self) -> str:
        """A hash of all fields: another for another model."""
        return hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode()).hexdigest()

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
        """All fields but the weights, from a configuration."""
        geometry, text = Geometry.from_config(config), text_config(config)
        return {
            "layers": len(geometry.layers),
            "packed": geometry.packed,
            "q_heads": geometry.q_heads,
            "kv_heads": geometry.kv_heads,
            "key_dim": geometry.key_dim,
            "value_dim": geometry.value_dim,
            "model_type": text.get("model_type", ""),
            "rope": _rope(text.get("rope_parameters", {})),
        }

    def check(self, model: "PreTrainedModel") -> None:
        """Refuse another model. The error names what differs."""
        self._compare(Fingerprint.of(model).model_dump())

    def check_files(self, config: Mapping[str, Any], weights: Digests | None) -> None:
        """The same for a model that is not loaded: `config` as transformers has it, `weights` from `digest_model`."""
        self._compare({**self.shape(config), "weights": weights or {}})

    def _compare(self, other: Mapping[str, Any]) -> None:
        for field, theirs in other.items():
            unstated = field == "rope" and not theirs  # engines have classes of their own, without rope_parameters
            if field != "weights" and not unstated and (mine := getattr(self, field)) != theirs:
                raise ValueError(
                    f"the artifact was made for another model: its {field} is {mine}, the model's is {theirs}; {MAKE}"
                )
        if changed := self._changed(other["weights"]):
            raise ValueError(
                f"the artifact was made for another model: its weights are others, {changed} among them "
                f"(folding makes another model, with an artifact of its own); {MAKE}"
            )

    def _changed(self, theirs: Digests) -> str | None:
        """The name of a parameter that both have and that differs.

        `theirs` may have more tensors. Its names may have a prefix, such as `model.` or `language_model.model.`. The
        prefix is the one with which most of our names are found.
        """
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


def _rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE's parameters, which may be nested by kind of layer. Engines add some that say nothing new: `type`, the older
    name of rope_type, and a partial_rotary_factor of 1."""
    return {
        name: _rope(value) if isinstance(value, Mapping) else value
        for name, value in parameters.items()
        if name != "type" and (name, value) != ("partial_rotary_factor", 1)
    }


def _digest(shape: Sequence[int], numbers: Tensor) -> str:
    """A hash of a parameter's shape and first numbers, in bfloat16: conversion to 16 bits does not change it."""
    first = numbers.detach().to("cpu", torch.bfloat16).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tuple(shape)} ".encode() + first).hexdigest()[:16]


def digest_model(name: str, revision: str | None = None) -> Digests | None:
    """Digests of the tensors in the files of a model on this machine, by their names there. None if there are none.

    Quantized tensors are left out. So are stacks of experts, which transformers transposes when it loads them.
    """
    digests = {}
    for file in weight_files(name, revision):
        with safe_open(file, framework="pt") as tensors:
            for tensor in tensors.keys():  # noqa: SIM118
                part = tensors.get_slice(tensor)
                shape = part.get_shape()
                if part.get_dtype() in PLAIN and len(shape) <= 2:
                    rows = -(-DIGESTED // max(1, math.prod(shape[1:])))
                    numbers = part[:rows] if shape else tensors.get_tensor(tensor)
                    digests[tensor] = _digest(shape, numbers.flatten()[:DIGESTED])
    return digests or None
