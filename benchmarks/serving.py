"""The pictures of what `kvfold bench serving --csv` measured.

    kvfold bench serving http://localhost:8000 -r saw-int4 -c 8 -c 32 -c 128 --csv saw-int4.csv
    python benchmarks/serving.py results/serving-h200.csv serving.svg

A row of two for each model and lengths of prompt and answer. Left: what each user gets against what the GPU gives, with
the number of users beside each mark. Right: what the GPU gives against the number of users.
"""

import argparse
import csv
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

CASE = ("model", "input", "output", "prefix_hit")
CURVE = ("engine", "recipe")
Row = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="CSV file of `kvfold bench serving`")
    parser.add_argument("picture", type=Path, help="PNG or SVG file to write")
    options = parser.parse_args()
    with options.rows.open() as file:
        rows = list(csv.DictReader(file))
    if not rows:
        parser.error(f"{options.rows} has no rows")
    draw(rows, options.picture)


def draw(rows: list[Row], picture: Path) -> None:
    cases = [(case, list(group)) for case, group in groupby(sorted(rows, key=itemgetter(*CASE)), itemgetter(*CASE))]
    figure, axes = plt.subplots(len(cases), 2, figsize=(10, 3.6 * len(cases)), squeeze=False, layout="constrained")
    for (left, right), ((model, prompt, answer, hit), some) in zip(axes, cases, strict=True):
        left.set_title(f"{model}: {prompt} + {answer} tokens, {hit} % of prompts shared", fontsize=9, loc="left")
        left.set(xlabel="tokens/s of each user", ylabel="tokens/s of the GPU")
        right.set(xlabel="users", ylabel="tokens/s of the GPU", xscale="log")
        for curve in dict.fromkeys(map(itemgetter(*CURVE), some)):
            own = sorted((row for row in some if itemgetter(*CURVE)(row) == curve), key=users)
            line(left, own, "request_tps", " ".join(curve))
            line(right, own, "concurrency", " ".join(curve))
        for row in some:
            place = (float(row["request_tps"]), float(row["system_tps"]))
            left.annotate(row["concurrency"], place, textcoords="offset points", xytext=(3, 3), fontsize=6)
        ticks = sorted({users(row) for row in some})
        right.set_xticks(ticks, [str(tick) for tick in ticks])
        right.minorticks_off()
        for panel in (left, right):
            panel.set_ylim(bottom=0)
        right.legend(fontsize=7)
    figure.suptitle(", ".join(dict.fromkeys(f"{row['gpu']}, {row['date']}" for row in rows)), fontsize=10)
    figure.savefig(picture, dpi=150)
    plt.close(figure)


def line(axes: Axes, rows: list[Row], x: str, label: str) -> None:
    axes.plot([float(row[x]) for row in rows], [float(row["system_tps"]) for row in rows], "o-", label=label)


def users(row: Row) -> int:
    return int(row["concurrency"])


if __name__ == "__main__":
    main()
