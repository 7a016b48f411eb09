"""What kind of attention each layer of a model has, from the fields of its configuration.

Models state it in many ways: by a list of words or numbers, by a pattern that repeats, or only by their type.
"""

from collections.abc import Mapping
from typing import Any, Literal

Kind = Literal["full", "sliding", "chunked", "linear", "shared"]

WORDS: dict[Any, Kind] = {  # of `layer_types` and `layers_block_type`
    **dict.fromkeys(("full_attention", "attention"), "full"),
    "hybrid": "full",  # attention and Mamba beside each other
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    # "linear" stands for every layer without a cache that grows
    **dict.fromkeys(("linear_attention", "mamba", "conv", "moe", "mlp"), "linear"),
}
# Fields that list one entry per layer, and what the entries mean. The first field that is there counts.
LISTS: dict[str, dict[Any, Kind]] = {
    "layer_types": WORDS,
    "layers_block_type": WORDS,
    "hybrid_override_pattern": {"*": "full", "M": "linear", "-": "linear", "E": "linear"},
    "hybrid_layer_pattern": {0: "full", 1: "sliding"},
    "attn_type_list": {0: "linear", 1: "full"},
}
# Types whose published configurations may say nothing else: every n-th layer is full, the others are of this kind.
EVERY: dict[str, tuple[int, Kind]] = {
    "gemma2": (2, "sliding"),
    "gemma3_text": (6, "sliding"),
    "gemma3n_text": (5, "sliding"),
    "gemma4_text": (6, "sliding"),
    "gpt_oss": (2, "sliding"),
    "olmo3": (4, "sliding"),
    "cohere2": (4, "sliding"),
    "exaone4": (4, "sliding"),
    "llama4_text": (4, "chunked"),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), (4, "linear")),
}
# Beginnings of the fields of models whose layers differ. If nothing above says how, the model is not known.
DIFFERENT = ("mamba", "linear_", "mixer_types", "global_attn_every_n_layers", "dense_attention_every_n_layers")


def layer_kinds(config: Mapping[str, Any], layers: int) -> list[Kind]:
    """The kind of every layer, from the fields of the language model. A layer that reads another's cache counts as that
    other. Raises ValueError if a kind is not known."""
    for field, meanings in LISTS.items():
        if field in config:
            return _listed(config, field, meanings, layers)
    for field in ("attn_layer_indices", "full_attn_idxs"):
        if isinstance(full := config.get(field), list):
            return ["full" if layer in full else "linear" for layer in range(layers)]
    if "attn_layer_period" in config:
        return _every(_period(config, "attn_layer_period"), "linear", layers, config.get("attn_layer_offset", 0))
    if "full_attention_interval" in config:
        return _every(_period(config, "full_attention_interval"), "linear", layers)
    if "attention_chunk_size" in config and config.get("no_rope_layers"):
        return _listed(config, "no_rope_layers", {0: "full", 1: "chunked"}, layers)
    period, others = EVERY.get(config.get("model_type", ""), (0, "sliding"))
    if others != "sliding":
        return _every(period, others, layers)
    if config.get("model_type") != "falcon_h1":  # it has attention in every layer, and Mamba beside it
        for field in config:
            if field.startswith(DIFFERENT) and config[field]:
                raise ValueError(f"its configuration sets {field!r} and does not say which layers have attention")
    return _sliding(config, period, layers)


def _sliding(config: Mapping[str, Any], period: int, layers: int) -> list[Kind]:
    """Every `period`-th layer is full, unless the configuration says otherwise."""
    if not config.get("sliding_window") or not config.get("use_sliding_window", True):
        return ["full"] * layers
    for field in ("sliding_window_pattern", "_sliding_window_pattern"):
        if isinstance(pattern := config.get(field), str) and pattern:  # LLLG: three local layers, a global one
            return ["sliding" if pattern[layer % len(pattern)] == "L" else "full" for layer in range(layers)]
        if field in config:
            return _every(_period(config, field), "sliding", layers)
    if period:
        return _every(period, "sliding", layers)
    first = config.get("max_window_layers", 0) if "use_sliding_window" in config else 0
    return ["full" if layer < first else "sliding" for layer in range(layers)]


def _every(period: int, others: Kind, layers: int, offset: int = -1) -> list[Kind]:
    """One layer of every `period` layers is full: the last one, or the one at `offset`."""
    return ["full" if (layer - offset) % period == 0 else others for layer in range(layers)]


def _period(config: Mapping[str, Any], field: str) -> int:
    period = config[field]
    if type(period) is not int or period < 1:
        raise ValueError(f"{field} is {period!r}: it must be a whole number, 1 or more")
    return period


def _listed(config: Mapping[str, Any], field: str, meanings: Mapping[Any, Kind], layers: int) -> list[Kind]:
    entries = config[field]
    if not isinstance(entries, str if field == "hybrid_override_pattern" else list):
        raise ValueError(f"{field} is {entries!r}: it must be a list with the kind of each layer")
    if config.get("num_nextn_predict_layers"):
        entries = entries[:layers]  # layers that draft tokens follow
    if len(entries) != layers:
        raise ValueError(f"{field} has {len(entries)} entries, and num_hidden_layers is {layers}")
    if unknown := [layer for layer, entry in enumerate(entries) if entry not in meanings]:
        word = str(entries[unknown[0]]).replace("_", " ")
        raise ValueError(f"{word} in layer {unknown[0]} is not supported")
    return [meanings[entry] for entry in entries]
