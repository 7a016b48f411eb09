"""Draw the rows of `kvfold bench kernels --csv`.

    kvfold bench kernels --csv results/kernels-h200.csv
    python benchmarks/roofline.py results/kernels-h200.csv kernels.svg

Left: per row, the share of the bandwidth of a large device copy. Right: a roofline of attention, operations per second
over operations per byte of the cache. The roof is the bandwidth of the copy. Hollow marks are 16-bit attention. --peak
adds the roof of the tensor cores, in TFLOP/s. It is not measured.
"""

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

MARKERS = {"decode": "o", "extend": "s"}
Row = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="CSV file of `kvfold bench kernels`")
    parser.add_argument("picture", type=Path, help="PNG or SVG file to write")
    parser.add_argument("--peak", type=float, help="TFLOP/s of the tensor cores")
    options = parser.parse_args()
    with options.rows.open() as file:
        rows = list(csv.DictReader(file))
    if not rows:
        parser.error(f"{options.rows} has no rows")
    draw(rows, options.picture, options.peak)


def draw(rows: list[Row], picture: Path, peak: float | None = None) -> None:
    colours = {recipe: f"C{i}" for i, recipe in enumerate(dict.fromkeys(row["recipe"] for row in rows))}
    figure, (left, right) = plt.subplots(1, 2, figsize=(15, max(6, len(rows) / 6)), layout="constrained")
    fractions(left, rows, colours)
    roofline(right, [row for row in rows if row["op"] in MARKERS], colours, peak)
    first = rows[0]
    figure.suptitle(f"{first['gpu']}, torch {first['torch']}, triton {first['triton']}, {first['date']}", fontsize=10)
    figure.savefig(picture, dpi=150)
    plt.close(figure)


def fractions(axes: Axes, rows: list[Row], colours: dict[str, str]) -> None:
    place, names = 0, dict[int, str]()
    for name in dict.fromkeys(map(case, rows)):
        names[place] = f"{name}:"
        for row in (row for row in rows if case(row) == name):
            place += 1
            names[place] = row["recipe"]
            bars = axes.barh(place, float(row["fraction_of_copy"]), color=colours[row["recipe"]])
            axes.bar_label(bars, [f" {float(row['speedup']):.2f}×"], fontsize=6)
        place += 1
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_yticks(list(names), list(names.values()), fontsize=7)
    axes.set_ylim(place + 1, -1)
    axes.set_xlabel("share of copy bandwidth")
    axes.set_title("beside the bars, the speed-up over the baseline of the same run", fontsize=9)


def roofline(axes: Axes, rows: list[Row], colours: dict[str, str], peak: float | None) -> None:
    if not rows:
        axes.set_axis_off()
        return
    points = []
    for row in rows:
        dense = 4 * int(row["head_dim"]) * int(row["kv_heads"]) * int(row["batch"]) * int(row["context"])
        for size, us, filled in ((int(row["bytes"]), row["us"], True), (dense, row["baseline_us"], False)):
            points.append((operations(row) / size, operations(row) / float(us) / 1e6))
            face = colours[row["recipe"]] if filled else "none"
            edge = colours[row["recipe"]] if filled else "black"
            axes.plot(*points[-1], MARKERS[row["op"]], markerfacecolor=face, markeredgecolor=edge)
    left, right = min(x for x, _ in points) / 2, max(x for x, _ in points) * 2
    bandwidth = max(float(row["copy_tb_per_s"]) for row in rows)
    axes.plot([left, right], [bandwidth * left, bandwidth * right], color="grey")
    if peak:
        axes.axhline(peak, color="grey", linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="operations per byte of keys and values", ylabel="TFLOP/s")
    axes.set_ylim(top=2 * (peak or max(y for _, y in points)))
    axes.set_title(f"attention under the roof of a copy's {bandwidth:.2f} TB/s", fontsize=9)
    marks = [Line2D([], [], marker=marker, linestyle="", color="grey", label=op) for op, marker in MARKERS.items()]
    hollow = Line2D([], [], marker="o", linestyle="", color="black", markerfacecolor="none", label="16-bit attention")
    axes.legend(handles=[*marks, hollow], fontsize=7)


def case(row: Row) -> str:
    new = int(row["new"]) if row["op"] == "extend" else 0
    tokens = f"{int(row['context']) - new}" + (f" + {new}" if new else "")
    heads = f"{row['q_heads']}/{row['kv_heads']} heads of {row['head_dim']}"
    return f"{row['op']} {row['batch']} × {tokens}, {heads}, page {row['page']}, {row['dtype']}"


def operations(row: Row) -> float:
    """Operations of attention: 4·head_dim per pair of a query and a token that it sees."""
    new, context = int(row["new"]), int(row["context"])
    pairs = new * context - new * (new - 1) / 2
    return 4 * int(row["batch"]) * int(row["q_heads"]) * int(row["head_dim"]) * pairs


if __name__ == "__main__":
    main()
