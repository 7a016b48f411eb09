"""The two pictures of the README, each on a light and on a dark page. `make pictures` draws all pictures.

    python benchmarks/pictures.py docs/pictures

- overview: quality and speed against memory, from rows in `results/`. Of a cache that was measured more than once, the
  last row counts.
- key: the way of a key into the cache. It has no numbers of its own.

Each number of the overview stands in the file as a comment too: `saw-int4: 3.8 times smaller, KL 0.0229`.
"""

import argparse
import csv
import math
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
QUALITY = RESULTS / "qwen2.5-coder-1.5b" / "quality.csv"
PUBLISHED = RESULTS / "quality-qwen2.5-coder-1.5b.csv"
OURS = "fold"
CENTRED = ("saw-int4", "oscar-int2:group=128", *(f"gtq-k{bits}v{bits}:sink=64,recent=256" for bits in (2, 3, 4)))
AS_PUBLISHED = (
    "int4:centre=false",
    "saw-int4:centre=false",
    "tq-k4v4:centre=false",
    "oscar-int2:centre=false,group=128",
)
SIXTEEN_BITS = ("auto", "bf16")  # as the engines' rows call them
LOADS = (("8192", "32"), ("8192", "8"))  # tokens in and users of vLLM's rows: the first that a cache has
LIFTED = {  # labels, in points
    "gtq-k2v2:sink=64,recent=256": 7,
    "gtq-k4v4:sink=64,recent=256": -4,
    "fold4": 3,
    "fold2": -3,
    "turboquant_4bit_nc": 7,
}
STEPS = (  # of a key, with what each is for
    ("centre", "subtract the mean key", "exact: softmax ignores it"),
    ("bits by block", "8, 4, 2 or 1 bits each", "more where queries look"),
    ("rotate", "a Hadamard matrix per width", "spreads outliers"),
    ("page", "64 tokens, codes + scales", "the engine's own blocks"),
    ("attention", "reads the codes tile by tile", "nothing is unpacked whole"),
)
Row = dict[str, str]


@dataclass(frozen=True)
class Palette:
    """Colours of one kind of page."""

    text: str
    grid: str
    ours: str
    others: str
    bad: str
    box: str


PALETTES = {
    "light": Palette("#1f2328", "#d8dee4", "#0969da", "#6e7781", "#cf222e", "#ddf4ff"),
    "dark": Palette("#e6edf3", "#30363d", "#58a6ff", "#9198a1", "#ff7b72", "#121d2f"),
}


@dataclass(frozen=True)
class Point:
    """A cache in one of the two plots. `smaller`: how many times as many tokens fit as in 16 bits."""

    cache: str
    smaller: float
    value: float
    kind: str  # "ours", "others" or "bad"
    marker: str = "o"
    label: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write to")
    folder = parser.parse_args().folder
    for name, palette in PALETTES.items():
        overview(quality_points(), speed_points(), palette, folder / f"overview-{name}.svg")
        (folder / f"key-{name}.svg").write_text(key(palette))


def read(file: Path) -> list[Row]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def quality_points() -> list[Point]:
    """KL at a context of 4,096 tokens: ours and others with their means removed, then others as published."""
    here = {row["recipe"]: row for row in read(QUALITY) if row["context"] == "4096"}
    points = [quality(row, "ours") for name, row in here.items() if name.startswith(OURS)]
    points += [quality(here[name], "others") for name in CENTRED if name in here]
    published = {row["recipe"]: row for row in read(PUBLISHED) if row["calibration"].startswith("wiki")}
    return points + [quality(published[name], "bad", "X") for name in AS_PUBLISHED]


def quality(row: Row, kind: str, marker: str = "o") -> Point:
    name = row["recipe"].partition(":")[0]
    return Point(row["recipe"], 16 / float(row["bits_per_element_128k"]), float(row["kl"]), kind, marker, name)


def noise_floor() -> float:
    """KL of transformers' own 16-bit cache against ours, on the same tokens."""
    (row,) = (row for row in read(QUALITY) if row["context"] == "4096" and row["noise_floor"])
    return float(row["noise_floor"])


def speed_points() -> list[Point]:
    """Decoding in SGLang, then servers of vLLM: each over the 16-bit cache of the same engine."""
    bits = {row["recipe"]: float(row["bits_per_element_128k"]) for row in read(QUALITY)}
    fits = {row["cache"]: int(row["tokens"]) for row in read(RESULTS / "capacity-h200.csv")}
    smaller = {name: tokens / fits["bf16"] for name, tokens in fits.items()} | {r: 16 / b for r, b in bits.items()}
    smaller["fp8_e4m3"] = smaller["fp8"]
    points: dict[tuple[str, str], Point] = {}
    sixteen = 0.0
    for row in read(RESULTS / "sglang-decode-h200.csv"):
        if (row["model"], row["batch"], row["input"]) != ("Qwen3-8B", "32", "8192"):
            continue
        name, speed = row["recipe"], float(row["decode_tps"])
        if name in SIXTEEN_BITS:
            sixteen = speed  # of the same run: it stands before its caches
        elif name in smaller:
            points["sglang", name] = speed_point(name, smaller[name], speed / sixteen, "o")
    for load in reversed(LOADS):
        rows = [row for row in read(RESULTS / "serving-h200.csv") if is_load(row, load)]
        speeds = {row["recipe"]: float(row["system_tps"]) for row in rows}
        for name, speed in speeds.items():
            if name not in SIXTEEN_BITS:
                users = "" if load == LOADS[0] else f", {load[1]} users"
                points["vllm", name] = speed_point(name, smaller[name], speed / speeds["bf16"], "^", users)
    return list(points.values())


def is_load(row: Row, load: tuple[str, str]) -> bool:
    kind = (row["engine"], row["model"], row["prefix_hit"])
    return kind == ("vllm", "Qwen3-8B", "0") and (row["input"], row["concurrency"]) == load


def speed_point(name: str, smaller: float, speed: float, marker: str, users: str = "") -> Point:
    kind = "ours" if name.startswith(OURS) else "bad" if speed < 1 else "others"
    names = {"fp8": "FP8", "fp8_e4m3": "FP8"}
    return Point(name, smaller, speed, kind, marker, names.get(name, name.partition(":")[0]) + users)


def overview(quality: list[Point], speed: list[Point], palette: Palette, picture: Path) -> None:
    mpl.rcParams.update({"svg.hashsalt": "kvfold", "font.size": 9})
    with plt.rc_context(
        {
            **{f"{each}.color": palette.text for each in ("text", "xtick", "ytick")},
            "axes.labelcolor": palette.text,
            "axes.edgecolor": palette.grid,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    ):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
        left.set(yscale="log", ylabel="KL against the 16-bit cache (less is better)")
        left.set_title("Quality against memory\nQwen2.5-Coder-1.5B, WikiText-2", fontsize=10)
        left.axhline(noise_floor(), color=palette.others, linewidth=0.8, linestyle="--")
        left.annotate("two 16-bit caches", (6.5, noise_floor()), (0, 3), textcoords="offset points", fontsize=8)
        right.set(ylabel="speed over the engine's 16-bit cache (more is better)")
        right.set_title("Speed against memory\nQwen3-8B shape, one H200, prompts of 8k", fontsize=10)
        right.axhline(1, color=palette.others, linewidth=0.8, linestyle="--")
        for axes, points in ((left, quality), (right, speed)):
            axes.set_xlabel("how many times as many tokens fit as in 16 bits")
            axes.grid(color=palette.grid, linewidth=0.6)
            axes.set_axisbelow(True)
            for some in together(points, log=axes is left):
                draw(axes, some, palette)
        left.set(xlim=(3.2, 8.6), ylim=(3e-4, 30))
        right.set(xlim=(1.5, 8.6), ylim=(0, 2.3))
        right.scatter([], [], color=palette.others, marker="o", label="decoding in SGLang, batch of 32")
        right.scatter([], [], color=palette.others, marker="^", label=f"serving in vLLM, {LOADS[0][1]} users")
        right.legend(frameon=False, fontsize=8, loc="lower right", labelcolor=palette.text)
        figure.savefig(picture, transparent=True, metadata={"Date": None})
        plt.close(figure)
    words = [f"{each.cache}: {each.smaller:.1f} times smaller, KL {each.value:.4f}" for each in quality]
    words += [f"{each.cache}: {each.smaller:.1f} times smaller, {each.value:.2f} times as fast" for each in speed]
    comments = "".join(f"<!-- {line} -->\n" for line in words)
    picture.write_text(picture.read_text().rstrip() + f"\n{comments}")


def together(points: list[Point], log: bool) -> list[list[Point]]:
    """Points of one kind that lie so close together that they share a label."""
    groups: list[list[Point]] = []
    for point in points:
        for group in groups:
            other = group[0]
            distance = abs(math.log(point.value / other.value)) / 8 if log else abs(point.value - other.value)
            if other.kind == point.kind and abs(other.smaller - point.smaller) < 0.3 and distance < 0.065:
                group.append(point)
                break
        else:
            groups.append([point])
    return groups


def draw(axes: plt.Axes, points: list[Point], palette: Palette) -> None:
    """Points with one label."""
    ours, colour = points[0].kind == "ours", getattr(palette, points[0].kind)
    for point in points:
        axes.scatter(point.smaller, point.value, s=44 if ours else 28, color=colour, marker=point.marker, zorder=3)
    names = ", ".join(dict.fromkeys(point.label for point in points))
    axes.annotate(
        f"{names} as published" if points[0].marker == "X" else names,
        (max(point.smaller for point in points), math.prod(point.value for point in points) ** (1 / len(points))),
        xytext=(7, -3 + LIFTED.get(points[0].cache, 0)),
        textcoords="offset points",
        color=colour,
        fontsize=9.5 if ours else 8,
        fontweight="bold" if ours else "normal",
    )


def key(palette: Palette) -> str:
    """The way of a key: a box per step, with arrows between them."""
    wide, high, gap = 172, 96, 22
    width = len(STEPS) * wide + (len(STEPS) - 1) * gap + 4
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {high + 4}" font-family="system-ui, sans-serif" '
        f'text-anchor="middle" role="img">',
        "<title>The way of a key: centre, bits by block, rotate, page, attention</title>",
    ]
    for place, (name, what, why) in enumerate(STEPS):
        left = 2 + place * (wide + gap)
        middle = left + wide / 2
        lines += [
            f'<rect x="{left}" y="2" width="{wide}" height="{high}" rx="10" fill="{palette.box}" '
            f'stroke="{palette.ours}"/>',
            f'<text x="{middle}" y="34" font-size="17" font-weight="600" fill="{palette.text}">{name}</text>',
            f'<text x="{middle}" y="59" font-size="12" fill="{palette.text}">{what}</text>',
            f'<text x="{middle}" y="79" font-size="12" fill="{palette.others}">{why}</text>',
        ]
        if place:
            y, tip = 2 + high / 2, left - 3
            lines += [
                f'<path d="M{left - gap + 2} {y}H{tip - 5}" stroke="{palette.ours}" stroke-width="2"/>',
                f'<path d="M{tip} {y}l-8 -5v10z" fill="{palette.ours}"/>',
            ]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    main()
