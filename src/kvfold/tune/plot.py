"""The picture of a tuned model: what bits buy."""

from collections.abc import Sequence
from pathlib import Path

from kvfold.recipes import TUNED
from kvfold.tune.tuner import Point

try:
    from matplotlib.figure import Figure
except ImportError:
    raise ImportError("drawing needs matplotlib: pip install 'kvfold[report]'") from None


def draw(points: Sequence[Point], chosen: Point, png: Path) -> None:
    """KL against bits, on text and on copies: the tuned recipe as a curve, the named recipes and what was chosen as
    points."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    tuned = sorted(point for point in (*points, chosen) if point.recipe == TUNED.name)
    for axes, name, title in zip(figure.subplots(1, 2), ("kl", "copy_kl"), ("text", "copied tokens"), strict=True):
        axes.semilogy([p.bits for p in tuned], [getattr(p, name) for p in tuned], "-", label="tuned")
        for point in points:
            if point.recipe != TUNED.name:
                axes.plot(point.bits, getattr(point, name), "o", label=f"{point.recipe}: equal bits")
        axes.plot(chosen.bits, getattr(chosen, name), "k*", markersize=12, label="chosen")
        axes.set(title=title, xlabel="bits per number", ylabel="KL per token")
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(png, dpi=110)
