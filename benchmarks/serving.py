"""Draw the rows of `sweep.py`.

    python benchmarks/serving.py results/serving-h200.csv serving.svg

There are two panels per engine, model, and lengths of prompt and answer. Left: tokens per second of the GPU over tokens
per second per user, with the number of users beside each mark. Right: tokens per second of the GPU over the number of
users. Loads of a single user have one panel per engine and model: tokens per second over the length of the prompt.
"""

import argparse
import csv
from itertools import groupby
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

CASE = ("engine", "model", "prefix_hit", "input", "output")
ALONE = ("engine", "model", "prefix_hit", "output")
Row = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="CSV file of `sweep.py`")
    parser.add_argument("picture", type=Path, help="PNG or SVG file to write")
    options = parser.parse_args()
    with options.rows.open() as file:
        rows = list(csv.DictReader(file))
    if not rows:
        parser.error(f"{options.rows} has no rows")
    draw(rows, options.picture)


def draw(rows: list[Row], picture: Path) -> None:
    together = by(CASE, [row for row in rows if users(row) > 1])
    alone = by(ALONE, [row for row in rows if users(row) == 1])
    high = len(together) + (len(alone) + 1) // 2
    figure, axes = plt.subplots(high, 2, figsize=(10, 3.6 * high), squeeze=False, layout="constrained")
    colours = {recipe: f"C{i}" for i, recipe in enumerate(dict.fromkeys(row["recipe"] for row in rows))}
    for (left, right), ((engine, model, hit, prompt, answer), some) in zip(axes, together, strict=False):
        left.set_title(f"{engine}, {model}: {prompt} + {answer} tokens, {hit} % shared", fontsize=9, loc="left")
        left.set(xlabel="tokens/s of each user", ylabel="tokens/s of the GPU")
        right.set(xlabel="users", ylabel="tokens/s of the GPU", xscale="log")
        lines(left, some, "request_tps", "system_tps", colours)
        lines(right, some, "concurrency", "system_tps", colours)
        for row in some:
            place = (float(row["request_tps"]), float(row["system_tps"]))
            left.annotate(row["concurrency"], place, textcoords="offset points", xytext=(3, 3), fontsize=6)
        ticks = sorted({users(row) for row in some})
        right.set_xticks(ticks, [str(tick) for tick in ticks])
        right.minorticks_off()
    rest = axes.flat[2 * len(together) :]
    for panel, ((engine, model, hit, answer), some) in zip(rest, alone, strict=False):
        panel.set_title(f"{engine}, {model}: one user, {answer} tokens, {hit} % shared", fontsize=9, loc="left")
        panel.set(xlabel="tokens in", ylabel="tokens/s of the user")
        lines(panel, some, "input", "request_tps", colours)
    for panel in rest[len(alone) :]:
        panel.set_axis_off()
    dates = sorted({row["date"] for row in rows})
    gpus = ", ".join(dict.fromkeys(row["gpu"] for row in rows))
    figure.suptitle(f"{gpus}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}", fontsize=10)
    figure.savefig(picture, dpi=150)
    plt.close(figure)


def by(columns: tuple[str, ...], rows: list[Row]) -> list[tuple[tuple[str, ...], list[Row]]]:
    """Groups of rows that agree in these columns, sorted by number."""

    def key(row: Row) -> tuple[tuple[int, str], ...]:
        return tuple((int(row[column]) if row[column].isdigit() else 0, row[column]) for column in columns)

    return [(tuple(text for _, text in case), list(group)) for case, group in groupby(sorted(rows, key=key), key)]


def lines(axes: Axes, rows: list[Row], x: str, y: str, colours: dict[str, str]) -> None:
    """One line per recipe. Of repeated measurements it shows the latest."""
    for recipe, colour in colours.items():
        latest = sorted((row for row in rows if row["recipe"] == recipe), key=lambda row: row["date"])
        own = {(int(row["input"]), users(row)): row for row in latest}
        if own:
            places = ([float(own[point][column]) for point in sorted(own)] for column in (x, y))
            axes.plot(*places, "o-", label=recipe, color=colour)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)


def users(row: Row) -> int:
    return int(row["concurrency"])


if __name__ == "__main__":
    main()
