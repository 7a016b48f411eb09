"""What an artifact holds, in numbers and as a picture."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from kvfold.artifact import Artifact
from kvfold.format.layout import SlotLayout
from kvfold.recipes import parse

SPECTRUM_HEAD = 8  # the largest eigenvalues; their share of the sum is shown
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
                if f"{side}_spectrum" in fit:
                    spectrum = fit[f"{side}_spectrum"]
                    share = spectrum[:, :SPECTRUM_HEAD].sum() / spectrum.sum()
                    row[f"{side} top {SPECTRUM_HEAD}"] = f"{share:.0%}"
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


def draw(artifact: Artifact, png: Path) -> None:
    """A row of plots per recipe: key coordinates per layer by bit width, spectra, clips."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("drawing needs matplotlib: pip install 'kvfold[report]'") from None

    model, recipes = artifact.metadata.model, artifact.metadata.recipes
    if not recipes:
        raise ValueError("there is nothing to draw: the artifact holds means alone")
    figure = Figure(figsize=(13, 3.2 * len(recipes)), layout="constrained")
    axes = figure.subplots(len(recipes), 3, squeeze=False)
    layers = model.packed
    for (widths, spectra, clips), name in zip(axes, recipes, strict=True):
        recipe = parse(name)
        fits = [artifact.fit(recipe, layer) for layer in layers]
        keys = [_widths(recipe.layouts(model.key_dim, model.value_dim, fit)[0]) for fit in fits]
        below = torch.zeros(len(layers))
        for bits in sorted({bits for key in keys for bits in key}):
            dims = torch.tensor([key[bits] for key in keys])
            widths.bar(layers, dims, bottom=below, width=1, label=f"{bits} bits")
            below = below + dims
        widths.set(title=f"{name}: key coordinates by width", xlabel="layer", ylabel="coordinates")
        widths.legend(fontsize="small", loc="lower right")
        for side, style in zip(SIDES, ("-", "--"), strict=True):
            if f"{side}_spectrum" in fits[0]:
                for fit in fits[:: max(1, len(layers) // 6)]:
                    spectrum = fit[f"{side}_spectrum"].mean(dim=0)
                    spectra.semilogy(spectrum / spectrum.sum(), style, linewidth=1)
            if f"{side}_clip" in fits[0]:
                clips.plot(layers, [float(fit[f"{side}_clip"]) for fit in fits], style, label=side)
        spectra.set(title="eigenvalues (dashed: values)", xlabel="rank", ylabel="share")
        clips.set(title="clip", xlabel="layer")
        if clips.lines:
            clips.legend(fontsize="small")
    figure.savefig(png, dpi=110)
