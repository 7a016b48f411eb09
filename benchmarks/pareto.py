"""A picture of quality against memory, from the rows of benchmarks/quality.py.

    python benchmarks/pareto.py benchmarks/results/qwen2.5-coder-1.5b docs/pareto.svg --context 4096

Each recipe is a point: allocated bits per number at 128k tokens, and KL. The line joins recipes that no other beats in
both. If needle.csv has the recipe, its label says how many needles it finds in the longest haystacks.
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

OURS = "fold"
Point = tuple[float, float]  # bits, KL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--context", default="4096", help="of the rows that are drawn")
    options = parser.parse_args()
    rows = [row for row in read(options.folder / "quality.csv") if row["context"] == options.context]
    points = {
        row["recipe"]: (float(row["bits_per_element_128k"]), float(row["kl"])) for row in rows if float(row["kl"])
    }
    draw(points, needles(options.folder / "needle.csv"), rows[0]["model"], options.picture)


def read(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def needles(file: Path) -> dict[str, float]:
    """The share of needles that each recipe finds in the longest haystacks."""
    if not file.exists():
        return {}
    rows = read(file)
    longest, found = max(int(row["length"]) for row in rows), defaultdict(list)
    for row in rows:
        if int(row["length"]) == longest:
            found[row["recipe"]].append(float(row["score"]))
    return {recipe: sum(scores) / len(scores) for recipe, scores in found.items()}


def frontier(points: dict[str, Point]) -> list[Point]:
    """The points that no other point beats in both, by bits."""
    best: list[Point] = []
    for bits, kl in sorted(points.values()):
        if not best or kl < best[-1][1]:
            best.append((bits, kl))
    return best


def crowded(point: Point, points: Iterable[Point]) -> bool:
    """Whether a label to the right of a point would cover another point's label."""
    bits, kl = point
    return any(0 <= other - bits < 0.35 and 0.8 < kl_other / kl < 1.25 for other, kl_other in points if other != bits)


def draw(points: dict[str, Point], found: dict[str, float], model: str, picture: Path) -> None:
    mpl.rcParams.update({"svg.hashsalt": "kvfold", "font.size": 9})
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot(*zip(*frontier(points), strict=True), color="0.7", zorder=1)
    for recipe, (bits, kl) in points.items():
        ours = recipe.startswith(OURS)
        axes.scatter(bits, kl, color="tab:blue" if ours else "0.45", marker="o" if ours else "x", zorder=2)
        label = recipe.split(":")[0] + (f", {found[recipe]:.0%}" if recipe in found else "")
        left = ours or crowded((bits, kl), points.values())
        axes.annotate(
            label,
            (bits, kl),
            xytext=(-5 if left else 5, -11 if ours else 4),
            textcoords="offset points",
            ha="right" if left else "left",
            fontweight="bold" if ours else "normal",
        )
    axes.set(yscale="log", xlabel="allocated bits per number at 128k tokens", ylabel="KL against the 16-bit cache")
    axes.set_title(f"{model}; with the share of needles found, where measured", fontsize=9)
    axes.margins(x=0.12)
    axes.grid(which="major", color="0.9")
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
