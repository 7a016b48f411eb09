"""Codecs and artifacts without a calibrated model: recipes are fitted to random states."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvfold.artifact import TEXT, Artifact, Fingerprint, Metadata, Provenance
from kvfold.fitted import Fitted
from kvfold.format.codec import Codec
from kvfold.geometry import Geometry
from kvfold.ops.pages import Logits
from kvfold.recipe import Fit, Recipe
from kvfold.rope import Rope

FIT_TOKENS = 320


@lru_cache(maxsize=512)
def random_codecs(
    recipe: Recipe, head_dim: int, q_heads: int, kv_heads: int, raw_dtype: torch.dtype
) -> tuple[Codec, Codec]:
    """The codecs of a layer."""
    geometry = Geometry.uniform("any", 1, q_heads, kv_heads, head_dim)
    fits = {0: _fit(recipe, q_heads, kv_heads, head_dim, head_dim)}
    return Fitted(recipe, geometry, fits).layer_codecs(0, raw_dtype)


def random_artifact(config: Mapping[str, Any], recipes: Sequence[Recipe], folded: bool = False) -> Artifact:
    """An artifact for a model with random weights, from its configuration alone. All layers get the same fits.

    `folded`: as if `kvfold fold` had made the model. Values then have no rotation.
    """
    geometry = Geometry.from_config(config)
    layers = len(geometry.packed)
    tensors = {
        "key_mean": torch.zeros(layers, geometry.kv_heads, geometry.key_dim),
        "value_mean": torch.zeros(layers, geometry.kv_heads, geometry.value_dim),
        "key_first": torch.zeros(layers, geometry.kv_heads, geometry.key_dim),
        TEXT: torch.zeros(0, dtype=torch.int64),
    }
    for recipe in recipes:
        fit = _fit(recipe, geometry.q_heads, geometry.kv_heads, geometry.key_dim, geometry.value_dim)
        for name, tensor in fit.items():
            key = name if name in tensors else f"{recipe.fitted_as}/{name}"
            tensors[key] = tensor.expand(layers, *tensor.shape).contiguous()
        if folded and recipe.folds:
            tensors.pop(f"{recipe.fitted_as}/value_rotation", None)
            tensors[f"{recipe.fitted_as}/value_folded"] = torch.ones(layers, 1)
    metadata = Metadata(
        model=Fingerprint(**Fingerprint.shape(config), weights={}),
        rope=_rope(geometry.key_dim),
        calibration=Provenance(tokens_sha256="0" * 64, tokens=FIT_TOKENS, context=FIT_TOKENS, seed=0, versions={}),
        recipes=tuple(dict.fromkeys(recipe.fitted_as for recipe in recipes if recipe.learns)),
    )
    return Artifact(metadata, tensors)


@lru_cache(maxsize=64)
def _fit(recipe: Recipe, q_heads: int, kv_heads: int, key_dim: int, value_dim: int) -> Fit:
    from kvfold.calibration.statistics import LayerStatistics
    from kvfold.calibration.tap import Seen

    generator = torch.Generator().manual_seed(0)
    shapes = (q_heads, key_dim), (kv_heads, key_dim), (kv_heads, value_dim), (q_heads, value_dim)
    q, k, v, out = (random_states((FIT_TOKENS, *shape), generator) for shape in shapes)
    seen = Seen(0, q, k, v, out, Logits(key_dim**-0.5))
    layer = LayerStatistics.begin(seen, FIT_TOKENS, k[:1])
    layer.add(seen, torch.arange(FIT_TOKENS), 0)
    means = (layer.k.mean, layer.read_v.mean) if recipe.centre else (None, None)
    centred = {"key_mean": layer.k.mean, "value_mean": layer.read_v.mean, "key_first": layer.first}
    of_means = {name: mean.float() for name, mean in centred.items()} if recipe.centre else {}
    return {**of_means, **recipe.fit(layer, _rope(key_dim), means)}


def _rope(head_dim: int) -> Rope:
    half = head_dim // 2
    return Rope(head_dim, tuple((i, i + half) for i in range(half)), tuple(1e4 ** (-i / half) for i in range(half)))


def random_states(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random vectors with a mean of 1. Coordinates differ in size, as in keys. So Block-GTQ allots widths."""
    sizes = torch.linspace(1.5, -1.5, shape[-1], device=generator.device).exp()
    return torch.randn(shape, generator=generator, device=generator.device) * sizes / sizes.square().mean().sqrt() + 1
