"""The speeds in README.md and benchmarks/README.md are those of the rows in benchmarks/results."""

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README, BENCHMARKS = ((ROOT / file).read_text() for file in ("README.md", "benchmarks/README.md"))
CASES = {"32 × 8k": ("32", "8192"), "32 × 16k": ("32", "16384"), "1 × 128k": ("1", "131072"), "1 × 32k": ("1", "32768")}
NO_WINDOWS = "sink=0,recent=0"
FOLDS = "fold4", "fold3", "fold2"
RECIPES = {  # as the table of kernels calls them
    "`saw-int4`": "saw-int4",
    "`oscar-int2`, group 128, no windows": f"oscar-int2:{NO_WINDOWS},group=128",
    "`oscar-int2`, group 64, no windows": f"oscar-int2:{NO_WINDOWS}",
    "`gtq-k3v3`": "gtq-k3v3:sink=0",
    **{f"`{name}`, no windows": f"{name}:{NO_WINDOWS}" for name in FOLDS},
    **{f"`{name}` with its windows": name for name in FOLDS},
}
CACHES = {  # of servers and of SGLang, as the tables call them
    "FP8": ("fp8", "fp8_e4m3"),
    "FP8 cache, FA3": ("fp8_e4m3",),
    "`saw-int4`": ("saw-int4",),
    "`fold2`": ("fold2",),
    "`oscar-int2`": ("oscar-int2:group=128",),
    "`oscar-int2`, one group, with its 16-bit windows": ("oscar-int2:group=128",),
}
SIXTEEN_BITS = "bf16", "fp16"


def rows(*names: str) -> list[dict[str, str]]:
    found = []
    for name in names:
        with (ROOT / "benchmarks" / "results" / name).open(newline="") as file:
            found += csv.DictReader(file)
    return found


def table(text: str, start: str) -> list[list[str]]:
    """The cells of the table whose header begins with `start`, the header first."""
    lines = text[text.index(f"\n{start}") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("|-")]


def number(cell: str) -> float:
    found = re.search(r"\d+\.\d+", cell)
    assert found, cell
    return float(found[0])


@pytest.fixture(scope="module")
def kernels() -> dict[tuple[str, str, str], float]:
    """By recipe, batch and context: the speed-up of the last decode row with the heads of Qwen3-8B."""
    shape = {"op": "decode", "page": "64", "head_dim": "128", "q_heads": "32", "kv_heads": "8"}
    measured = [row for row in rows("kernels-h200.csv") if row.items() >= shape.items()]
    return {(row["recipe"], row["batch"], row["context"]): float(row["speedup"]) for row in measured}


@pytest.mark.parametrize("name", FOLDS)
def test_decode_kernels_of_our_recipes(kernels, name: str):
    """Once with windows and without at 32 × 8k, and once as a range over 32 × 8k and 32 × 16k."""
    header, *body = table(README, "| | recipe | bits per number")
    (cell,) = (row[header.index("decode kernel, 32 × 8k")] for row in body if row[1] == f"`{name}`")
    short, long = (kernels[f"{name}:{NO_WINDOWS}", *CASES[case]] for case in ("32 × 8k", "32 × 16k"))
    assert cell == f"{kernels[name, *CASES['32 × 8k']]:.1f} times ({short:.1f} without windows)"
    assert f"{short:.1f} to {long:.1f} times with `{name}`" in README


def test_the_table_of_kernels(kernels):
    header, *body = table(BENCHMARKS, "| decode | 32 × 8k")
    for name, *cells in body:
        for case, cell in zip(header[1:], cells, strict=True):
            if cell:
                expected = kernels[RECIPES[name], *CASES[case]]
                assert number(cell) == pytest.approx(expected, abs=0.00501), (name, case)


def test_the_picture_of_kernels(kernels):
    picture = (ROOT / "docs" / "bandwidth.svg").read_text()
    here = {recipe: speed for (recipe, *case), speed in kernels.items() if tuple(case) == CASES["32 × 8k"]}
    assert here
    for recipe, speed in here.items():
        assert f"<!-- {recipe} -->" in picture
        assert f" µs, {speed:.1f}× -->" in picture


def test_decoding_in_sglang():
    """Every number is the last row over the last row of the 16-bit cache above it, which is of the same run."""
    header, *body = table(README, "| | tokens that fit")
    speedups: dict[tuple[str, str], float] = {}
    sixteen_bits: dict[str, float] = {}
    for row in rows("sglang-decode-h200.csv"):
        if (row["model"], row["batch"]) == ("Qwen3-8B", "32"):
            tokens, speed = row["input"], float(row["decode_tps"])
            if row["recipe"] == "auto":
                sixteen_bits[tokens] = speed
            speedups[row["recipe"], tokens] = speed / sixteen_bits[tokens]
    checked = 0
    for name, *_, short, long in body:
        for cell, tokens in ((short, "8192"), (long, "16384")):
            if name in CACHES and cell != "not measured":
                assert number(cell) == pytest.approx(speedups[CACHES[name][-1], tokens], abs=0.00501), (name, tokens)
                checked += 1
    assert header[-2:] == ["decoding in SGLang, 32 × 8k", "32 × 16k"]
    assert checked == 7


def test_serving():
    """Every number is that of two rows with the same engine and load; the first paragraphs name the range."""
    header, *body = table(README, "| tokens in, users | vLLM: FP8")
    measured = [row for row in rows("serving-h200.csv") if (row["model"], row["prefix_hit"]) == ("Qwen3-8B", "0")]
    packed = []
    for load, *cells in body:
        tokens, users = load.replace(",", "").split()
        for place, cell in enumerate(cells):
            if not cell:
                continue
            engine = "vllm" if place < 3 else "sglang"
            cache = header[1 + place].removeprefix("vLLM: ").removeprefix("SGLang: ")
            here = [
                row for row in measured if (row["engine"], row["input"], row["concurrency"]) == (engine, tokens, users)
            ]
            ours, others = (
                [float(row["system_tps"]) for row in here if row["recipe"] in names]
                for names in (CACHES[cache], SIXTEEN_BITS)
            )
            assert number(cell) in {round(a / b, 2) for a in ours for b in others}, (load, engine, cache)
            if cache != "FP8":
                packed.append(number(cell))
    assert f"gives {min(packed)} to {max(packed)} times as many tokens per second" in README
