"""Fitted: a recipe for one model, with what calibration found per packed layer. From it come codecs, layouts and sizes.

Everything per layer has the layer's number in the model as its key.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from kvfold.format.layout import PageLayout
from kvfold.format.open_block import ring_tokens
from kvfold.geometry import Geometry, listed
from kvfold.recipe import Fit, Recipe
from kvfold.recipes import RECIPES

if TYPE_CHECKING:
    import torch

    from kvfold.artifact import Artifact
    from kvfold.format.codec import Codec

RAW = RECIPES["bf16"]  # how skipped layers are stored


@dataclass(frozen=True)
class Fitted:
    recipe: Recipe
    geometry: Geometry
    fits: Mapping[int, Fit] = field(default_factory=dict)  # none before calibration: layouts and sizes do without

    @classmethod
    def of(cls, recipe: Recipe, geometry: Geometry, artifact: "Artifact | None") -> Self:
        """With the fits of the artifact, if there is one."""
        fits = {} if artifact is None else {layer: artifact.fit(recipe, layer) for layer in geometry.packed}
        return cls(recipe, geometry, fits)

    def check(self) -> None:
        """Refuse a model that the recipe does not fit."""
        self.page_layouts()

    @property
    def for_evaluation(self) -> str | None:
        """Why engines do not serve the recipe, or None if they do: see `PageLayout.for_evaluation`."""
        return next((reason for layout in self.page_layouts().values() if (reason := layout.for_evaluation)), None)

    def check_served(self) -> None:
        """Refuse a recipe that is only for evaluation."""
        if reason := self.for_evaluation:
            raise ValueError(
                f"{self.recipe} is for evaluation, as no kernel stores it ({reason}): serve fold4, fold3 or fold2"
            )

    def codecs(self, raw_dtype: "torch.dtype", device: "torch.device | str") -> dict[int, tuple["Codec", "Codec"]]:
        """The key and value codec per packed layer."""
        pairs = ((layer, self.layer_codecs(layer, raw_dtype)) for layer in self.geometry.packed)
        return {layer: (key.to(device), value.to(device)) for layer, (key, value) in pairs}

    def layer_codecs(self, layer: int, raw_dtype: "torch.dtype | None" = None) -> tuple["Codec", "Codec"]:
        """The key and value codec of one layer, in host memory."""
        recipe, fit = self._stored(layer)
        return recipe.codecs(self.geometry.key_dim, self.geometry.value_dim, fit, raw_dtype)

    def page_layouts(self, page_size: int | None = None) -> dict[int, PageLayout]:
        """The page layout per packed layer. If a method's layout depends on calibration, it is nominal without fits.
        Pages have `page_size` tokens, by default the recipe's number."""
        recipe, geometry = self.recipe, self.geometry
        if others := [layer for layer in recipe.skip if layer not in geometry.packed]:
            raise ValueError(
                f"{recipe}: layer {others[0]} cannot be skipped: the packed layers are {listed(geometry.packed)}"
            )
        layouts = {}
        try:
            for layer in geometry.packed:
                stored, fit = self._stored(layer)
                slots = stored.layouts(geometry.key_dim, geometry.value_dim, fit)
                layouts[layer] = PageLayout(*slots, page_size or recipe.page_size)
        except ValueError as error:
            raise ValueError(f"{recipe.name}: {error}") from None
        return layouts

    def sequence_bytes(self, context: int, page_size: int | None = None) -> int:
        """Bytes that one sequence of `context` tokens occupies in packed layers: its pages, and the ring of its open
        block."""
        layouts = self.page_layouts(page_size).values()
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
        ring = 2 * ring_tokens(layout.block(self.recipe.block)) * layout.raw_numbers
        return -(-context // layout.page_size) * layout.page_bytes + ring
