"""Random layers to calibrate on: raw queries, keys and values, their statistics, and what recipes fit to them."""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvfold.calibration.statistics import LayerStatistics
from kvfold.calibration.tap import Seen
from kvfold.ops.pages import Logits
from kvfold.recipes import parse
from kvfold.rope import Rope

FIRST = 4  # attention sinks, which statistics leave out


@dataclass(frozen=True, eq=False)
class RandomLayer:
    q: np.ndarray  # float64[tokens, q_heads, d]
    k: np.ndarray  # [tokens, kv_heads, d]
    v: np.ndarray
    out: np.ndarray  # [tokens, q_heads, d]
    scale: float
    statistics: LayerStatistics
    rope: Rope

    @property
    def ratio(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def grouped(self, x: np.ndarray) -> np.ndarray:
        """[tokens, q_heads, d] without the first tokens -> [kv_heads, vectors, d]"""
        x = x[FIRST:].reshape(-1, self.k.shape[1], self.ratio, x.shape[-1])
        return x.transpose(1, 0, 2, 3).reshape(x.shape[1], -1, x.shape[-1])

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """float64[kv_heads, d] of keys and values."""
        return torch.from_numpy(self.k[FIRST:].mean(0)), torch.from_numpy(self.v[FIRST:].mean(0))


def half_rope(d: int, rotary: int | None = None) -> Rope:
    rotary = d if rotary is None else rotary
    half = rotary // 2
    return Rope(d, tuple((i, i + half) for i in range(half)), tuple(100.0 ** (-i / half) for i in range(half)))


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def causal_weights(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """[tokens, q_heads, d], [tokens, kv_heads, d] -> float64[q_heads, tokens, tokens]"""
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    logits = scale * np.einsum("thd,jhd->htj", q, k)
    return softmax(np.where(np.tri(len(q), dtype=bool), logits, -np.inf))


@functools.cache
def random_layer(
    d: int = 16, kv_heads: int = 2, ratio: int = 2, tokens: int = 60, seed: int = 0, rope: Rope | None = None
) -> RandomLayer:
    """Correlated coordinates of very different sizes around a mean, with outliers among the first tokens."""
    rng = np.random.default_rng(seed)

    def states(heads: int) -> np.ndarray:
        mix = rng.standard_normal((heads, d, d)) / d**0.5 + 0.5 * np.eye(d)
        sizes = np.exp(rng.uniform(-2.5, 2.5, (heads, 1, d)))
        x = np.einsum("thd,hde->the", rng.standard_normal((tokens, heads, d)), mix * sizes) + rng.standard_normal(d)
        x[:FIRST] *= 10
        return x.astype(np.float32).astype(np.float64)

    q, k, v = states(kv_heads * ratio), states(kv_heads), states(kv_heads)
    weights = causal_weights(q, k, d**-0.5)
    out = np.einsum("htj,jhd->thd", weights, np.repeat(v, ratio, axis=1)).astype(np.float32).astype(np.float64)
    seen = Seen(0, *(torch.from_numpy(x).float() for x in (q, k, v, out)), Logits(d**-0.5))
    statistics = LayerStatistics.begin(seen, tokens - FIRST, torch.from_numpy(k[FIRST : FIRST + 1]).float())
    statistics.add(seen, torch.arange(FIRST, tokens), 0)
    return RandomLayer(q, k, v, out, d**-0.5, statistics, half_rope(d) if rope is None else rope)


@functools.cache
def fitted(text: str, d: int, kv_heads: int, centred: bool = True, seed: int = 0) -> dict[str, Tensor]:
    """What an artifact would give a recipe for one layer: means, and the recipe's own fit."""
    recipe = parse(text)
    tokens = 60 if not hasattr(recipe, "centroids") else recipe.centroids + 64
    layer = random_layer(d, kv_heads, tokens=tokens, seed=seed)
    means = layer.means if centred and recipe.centre else (None, None)
    named = zip(("key_mean", "value_mean", "key_first"), (*means, layer.statistics.first), strict=True)
    fit = {} if means[0] is None else {name: mean.float() for name, mean in named}
    return {**fit, **recipe.fit(layer.statistics, layer.rope, means)}
