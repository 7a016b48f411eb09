"""Fingerprint: which model an artifact belongs to, from a loaded model or from its files."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator
from safetensors import safe_open
from torch import Tensor

from kvfold.geometry import MOST, Geometry, LayerShape, text_config
from kvfold.models import weight_files
from kvfold.printable import printable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAKE = "make one with `kvfold calibrate MODEL --out DIR`"
# No model has more. With these limits, what is computed when an artifact is loaded is as small as the artifact.
WIDEST = 512  # coordinates per head
TOKEN = 2**14  # coordinates of all KV heads
PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # not quantized

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
# Text that neither a terminal, nor a shell, nor Markdown, nor rich reads as more than text.
Word = Annotated[str, StringConstraints(max_length=200, pattern=r"^[A-Za-z0-9_ .,:+%()/-]*$")]
ROPE = re.compile(r'[A-Za-z0-9_ .,:+"{}\[\]-]{,20000}')  # its parameters as JSON: no escapes, so no odd characters
Count = Annotated[int, Field(ge=1, lt=2**63)]
Size = Annotated[int, Field(ge=1, le=MOST)]
Width = Annotated[int, Field(ge=1, le=WIDEST)]
Digests = Mapping[Word, Word]  # the `_digest` of parameters, by name


class Strict(BaseModel):
    """A part of kvfold.json."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Fingerprint(Strict):
    """What tells one model from another. Only its language model counts: the KV cache comes from there."""

    model_type: Word
    layers: Size
    packed: tuple[int, ...]  # the layers that an artifact describes
    q_heads: Size  # of packed layers, as are the next three
    kv_heads: Size
    key_dim: Width
    value_dim: Width
    rope: dict[str, Any]
    weights: Digests  # of the decoder's parameters, by their names in the decoder

    @field_validator("rope")
    @classmethod
    def _plain(cls, rope: dict[str, Any]) -> dict[str, Any]:
        if not ROPE.fullmatch(json.dumps(rope)):
            raise ValueError("no model has such parameters of RoPE")
        return rope

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.kv_heads * max(self.key_dim, self.value_dim) > TOKEN:
            raise ValueError(f"kv_heads: no model has {self.kv_heads} KV heads of so many coordinates")
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
            name: _digest(parameter)
            for name, parameter in model.get_decoder().named_parameters()
            if parameter.dtype in PLAIN and parameter.ndim <= 2
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
                    f"the artifact was made for another model: its {field} is {printable(mine)}, the model's is "
                    f"{printable(theirs)}; {MAKE}"
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


def _digest(tensor: Tensor) -> str:
    """A hash of a tensor's shape and of a sample of its numbers: all of a vector, and some of every row of a matrix.

    The numbers are hashed in bfloat16, so conversion to 16 bits does not change the hash. Quantized ones are bytes.
    """
    tensor = torch.atleast_1d(tensor.detach())
    plain = tensor.dtype in PLAIN
    numbers = tensor if plain else tensor.view(torch.uint8)
    columns = numbers.shape[-1]
    rows = numbers.numel() // max(1, columns)
    sample = numbers.flatten()[:: max(1, min(rows, columns) - 1)]  # less than a row apart, so columns vary
    raw = (sample.to(torch.bfloat16) if plain else sample).cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tuple(tensor.shape)} ".encode() + raw).hexdigest()[:16]


def digest_model(name: str, revision: str | None = None) -> Digests | None:
    """Digests of the tensors in the files of a model on this machine, by their names there. None if there are none.

    transformers changes quantized tensors when it loads them, and transposes stacks of experts. So these have their
    type behind their name, as no parameter has. They are compared with no artifact, but name what was made with them.
    """
    digests = {}
    for file in weight_files(name, revision):
        with safe_open(file, framework="pt") as tensors:  # read from the disk are the sampled pages alone
            for key in tensors.keys():  # noqa: SIM118
                tensor = tensors.get_tensor(key)
                plain = tensor.dtype in PLAIN and tensor.ndim <= 2
                digests[key if plain else f"{key} {tensor.dtype}"] = _digest(tensor)
    return digests or None
