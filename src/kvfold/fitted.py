"""Fitted: a recipe for one model, with what calibration found per layer. From it come codecs, layouts and sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from kvfold.artifact import Artifact
from kvfold.format.codec import Codec
from kvfold.format.layout import PageLayout, raw_slot
from kvfold.geometry import Geometry
from kvfold.recipe import Fit, Recipe
from kvfold.recipes import RECIPES

RAW = RECIPES["bf16"]  # how skipped layers are stored


@dataclass(frozen=True)
class Fitted:
    recipe: Recipe
    geometry: Geometry
    fits: Sequence[Fit] = ()  # per layer; none before calibration: layouts and sizes do without

    @classmethod
    def of(cls, recipe: Recipe, geometry: Geometry, artifact: Artifact | None) -> Self:
        """With the fits of the artifact, if there is one."""
        fits = () if artifact is None else [artifact.fit(recipe, layer) for layer in range(geometry.layers)]
        return cls(recipe, geometry, fits)

    def check(self) -> None:
        """Refuse a model that the recipe does not fit."""
        self.page_layouts()

    def codecs(self, raw_dtype: torch.dtype, device: torch.device | str) -> list[tuple[Codec, Codec]]:
        """The key and value codec per layer."""
        pairs = (self.layer_codecs(layer, raw_dtype) for layer in range(self.geometry.layers))
        return [(key.to(device), value.to(device)) for key, value in pairs]

    def layer_codecs(self, layer: int, raw_dtype: torch.dtype = torch.bfloat16) -> tuple[Codec, Codec]:
        """The key and value codec of one layer, in host memory."""
        recipe, fit = self._stored(layer)
        return recipe.codecs(self.geometry.head_dim, fit, raw_dtype)

    def page_layouts(self, page_size: int | None = None) -> list[PageLayout]:
        """The page layout per layer. If a method's layout depends on calibration, it is nominal without fits. Pages
        have `page_size` tokens, by default the recipe's number."""
        recipe, layers = self.recipe, self.geometry.layers
        if recipe.skip and max(recipe.skip) >= layers:
            raise ValueError(f"{recipe}: the model has layers 0 to {layers - 1}")
        layouts = []
        try:
            for stored, fit in map(self._stored, range(layers)):
                layouts.append(PageLayout(*stored.layouts(self.geometry.head_dim, fit), page_size or recipe.page_size))
        except ValueError as error:
            raise ValueError(f"{recipe.name}: {error}") from None
        return layouts

    def sequence_bytes(self, context: int, page_size: int | None = None) -> int:
        """Bytes that one sequence of `context` tokens occupies: its pages, and the shadow pages of its windows."""
        layouts = self.page_layouts(page_size)
        return self.geometry.kv_heads * sum(self._head_bytes(layout, context) for layout in layouts)

    def bits_per_element(self, context: int, page_size: int | None = None) -> float:
        """Allocated bits per cached number, for a sequence of `context` tokens."""
        return 8 * self.sequence_bytes(context, page_size) / (self.geometry.elements_per_token * context)

    def _stored(self, layer: int) -> tuple[Recipe, Fit]:
        """The recipe and the fit that a layer is stored with."""
        if layer in self.recipe.skip:
            return RAW, {}
        return self.recipe, self.fits[layer] if self.fits else {}

    def _head_bytes(self, layout: PageLayout, context: int) -> int:
        """Bytes of one KV head of a layer."""
        raw = PageLayout(raw_slot(layout.key.dims), raw_slot(layout.value.dims), layout.page_size)
        shadows = layout.windows(self.recipe.windows).pages(0, context, layout.page_size)
        return -(-context // layout.page_size) * layout.page_bytes + len(shadows) * raw.page_bytes
