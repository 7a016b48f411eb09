"""Geometry: the shape of every layer's attention, read from a model's configuration alone."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import Any, Self

from kvfold.layer_kinds import Kind, layer_kinds

MOST = 10_000  # no model has more layers, heads, or coordinates per head

# The fields of a config.json that hold the shape of a layer.
FIELDS = {
    "q_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "key_dim": "head_dim",
    "value_dim": "v_head_dim",
}
# Other names of these fields, in configurations without them.
OTHER_NAMES = {"num_attention_groups": "num_key_value_heads", "attention_head_dim": "head_dim"}
# Parts of a configuration that hold the fields of the language model of a multimodal model.
NESTED = ("thinker_config", "text_config", "llm_config", "language_config")
# Fields of models whose cache this module does not know: fused heads, layers that differ, attention of another kind.
UNKNOWN = (
    *("multi_query", "new_decoder_architecture", "block_types", "block_configs", "num_attention_heads_per_layer"),
    *("kv_channels", "alibi", "layer_group_size", "num_query_heads"),
)
# Fields of models that attend to some tokens only.
SPARSE = ("index_topk", "index_n_heads", "indexer_n_heads", "sparse_attention_config", "sparse_config")
# What the published configurations of a type leave out.
GEMMA = {"head_dim": 256}
DEFAULTS: dict[str, dict[str, int]] = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3n_text", "gemma4_text"), GEMMA),
    "gemma3_text": GEMMA | {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072},
}
# Other names for the number of KV heads. They must agree with num_key_value_heads.
OTHER_KV_HEADS = ("num_kv_heads", "n_head_kv", "kv_n_heads", "num_query_groups", "multi_query_group_num")
SINKS = ("gpt_oss", "granite_swa", "granitemoe_swa")  # types with a learned sink in every layer
RECURRENT = ("mamba", "falcon_mamba", "rwkv", "bamba")  # beginnings of types without attention, unless they list it


class UnsupportedModel(ValueError):
    """A model whose cache kvfold cannot pack. The message says why."""


@dataclass(frozen=True)
class LayerShape:
    """The attention of one layer.

    - full: it reads all tokens, so its cache grows with the sequence.
    - sliding, chunked: it reads a window, so its cache stays small.
    - linear: no cache that grows. Linear attention, Mamba, a convolution, or no attention at all. It has no heads.
    - shared: it has no cache of its own and reads that of `target`.
    """

    kind: Kind
    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    sink: bool = False  # a learned logit per query head, whose value is zero
    cap: float | None = None  # of the logits: cap·tanh(logit / cap)
    target: int | None = None

    def __post_init__(self) -> None:
        if self.kind == "linear":
            return
        for field, name in FIELDS.items():
            _count(name, getattr(self, field))
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"num_key_value_heads is {self.kv_heads}, which does not divide num_attention_heads, {self.q_heads}"
            )


@dataclass(frozen=True)
class Geometry:
    """Only full-attention layers are packed. The other layers stay as the engine has them."""

    architecture: str
    layers: tuple[LayerShape, ...]
    max_context: int | None = None

    def __post_init__(self) -> None:
        if self.max_context is not None:
            _count("max_position_embeddings", self.max_context, most=None)
        if not self.packed:
            kinds = " and ".join(sorted({layer.kind for layer in self.layers}))
            raise ValueError(f"all its layers are {kinds}: there is no full attention, whose cache grows, to pack")
        if len({self.layers[layer] for layer in self.packed}) > 1:
            raise ValueError("its layers with full attention differ in shape, which is not supported")

    @classmethod
    def uniform(
        cls, architecture: str, layers: int, q_heads: int, kv_heads: int, head_dim: int, max_context: int | None = None
    ) -> Self:
        """Full attention of one shape in all layers."""
        shape = LayerShape("full", q_heads, kv_heads, head_dim, head_dim)
        return cls(architecture, (shape,) * _count("num_hidden_layers", layers), max_context)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """From the contents of a config.json. A model that cannot be packed is refused, with the reason."""
        architecture = _architecture(config)
        try:
            text = text_config(config)
            text = {**DEFAULTS.get(text.get("model_type", ""), {}), **text}
            if reason := _unsupported(text):
                raise ValueError(reason)
            return cls(architecture, _layers(text), text.get("max_position_embeddings"))
        except ValueError as error:
            raise UnsupportedModel(f"{architecture}: {error}") from None

    @cached_property
    def packed(self) -> tuple[int, ...]:
        """The numbers of the layers that are packed."""
        return tuple(number for number, layer in enumerate(self.layers) if layer.kind == "full")

    @cached_property
    def targets(self) -> frozenset[int]:
        """The numbers of the layers whose cache other layers read."""
        return frozenset(layer.target for layer in self.layers if layer.target is not None)

    @property
    def shape(self) -> LayerShape:
        """The shape that all packed layers have."""
        return self.layers[self.packed[0]]

    @property
    def q_heads(self) -> int:
        return self.shape.q_heads

    @property
    def kv_heads(self) -> int:
        return self.shape.kv_heads

    @property
    def key_dim(self) -> int:
        return self.shape.key_dim

    @property
    def value_dim(self) -> int:
        return self.shape.value_dim

    @property
    def elements_per_token(self) -> int:
        """Numbers per token in packed layers."""
        return len(self.packed) * self.kv_heads * (self.key_dim + self.value_dim)


def listed(numbers: Sequence[int]) -> str:
    """Ascending numbers of layers in words: 0 to 31, or 5, 11, 17."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the language model, which multimodal models nest. A null counts as missing."""
    for name in NESTED:
        nested = config.get(name)
        if not isinstance(nested, Mapping | None):
            raise ValueError(f"{name} is {nested!r}, not an object")
        if nested:
            config = {**config, name: None, **nested}
    return {name: value for name, value in config.items() if value is not None}


def _architecture(config: Mapping[str, Any]) -> str:
    match config.get("architectures"):
        case [str(first), *_]:
            return first
        case _:
            return str(config.get("model_type", "unknown"))


def _layers(config: Mapping[str, Any]) -> tuple[LayerShape, ...]:
    """The shape of every layer, from the fields of the language model."""
    if "num_hidden_layers" not in config and isinstance(blocks := config.get("layers_block_type"), list):
        config = {**config, "num_hidden_layers": len(blocks)}
    layers = _count("num_hidden_layers", _required(config, "num_hidden_layers"))
    kinds = layer_kinds(config, layers)
    shared = config.get("num_kv_shared_layers")
    owners = layers - _count("num_kv_shared_layers", shared, most=layers - 1) if shared else layers
    shapes = [
        LayerShape("linear", 0, 0, 0, 0) if kind == "linear" else _shape(config, number, kind)
        for number, kind in enumerate(kinds)
    ]
    last = {kind: number for number, kind in enumerate(kinds[:owners])}
    for number in range(owners, layers):
        shape, target = shapes[number], last.get(kinds[number])
        if target is None:
            raise ValueError(f"num_kv_shared_layers leaves layer {number} no layer of its kind to read from")
        shapes[number] = LayerShape(**{**vars(shape), "kind": "shared", "target": target})
    return tuple(shapes)


def _shape(config: Mapping[str, Any], number: int, kind: Kind) -> LayerShape:
    """The shape of a layer with attention. Some models have other fields for sliding or for full layers."""
    own = {**config, **_overrides(config, number, kind)}
    for other, name in OTHER_NAMES.items():
        if other in own:
            own.setdefault(name, own[other])
    q_heads = _count("num_attention_heads", _required(own, "num_attention_heads"))
    kv_heads = own.get("num_key_value_heads", q_heads)
    for field in OTHER_KV_HEADS:
        if own.get(field, kv_heads) != kv_heads:
            raise ValueError(f"its configuration sets {field!r}; KV heads are read from 'num_key_value_heads' alone")
    key_dim = own["head_dim"] if "head_dim" in own else _shared_out(own, q_heads)
    sides = "swa" if kind == "sliding" else "full"
    sink = own.get(f"add_{sides}_attention_sink_bias", own.get("model_type") in SINKS)
    return LayerShape(
        kind,
        q_heads,
        kv_heads,
        key_dim,
        own.get("v_head_dim", key_dim),
        bool(sink),
        own.get("attn_logit_softcapping") or None,
    )


def _overrides(config: Mapping[str, Any], number: int, kind: Kind) -> dict[str, Any]:
    """The fields of one layer, or of all layers of a kind, that differ from the model's."""
    if kind == "sliding":
        fields = {name: config[f"swa_{name}"] for name in FIELDS.values() if f"swa_{name}" in config}
        other = config.get("attention_other_setting", {})
        fields |= other if other.get("attention_type") == "sliding_attention" else {}
    else:
        fields = {"head_dim": config["global_head_dim"]} if "global_head_dim" in config else {}
        if config.get("attention_k_eq_v") and "num_global_key_value_heads" in config:
            fields["num_key_value_heads"] = config["num_global_key_value_heads"]
    for name, own in config.get("per_layer_config", {}).items():
        if int(name) == number:
            fields |= own
    return fields


def _required(config: Mapping[str, Any], field: str) -> Any:
    if field not in config:
        raise ValueError(f"its configuration has no {field!r}")
    return config[field]


def _count(field: str, value: Any, most: int | None = MOST) -> int:
    """The value, if it is a whole number that a model can have."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{field} is {value!r}: it must be a whole number, 1 or more")
    if most is not None and value > most:
        raise ValueError(f"{field} is {value}, which is beyond any model")
    return value


def _shared_out(config: Mapping[str, Any], q_heads: int) -> int:
    """The head dimension, if the configuration does not state it."""
    hidden_size = _count("hidden_size", _required(config, "hidden_size"), most=MOST**2)
    if hidden_size % q_heads:
        raise ValueError(
            f"hidden_size is {hidden_size}, which num_attention_heads, {q_heads}, does not divide; there is no head_dim"
        )
    return hidden_size // q_heads


def _unsupported(config: Mapping[str, Any]) -> str | None:
    """Why no layer of this model can be packed, whatever its shape."""
    kind = str(config.get("model_type"))
    if config.get("is_encoder_decoder"):
        return "encoder-decoder models are not supported"
    if rank := config.get("kv_lora_rank"):
        rope = config.get("qk_rope_head_dim", 0)
        return (
            f"multi-head latent attention (MLA) caches one latent vector of {rank} and one RoPE key of {rope} numbers "
            "per token for all heads together, which cannot be packed yet: see docs/mla.md"
        )
    if any(config.get(field) for field in SPARSE):
        return "sparse attention is not supported"
    if config.get("cross_attention_layers"):
        return "cross attention is not supported"
    if kind.startswith(RECURRENT) and "attn_layer_indices" not in config:
        return "it has no attention, so there is no cache that grows to pack"
    if kind.startswith("zamba"):
        return "layers that share the weights of one attention block are not supported"
    for field in UNKNOWN:
        if config.get(field):
            return f"its configuration sets {field!r}, which is not supported"
    if isinstance(attention := config.get("attn_config"), Mapping) and attention.get("alibi"):
        return "attention with ALiBi is not supported"
    return None


def example_configs() -> dict[str, dict[str, Any]]:
    """Configurations of well-known models, by name. For these, `kvfold plan` needs no download."""
    return json.loads(resources.files("kvfold").joinpath("example_configs.json").read_text())
