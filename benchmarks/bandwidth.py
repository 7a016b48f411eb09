"""A picture of decoding against the bandwidth of a device copy, from the rows of `kvfold bench kernels`.

    kvfold bench kernels --op decode --case 32x8192 -r fold4 -r saw-int4 --csv rows.csv
    python benchmarks/bandwidth.py rows.csv docs/bandwidth.svg --case 32x8192

Of the decode rows of a case, those with the heads of the first one are drawn, and of each recipe the last. A bar is the
bytes that a recipe reads in a second, as a share of what a copy in the same run moves. Beside it stand the time, and
how many times faster it is than the fastest 16-bit attention. That has a bar too. Reading alone can be faster than a
copy, which also writes.
"""

import argparse
import csv
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

OURS = "fold"
Row = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="CSV file of `kvfold bench kernels`")
    parser.add_argument("picture", type=Path, help="PNG or SVG file to write")
    parser.add_argument("--case", default="32x8192", help="sequences and tokens of the rows that are drawn")
    options = parser.parse_args()
    with options.rows.open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["op"] == "decode" and case(row) == options.case]
    if not rows:
        parser.error(f"{options.rows} has no decode rows of {options.case}")
    draw(list({row["recipe"]: row for row in rows if shape(row) == shape(rows[0])}.values()), options.picture)


def case(row: Row) -> str:
    return f"{row['batch']}x{row['context']}"


def shape(row: Row) -> str:
    heads = f"{row['q_heads']} query and {row['kv_heads']} KV heads of {row['head_dim']}"
    return f"{heads}, pages of {row['page']}, {row['dtype']}"


def bars(rows: list[Row]) -> list[tuple[str, float, str]]:
    """A name, a share of the copy's bandwidth and a label each: 16-bit attention, then recipes, the fastest first."""
    fastest = min(rows, key=lambda row: float(row["baseline_us"]))
    dense = 4 * int(fastest["head_dim"]) * int(fastest["kv_heads"]) * int(fastest["batch"]) * int(fastest["context"])
    us = float(fastest["baseline_us"])
    share = dense / us / 1e6 / float(fastest["copy_tb_per_s"])
    ranked = sorted(rows, key=lambda row: float(row["us"]))
    return [(f"{fastest['baseline']}, 16 bits", share, f"{us:.0f} µs")] + [
        (row["recipe"], float(row["fraction_of_copy"]), f"{float(row['us']):.0f} µs, {float(row['speedup']):.1f}×")
        for row in ranked
    ]


def draw(rows: list[Row], picture: Path) -> None:
    mpl.rcParams.update({"svg.hashsalt": "kvfold", "font.size": 9})
    drawn = bars(rows)
    figure, axes = plt.subplots(figsize=(8.5, 1 + 0.22 * len(drawn)), layout="constrained")
    for place, (name, share, label) in enumerate(drawn):
        colour = "tab:blue" if name.startswith(OURS) else "0.65" if place else "0.3"
        axes.bar_label(axes.barh(place, share, color=colour), [f" {label}"])
    axes.axvline(1, color="0.7", linewidth=0.8, zorder=0)
    axes.set_yticks(range(len(drawn)), [name for name, _, _ in drawn])
    axes.set_ylim(len(drawn) - 0.3, -0.7)
    axes.set_xlim(0, 1.25)
    copied, dates = (sorted({row[name] for row in rows}) for name in ("copy_tb_per_s", "date"))
    speeds = " to ".join(dict.fromkeys(f"{float(speed):.2f}" for speed in (copied[0], copied[-1])))
    axes.set_xlabel(f"bytes read per second, as a share of a device copy in the same run ({speeds} TB/s)")
    last = rows[-1]
    versions = f"{last['gpu']}, torch {last['torch']}, triton {last['triton']}"
    days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    axes.set_title(f"Decoding, {case(last)}, {shape(last)}\n{versions}, {days}", fontsize=9)
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)
    plt.close(figure)


if __name__ == "__main__":
    main()
