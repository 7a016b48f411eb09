"""The speeds in sentences of README.md and benchmarks/README.md are those of the rows in benchmarks/results. Tables are
written from the rows: see test_documents.py."""

import csv
import re
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[1]
README, BENCHMARKS = ((ROOT / file).read_text() for file in ("README.md", "benchmarks/README.md"))


def rows(*names: str) -> list[dict[str, str]]:
    found = []
    for name in names:
        with (ROOT / "benchmarks" / "results" / name).open(newline="") as file:
            found += csv.DictReader(file)
    return found


def table(text: str, mark: str) -> list[list[str]]:
    """The cells of the table behind a mark, the header first."""
    lines = text[text.index(mark) :].split("\n\n")[1].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("|-")]


def test_the_picture_of_kernels():
    """It names the last row of every recipe at 32 × 8k."""
    heads = {"head_dim": "128", "q_heads": "32", "kv_heads": "8"}
    shape = {"op": "decode", "batch": "32", "context": "8192", "page": "64", **heads}
    here = {row["recipe"]: row for row in rows("kernels-h200.csv") if row.items() >= shape.items()}
    assert here
    picture = (ROOT / "docs" / "bandwidth.svg").read_text()
    for recipe, row in here.items():
        assert f"<!-- {recipe} -->" in picture
        assert f" µs, {float(row['speedup']):.1f}× -->" in picture


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


def test_servers_under_load():
    """README.md names the range of two caches, for prompts longer than 256 tokens."""
    gains = []
    for engine in ("vllm", "sglang"):
        header, *body = table(BENCHMARKS, f"<!-- table: serving-{engine} -->")
        shown = [header.index(name) for name in ("`saw-int4`", "`oscar-int2`")]
        cells = [row[i] for row in body if not row[0].startswith("256,") for i in shown]
        gains += [cell.partition("(")[2].removesuffix("×)") for cell in cells if cell]
    least, most = min(gains, key=float), max(gains, key=float)
    assert f"gives {least} to {most} times as many tokens per second" in README


def test_a_mixed_load():
    """The two servers that ran for as long, one after the other."""
    speeds = {row["recipe"]: float(row["system_tps"]) for row in rows("soak-h200.csv") if float(row["seconds"]) < 80}
    stated = f"{speeds['fold4'] / speeds['bf16']:.2f}"
    assert f"`fold4` gives {stated} times the tokens per second of 16 bits" in README
    assert f"{stated}× with `fold4` ([a mixed load]" in BENCHMARKS
