"""What an artifact holds, in numbers."""

from collections import Counter
from typing import Any

from kvfold.artifact import Artifact
from kvfold.format.layout import SlotLayout
from kvfold.recipes import parse

SIDES = ("key", "value")


def describe(artifact: Artifact) -> list[dict[str, Any]]:
    """A row per recipe and layer: widths as dims×bits, bits with metadata if layers differ, clips, the share of
    the largest eigenvalues."""
    rows, model = [], artifact.metadata.model
    for name in artifact.metadata.recipes:
        recipe = parse(name)
        for layer in model.packed:
            fit = artifact.fit(recipe, layer)
            row: dict[str, Any] = {"recipe": name, "layer": layer}
            for side, layout in zip(SIDES, recipe.layouts(model.key_dim, model.value_dim, fit), strict=True):
                row[f"{side} dims×bits"] = " ".join(f"{dims}×{bits}" for bits, dims in sorted(_widths(layout).items()))
                if f"{side}_widths" in fit:
                    row[f"{side} bits"] = round(8 * layout.slot_bytes / layout.dims, 2)
                if f"{side}_clip" in fit:
                    row[f"{side} clip"] = round(float(fit[f"{side}_clip"]), 4)
                if f"{side}_centroids" in fit:
                    row[f"{side} centroids"] = fit[f"{side}_centroids"].shape[1]
            rows.append(row)
    return rows


def _widths(layout: SlotLayout) -> Counter[int]:
    """The number of coordinates per bit width. If every KV head has a layout of its own, all of them are counted."""
    widths = Counter[int]()
    for head in layout.heads or (layout,):
        for segment in head.segments:
            widths[segment.bits] += segment.dims
    return widths
