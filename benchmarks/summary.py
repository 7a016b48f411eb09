"""Tables with 95 % intervals, as Markdown, from the rows of benchmarks/quality.py.

    python benchmarks/summary.py results

reads quality.csv, needle.csv, tool-calls.csv and gsm8k.csv (of 0.3) in the folder, those that are there. Intervals are
drawn over haystacks. Differences are those to `bf16` on the same haystacks, in points.
"""

import argparse
import csv
from collections.abc import Callable, Iterator
from pathlib import Path

from kvfold.evaluate.intervals import Interval, by_haystack, difference, interval

REFERENCE = "bf16"
ALL = "all texts"
Row = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for file, tables in TABLES.items():
        if (folder / file).exists():
            with (folder / file).open(newline="") as rows:
                print("\n".join(tables(list(csv.DictReader(rows)))), end="\n\n")


def quality(rows: list[Row]) -> Iterator[str]:
    for model, context in groups(rows, "model", "context"):
        some = [row for row in rows if (row["model"], row["context"]) == (model, context)]
        far = [("perplexity > 16k", "perplexity_beyond_16k"), ("KL > 16k", "kl_beyond_16k")]
        far += [("KL 99.9 % > 16k", "kl_tail_beyond_16k")]
        columns = [("bits at 128k", "bits_per_element_128k"), ("perplexity", "perplexity"), ("KL", "kl")]
        columns += [("KL 99.9 %", "kl_tail"), *(far if some[0]["kl_beyond_16k"] else [])]
        yield f"### {model}: context {int(context):,}, {int(some[0]['tokens']):,} tokens of {some[0]['text']}\n"
        yield from table(
            ["recipe", *(title for title, _ in columns)],
            [[f"`{row['recipe']}`", *(row[column] for _, column in columns)] for row in some],
        )
        if floor := [row["noise_floor"] for row in some if row["noise_floor"]]:
            yield f"\nNoise floor: KL {floor[0]} of transformers' own cache."


def needles(rows: list[Row]) -> Iterator[str]:
    yield from haystacks(rows, "Needles", lambda row: float(row["score"]))


def calls(rows: list[Row]) -> Iterator[str]:
    for what in ("valid", "exact"):
        yield from haystacks(rows, f"Tool calls, {what}", lambda row, what=what: float(row[what] == "True"))


def haystacks(rows: list[Row], title: str, score: Callable[[Row], float]) -> Iterator[str]:
    """A table per model and length: each text, all texts, and the difference to 16 bits."""
    for model, length in groups(rows, "model", "length"):
        some = [row for row in rows if (row["model"], row["length"]) == (model, length)]
        texts = [text for (text,) in groups(some, "text")]
        measured = {recipe: means(some, recipe, score) for (recipe,) in groups(some, "recipe")}
        lines = []
        for recipe, found in measured.items():
            cells = [points(interval({key: one for key, one in found.items() if key[0] == text})) for text in texts]
            against = "" if recipe == REFERENCE or REFERENCE not in measured else signed(found, measured[REFERENCE])
            lines.append([f"`{recipe}`", *cells, *([points(interval(found))] if len(texts) > 1 else []), against])
        count = len(next(iter(measured.values())))
        yield f"### {title}: {model}, {int(length):,} tokens, {count} haystacks\n"
        yield from table(["recipe", *texts, *([ALL] if len(texts) > 1 else []), f"against `{REFERENCE}`"], lines)
        yield ""


def means(rows: list[Row], recipe: str, score: Callable[[Row], float]) -> dict:
    """The mean score of each haystack of a recipe."""
    return by_haystack(
        ((row["text"], row.get("depth"), row["trial"]), score(row)) for row in rows if row["recipe"] == recipe
    )


def points(found: Interval) -> str:
    return f"{100 * found.mean:.1f} % ({100 * found.low:.0f} to {100 * found.high:.0f})"


def signed(found: dict, reference: dict) -> str:
    if found.keys() != reference.keys():
        return "other haystacks"
    less = difference(found, reference)
    return f"{100 * less.mean:+.1f} ({100 * less.low:+.1f} to {100 * less.high:+.1f})"


def gsm8k(rows: list[Row]) -> Iterator[str]:
    for (model,) in groups(rows, "model"):
        some = [row for row in rows if row["model"] == model]
        yield f"### GSM8K: {model}, {some[0]['problems']} problems\n"
        lines = [
            [f"`{r['recipe']}`", f"{100 * float(r['exact_match']):.1f} % ± {100 * float(r['standard_error']):.1f}"]
            for r in some
        ]
        yield from table(["recipe", "exact match ± standard error"], lines)
        yield ""


def groups(rows: list[Row], *columns: str) -> list[tuple[str, ...]]:
    """The values that occur together in these columns, in the order of the rows."""
    return list(dict.fromkeys(tuple(row[column] for column in columns) for row in rows))


def table(columns: list[str], lines: list[list[str]]) -> Iterator[str]:
    for line in (columns, ["---"] * len(columns), *lines):
        yield f"| {' | '.join(line)} |"


TABLES = {"quality.csv": quality, "needle.csv": needles, "tool-calls.csv": calls, "gsm8k.csv": gsm8k}

if __name__ == "__main__":
    main()
