"""Geometry: the shape of a model's KV cache, read from its configuration alone."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Self

MOST = 10_000  # no model has more layers, heads, or coordinates per head

# The fields of a config.json that a geometry is read from.
FIELDS = {
    "layers": "num_hidden_layers",
    "q_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
# FIELDS do not describe the cache of a model with one of these fields: fused heads, hybrids, layers that differ.
UNKNOWN_SHAPES = (
    "multi_query",
    "new_decoder_architecture",
    "layers_block_type",
    "block_types",
    "block_configs",
    "attn_layer_period",
    "attn_layer_indices",
    "cross_attention_layers",
    "num_attention_heads_per_layer",
    "conv_L_cache",
    "index_n_heads",
    "kv_channels",
    "alibi",
)
# Other names for the number of KV heads, in models without num_key_value_heads.
OTHER_KV_HEADS = (
    "num_kv_heads",
    "n_head_kv",
    "kv_n_heads",
    "num_query_groups",
    "num_attention_groups",
    "multi_query_group_num",
)


class UnsupportedModel(ValueError):
    """A model whose cache kvfold cannot pack. The message says why."""


@dataclass(frozen=True)
class Geometry:
    architecture: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    max_context: int | None = None

    def __post_init__(self) -> None:
        for field, name in FIELDS.items():
            _count(name, getattr(self, field))
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"num_key_value_heads is {self.kv_heads}, which does not divide num_attention_heads, {self.q_heads}"
            )
        if self.max_context is not None:
            _count("max_position_embeddings", self.max_context, most=None)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """From the contents of a config.json. A model that cannot be packed is refused, with the reason."""
        architecture = _architecture(config)
        try:
            text = text_config(config)
            if reason := _unsupported(text):
                raise ValueError(reason)
            q_heads = _count("num_attention_heads", _required(text, "num_attention_heads"))
            geometry = cls(
                architecture,
                layers=_required(text, "num_hidden_layers"),
                q_heads=q_heads,
                kv_heads=text.get("num_key_value_heads", q_heads),
                head_dim=text["head_dim"] if "head_dim" in text else _shared_out(text, q_heads),
                max_context=text.get("max_position_embeddings"),
            )
            if reason := _unsupported_layers(text, geometry):
                raise ValueError(reason)
        except ValueError as error:
            raise UnsupportedModel(f"{architecture}: {error}") from None
        return geometry

    @property
    def elements_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the language model, which multimodal models nest. A null counts as missing."""
    nested = config.get("text_config")
    if not isinstance(nested, Mapping | None):
        raise ValueError(f"text_config is {nested!r}, not an object")
    return {name: value for name, value in {**config, **(nested or {})}.items() if value is not None}


def _architecture(config: Mapping[str, Any]) -> str:
    match config.get("architectures"):
        case [str(first), *_]:
            return first
        case _:
            return str(config.get("model_type", "unknown"))


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
    if config.get("is_encoder_decoder"):
        return "encoder-decoder models are not supported"
    if config.get("kv_lora_rank"):
        return (
            "multi-head latent attention (MLA) caches one compressed vector for all heads, which is not supported yet"
        )
    if config.get("attn_logit_softcapping"):
        return "attention with logit soft-capping is not supported"
    if config.get("model_type") == "gpt_oss":
        return "attention with learned sink logits is not supported"
    if config.get("num_kv_shared_layers"):
        return "layers that share another layer's cache are not supported"
    # if there are `layer_types`, `_unsupported_layers` decides by these
    recurrent = [] if "layer_types" in config else [field for field in config if field.startswith("mamba")]
    for field in (*UNKNOWN_SHAPES, *recurrent):
        if config.get(field):
            return f"its configuration sets {field!r}, which is not supported"
    return None


def _unsupported_layers(config: Mapping[str, Any], geometry: Geometry) -> str | None:
    for field in OTHER_KV_HEADS:
        if config.get(field, geometry.kv_heads) != geometry.kv_heads:
            return f"its configuration sets {field!r}; KV heads are read from 'num_key_value_heads' alone"
    kinds = config.get("layer_types")
    if kinds is None and config.get("sliding_window") and config.get("use_sliding_window", True):
        kinds = ["sliding_attention"] * geometry.layers
    if not isinstance(kinds, list | None):
        return f"layer_types is {kinds!r}: it must be a list with the kind of each layer"
    if kinds is not None and len(kinds) != geometry.layers:
        return f"layer_types has {len(kinds)} entries, and num_hidden_layers is {geometry.layers}"
    odd = [layer for layer, kind in enumerate(kinds or ()) if kind != "full_attention"]
    if odd and kinds:
        kind = str(kinds[odd[0]]).replace("_", " ")
        return f"{kind} in layers {', '.join(map(str, odd))} is not supported: only full attention can be packed yet"
    return None


def example_configs() -> dict[str, dict[str, Any]]:
    """Configurations of well-known models, by name. For these, `kvfold plan` needs no download."""
    return json.loads(resources.files("kvfold").joinpath("example_configs.json").read_text())
