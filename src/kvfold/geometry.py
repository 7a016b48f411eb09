"""Geometry: the shape of a model's KV cache, read from its configuration alone."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Self

# Fields of models whose caches have another shape than the usual fields say: fused heads, hybrids, other head sizes.
UNKNOWN_SHAPES = (
    "multi_query",
    "new_decoder_architecture",
    "layers_block_type",
    "block_types",
    "attn_layer_period",
    "attn_layer_indices",
    "kv_channels",
    "alibi",
)


class UnsupportedModel(ValueError):
    """A model whose cache kvfold cannot pack; the message says why."""


@dataclass(frozen=True)
class Geometry:
    architecture: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    max_context: int | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """From the contents of a config.json; refuses what cannot be packed, by name and with the reason."""
        architecture = (config.get("architectures") or [config.get("model_type", "unknown")])[0]
        merged = {**config, **(config.get("text_config") or {})}
        text = {name: value for name, value in merged.items() if value is not None}  # null is as good as missing
        if reason := _unsupported(text):
            raise UnsupportedModel(f"{architecture}: {reason}")
        try:
            q_heads = int(text["num_attention_heads"])
            return cls(
                architecture,
                layers=int(text["num_hidden_layers"]),
                q_heads=q_heads,
                kv_heads=int(text.get("num_key_value_heads") or q_heads),
                head_dim=int(text.get("head_dim") or int(text["hidden_size"]) // q_heads),
                max_context=text.get("max_position_embeddings"),
            )
        except KeyError as error:
            raise UnsupportedModel(f"{architecture}: its configuration has no {error.args[0]!r}") from None

    @property
    def elements_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim


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
    for field in UNKNOWN_SHAPES:
        if config.get(field):
            return f"its configuration sets {field!r}, which is not supported"
    kinds = config.get("layer_types") or []
    if not kinds and config.get("sliding_window") and config.get("use_sliding_window", True):
        kinds = ["sliding_attention"] * int(config.get("num_hidden_layers", 1))
    odd = [layer for layer, kind in enumerate(kinds) if kind != "full_attention"]
    if odd:
        kind = str(kinds[odd[0]]).replace("_", " ")
        return f"{kind} in layers {', '.join(map(str, odd))} is not supported: only full attention can be packed yet"
    return None


def example_configs() -> dict[str, dict[str, Any]]:
    """Configurations of well-known models, by name: enough for `kvfold plan` without a download."""
    return json.loads(resources.files("kvfold").joinpath("example_configs.json").read_text())
