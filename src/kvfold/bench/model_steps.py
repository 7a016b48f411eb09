"""Decode steps of a model with random weights: eager, or as a CUDA graph. Caches are filled without a prompt."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvfold.bench import dense_cache
from kvfold.bench.cuda_graphs import WARM_UP, capture
from kvfold.bench.dense_cache import DenseCache
from kvfold.bench.expected_ops import relative_error
from kvfold.bench.random_fits import random_codecs, random_states
from kvfold.engines.transformers import IMPLEMENTATION, PackedCache
from kvfold.format.codec import Codec, sixteen_bit
from kvfold.geometry import Geometry, LayerShape
from kvfold.ops.dispatch import choose
from kvfold.paged import PagedCache
from kvfold.recipe import Recipe
from kvfold.recipes import parse

NEEDED = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")  # to build a model
STEPS = 70  # steps that are verified: more than a page


def with_layers(config: Mapping[str, Any], layers: int | None) -> dict[str, Any]:
    """A configuration cut to its first `layers` layers. None keeps all."""
    if layers is None:
        return dict(config)
    kinds = config.get("layer_types")
    return {**config, "num_hidden_layers": layers, **({"layer_types": kinds[:layers]} if kinds else {})}


def check_plain(config: Mapping[str, Any]) -> None:
    """Refuse a model that has more than plain full attention. Of other layers, transformers' own cache grows from step
    to step, so no step can be captured. And the dense cache has no soft-caps, no sinks and one head dimension."""
    geometry = Geometry.from_config(config)
    shape = geometry.shape
    plain = LayerShape("full", shape.q_heads, shape.kv_heads, shape.key_dim, shape.key_dim)
    others = [layer for layer in DynamicCache(config=_config(config)).layers if type(layer) is not DynamicLayer]
    if others or set(geometry.layers) != {plain}:
        raise ValueError(
            f"{geometry.architecture} has more than plain full attention, and its steps cannot be captured in "
            "transformers: time it by `kvfold bench serving`"
        )


def _config(config: Mapping[str, Any]) -> PreTrainedConfig:
    if missing := [name for name in NEEDED if config.get(name) is None]:
        raise ValueError(f"a model cannot be built without {', '.join(missing)}: name a complete config.json")
    return AutoConfig.for_model(**{name: value for name, value in config.items() if name != "quantization_config"})


def random_model(config: Mapping[str, Any], device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model as transformers initialises it, made on the device."""
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(_config(config), dtype=dtype).eval()


def layer_codecs(recipe: Recipe, geometry: Geometry, layer: int, raw_dtype: torch.dtype) -> tuple[Codec, Codec]:
    return random_codecs(recipe, geometry.key_dim, geometry.q_heads, geometry.kv_heads, raw_dtype, layer)


def packed_cache(
    model: PreTrainedModel, recipe: Recipe, batch: int, start: int, capacity: int, page: int
) -> PackedCache:
    """A cache of `start` random tokens per sequence, with room for `capacity` tokens, in pages of random order."""
    geometry = Geometry.from_config(model.config.to_dict())
    raw_dtype = sixteen_bit(model.dtype)
    codecs = {}
    for layer in geometry.packed:
        key, value = layer_codecs(recipe, geometry, layer, raw_dtype)
        codecs[layer] = key.to(model.device), value.to(model.device)  # one per layer, as a fitted model has
    cache = PackedCache(recipe, model.config, codecs, raw_dtype, model.device, page)
    cache.begin(batch, 0, reserve=capacity)
    assert cache.paged is not None
    tables, pages = cache.paged.tables, len(cache.paged.pools[0])
    tables.references = [0] * pages
    tables.free = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).tolist()
    cache.begin(batch, start)
    fill(cache.paged, recipe)
    return cache


def fill(cache: PagedCache, recipe: Recipe) -> None:
    """Fill all pages and rings: random tokens of one page are stored, and copied to all others and to the rings."""
    size, dtype, device = cache.tables.page_size, cache.rings[0].dtype, cache.device
    one = PagedCache(
        cache.codecs, cache.kv_heads, 1, block=recipe.block, page_size=size, raw_dtype=dtype, device=device
    )
    one.extend([size])
    generator = torch.Generator(device).manual_seed(0)
    for layer, layout in enumerate(cache.layouts):
        dims = layout.key.dims, layout.value.dims
        k, v = (random_states((size, cache.kv_heads, d), generator).to(dtype) for d in dims)
        new = choose(layout, 1, device).store.run(one.pages(layer), k, v)
        cache.pools[layer].view(torch.int64)[:] = one.pools[layer].view(torch.int64)[0]
        if new is not None:
            for ring, side in zip(layout.ring_sides(cache.rings[layer]), new, strict=True):
                ring[:] = side[torch.arange(ring.shape[2], device=device) % size].transpose(0, 1)


class Decoder:
    """Runs decode steps over a cache, with one random token per sequence. Every cache gets the same tokens."""

    def __init__(self, model: PreTrainedModel, cache: PackedCache | DenseCache, batch: int) -> None:
        self.model, self.cache = model, cache
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
        self.positions = torch.zeros_like(self.ids)
        self.generator = torch.Generator(model.device).manual_seed(0)

    def begin(self) -> None:
        """Prepare the next step, before its forward call or before its replay. Tensors are written in place."""
        self.cache.begin(len(self.ids), 1)
        self.ids.random_(0, self.model.config.vocab_size, generator=self.generator)
        self.positions.fill_(self.cache.tokens - 1)

    @torch.no_grad()
    def run(self) -> Tensor:
        """The logits of the step, [sequences, 1, vocabulary]."""
        packed = isinstance(self.cache, PackedCache)
        self.model.set_attn_implementation(IMPLEMENTATION if packed else dense_cache.IMPLEMENTATION)
        return self.model(self.ids, position_ids=self.positions, past_key_values=self.cache, use_cache=True).logits


def packed_error(model: PreTrainedModel, recipe: Recipe, page: int, batch: int = 2, steps: int = STEPS) -> float:
    """How far replayed steps are from eager steps over another cache: the largest relative error of logits.

    Lengths grow between replays. After a few steps, another block is open.
    """
    start = recipe.block + max(3, recipe.block - WARM_UP - 3)
    replayed, eager = (
        Decoder(model, packed_cache(model, recipe, batch, start, start + WARM_UP + steps, page), batch)
        for _ in range(2)
    )
    graph, logits = capture(replayed.begin, replayed.run)
    for _ in range(WARM_UP):
        eager.begin()
        eager.run()
    errors = []
    for step in range(steps):
        if step:
            replayed.begin()
        graph.replay()
        eager.begin()
        errors.append(relative_error(logits, eager.run()))
    return max(errors)


def dense_error(model: PreTrainedModel, page: int, batch: int = 2, steps: int = STEPS) -> float:
    """How far steps over the dense cache are from steps over 16-bit pages: the largest relative error of logits.

    Both caches are empty at first. Eager steps come first, then a replayed one.
    """
    geometry = Geometry.from_config(model.config.to_dict())
    packed = Decoder(model, packed_cache(model, parse("bf16"), batch, 0, steps, page), batch)
    plain = Decoder(model, DenseCache(geometry, batch, 0, steps, model.dtype, model.device), batch)
    errors = []
    for _ in range(steps):
        plain.begin()
        packed.begin()
        errors.append(relative_error(plain.run(), packed.run()))
    graph, logits = capture(plain.begin, plain.run)
    graph.replay()
    for _ in range(WARM_UP + 1):
        packed.cache.crop(-1)
        packed.begin()
        expected = packed.run()
    return max(*errors, relative_error(logits, expected))
