"""The speeds in README.md and benchmarks/README.md are those of the rows in benchmarks/results."""

import csv
import re
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[1]
README, BENCHMARKS = ((ROOT / file).read_text() for file in ("README.md", "benchmarks/README.md"))
CASES = {"32 × 8k": ("32", "8192"), "32 × 16k": ("32", "16384"), "1 × 128k": ("1", "131072"), "1 × 32k": ("1", "32768")}
NO_WINDOWS = "sink=0,recent=0"
FOLDS = "fold4", "fold3", "fold2"
RECIPES = {  # as the table of kernels calls them
    "`saw-int4`": "saw-int4",
    "`oscar-int2`, group 128, no windows": f"oscar-int2:{NO_WINDOWS},group=128",
    "`gtq-k3v3`, no windows": "gtq-k3v3:sink=0",
    **{f"`{name}`, no windows": f"{name}:{NO_WINDOWS}" for name in FOLDS},
    **{f"`{name}` with its windows": name for name in FOLDS},
}
CACHES = {  # of servers and of SGLang, as the tables call them
    "16 bits": ("bf16", "fp16", "auto"),
    "FP8": ("fp8", "fp8_e4m3"),
    "`oscar-int2`": ("oscar-int2:group=128",),
}
CLAIMED = "`saw-int4`", "`oscar-int2`"  # what README.md names with a range


def names(cache: str) -> tuple[str, ...]:
    """What rows call a cache of a table."""
    return CACHES.get(cache, (cache.strip("`"),))


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


@pytest.mark.parametrize("file", ["README.md", "docs/which-recipe.md"])
@pytest.mark.parametrize("name", FOLDS)
def test_decode_kernels_of_our_recipes(kernels, name: str, file: str):
    header, *body = table((ROOT / file).read_text(), "|  | recipe | bits per number")
    (cell,) = (row[header.index("decode kernel in 0.3, 32 × 8k")] for row in body if row[1] == f"`{name}`")
    assert cell == f"{kernels[name, *CASES['32 × 8k']]:.1f} times"


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


def speed_and_ratio(cell: str) -> tuple[float, float]:
    """Of a cell such as `4,437 (1.93×)`."""
    speed, ratio = re.findall(r"[\d.]+", cell.replace(",", ""))
    return float(speed), float(ratio)


def test_decoding_in_sglang():
    """Every number is the last row over the last row of the 16-bit cache above it, which is of the same run."""
    header, *body = table(BENCHMARKS, "| tokens per second | 32 × 8k")
    some = {"8 × 256": ("8", "256"), "1 × 8k": ("1", "8192"), "1 × 16k": ("1", "16384"), "1 × 100k": ("1", "100000")}
    cases = {"32 × 8k": ("32", "8192"), "32 × 16k": ("32", "16384"), **some}
    assert header[1:] == list(cases)
    checked = 0
    for cache, *cells in body:
        for cell, case in zip(cells, cases.values(), strict=True):
            expected, sixteen_bits = None, 0.0
            for row in rows("sglang-decode-h200.csv"):
                if (row["model"], row["batch"], row["input"]) == ("Qwen3-8B", *case):
                    if row["recipe"] == "auto":
                        sixteen_bits = float(row["decode_tps"])
                    if row["recipe"] in names(cache):
                        expected = float(row["decode_tps"]), float(row["decode_tps"]) / sixteen_bits
            if expected is None:
                assert not cell, (cache, case)
                continue
            speed, ratio = speed_and_ratio(cell)
            assert speed == pytest.approx(expected[0], abs=0.501), (cache, case)
            assert ratio == pytest.approx(expected[1], abs=0.00501), (cache, case)
            checked += 1
    assert checked >= 13


def test_first_tokens_in_sglang():
    """Medians of the runs of 2026-11-18, as parts of the time with 16 bits."""
    said = re.search(r"First tokens of one prompt.*?\n", BENCHMARKS)
    assert said
    runs = [row for row in rows("sglang-decode-h200.csv") if (row["batch"], row["date"]) == ("1", "2026-11-18")]
    stated = re.findall(r"([\d.]+) and ([\d.]+) of FA3's time with `([\w-]+)`", said[0])
    assert len(stated) == 2
    for *shares, recipe in stated:
        for tokens, share in zip(("8192", "16384"), shares, strict=True):
            own, dense = (
                median([float(row["prefill_tps"]) for row in runs if (row["recipe"], row["input"]) == (name, tokens)])
                for name in (recipe, "auto")
            )
            assert float(share) == pytest.approx(dense / own, abs=0.00501), (recipe, tokens)


def test_first_tokens_in_vllm():
    """Medians, as parts of the time with 16 bits."""
    stated = re.search(r"In vLLM 0.32.0 they come at ([\d.]+) and ([\d.]+) of its time with `([\w-]+)`", BENCHMARKS)
    assert stated
    for tokens, share in (("8192", stated[1]), ("16384", stated[2])):
        own, dense = (
            median(
                float(row["ttft_p50"])
                for row in rows("first-token-vllm-h200.csv")
                if (row["recipe"], row["input"]) == (recipe, tokens)
            )
            for recipe in (stated[3], "bf16")
        )
        assert float(share) == pytest.approx(own / dense, abs=0.00501), tokens


def test_prompts_over_cudnn():
    """Where FlashAttention 3 reads unpacked prompts."""
    said = re.search(r"Where FA3 reads and cuDNN is the baseline.*?\n", BENCHMARKS)
    assert said
    measured = {(row["recipe"], row["new"]): float(row["of_cudnn"]) for row in rows("prompt-readers-h200.csv")}
    stated = re.findall(r"`([\w-]+)`[a-z ]*?([\d.]+)×[^×]*?([\d.]+)×", said[0])
    assert [recipe for recipe, *_ in stated] == ["saw-int4", "fold4"]
    for recipe, first, later in stated:
        assert float(first) == pytest.approx(measured[recipe, "8192"], abs=0.00501)
        assert float(later) == pytest.approx(measured[recipe, "512"], abs=0.00501)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_serving(engine: str):
    """Every number is that of the last rows with the same engine and load. README.md names the range of some."""
    start = {"vllm": "Stock vLLM", "sglang": "Stock SGLang 0.5.17, FA3 for"}[engine]
    header, *body = table(BENCHMARKS[BENCHMARKS.index(f"\n{start}") :], "| tokens in, users")
    measured = [row for row in rows("serving-h200.csv") if (row["model"], row["prefix_hit"]) == ("Qwen3-8B", "0")]
    claimed = []
    for load, dense, *cells in body:
        where = (engine, *load.replace(",", "").split())
        here = [row for row in measured if (row["engine"], row["input"], row["concurrency"]) == where]
        sixteen_bits = [float(row["system_tps"]) for row in here if row["recipe"] in names("16 bits")][-1]
        assert float(dense.replace(",", "")) == pytest.approx(sixteen_bits, abs=0.501)
        for cache, cell in zip(header[2:], cells, strict=True):
            ours = [float(row["system_tps"]) for row in here if row["recipe"] in names(cache)]
            assert bool(ours) == bool(cell), (load, cache)
            if not cell:
                continue
            speed, ratio = speed_and_ratio(cell)
            assert speed == pytest.approx(ours[-1], abs=0.501), (load, cache)
            assert ratio == pytest.approx(ours[-1] / sixteen_bits, abs=0.00501), (load, cache)
            if cache in CLAIMED and where[1] != "256":
                claimed.append(ratio)
    least, most = re.findall(r"gives ([\d.]+) to ([\d.]+) times as many tokens per second", README)[0]
    assert float(least) <= min(claimed)
    assert max(claimed) <= float(most)
    assert {"vllm": min(claimed) == float(least), "sglang": max(claimed) == float(most)}[engine]


def test_a_mixed_load():
    """The two servers that ran for as long, one after the other."""
    speeds = {row["recipe"]: float(row["system_tps"]) for row in rows("soak-h200.csv") if float(row["seconds"]) < 80}
    stated = f"{speeds['fold4'] / speeds['bf16']:.2f}"
    assert f"`fold4` gives {stated} times the tokens per second of 16 bits" in README
    assert f"{stated}× with `fold4` ([a mixed load]" in BENCHMARKS
