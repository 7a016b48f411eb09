"""Codecs for timing, without a calibrated model: recipes fitted to a random layer."""

from functools import lru_cache

import torch
from torch import Tensor

from kvfold.codec import Codec
from kvfold.recipe import Fit, Recipe

FIT_TOKENS = 320


@lru_cache(maxsize=512)
def random_codecs(
    recipe: Recipe, head_dim: int, q_heads: int, kv_heads: int, wide: torch.dtype, layer: int = 0
) -> tuple[Codec, Codec]:
    """The codecs of a layer; what they are fitted to is the same for all layers."""
    return recipe.layer_codecs(layer, head_dim, _fit(recipe, head_dim, q_heads, kv_heads), wide)


@lru_cache(maxsize=64)
def _fit(recipe: Recipe, head_dim: int, q_heads: int, kv_heads: int) -> Fit:
    from kvfold.calibration.statistics import LayerStatistics
    from kvfold.calibration.tap import Seen
    from kvfold.rope import Rope

    generator, half = torch.Generator().manual_seed(0), head_dim // 2
    q, k, v, out = (
        random_states((FIT_TOKENS, heads, head_dim), generator) for heads in (q_heads, kv_heads, kv_heads, q_heads)
    )
    seen = Seen(0, q, k, v, out, head_dim**-0.5)
    layer = LayerStatistics.begin(seen, FIT_TOKENS)
    layer.add(seen, torch.arange(FIT_TOKENS), 0)
    rope = Rope(head_dim, tuple((i, i + half) for i in range(half)), tuple(1e4 ** (-i / half) for i in range(half)))
    means = (layer.k.mean, layer.v.mean) if recipe.centre else (None, None)
    centred = {"key_mean": layer.k.mean.float(), "value_mean": layer.v.mean.float()} if recipe.centre else {}
    return {**centred, **recipe.fit(layer, rope, means)}


def random_states(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Around a mean, and of sizes that differ as those of keys do, to which Block-GTQ gives several widths."""
    sizes = torch.linspace(1.5, -1.5, shape[-1], device=generator.device).exp()
    return torch.randn(shape, generator=generator, device=generator.device) * sizes / sizes.square().mean().sqrt() + 1
