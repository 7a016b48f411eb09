"""The tables that benchmarks/summary.py prints, from rows with known means."""

import runpy
import sys
from pathlib import Path

import pytest

from kvfold.files import append_rows

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "summary.py"


def summary(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["summary.py", str(folder)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return capsys.readouterr().out


def test_tables_have_each_text_all_texts_and_the_difference(tmp_path: Path, monkeypatch, capsys):
    for recipe, found in (("bf16", 1.0), ("int4", 0.5), ("cut-short", 0.5)):
        for text in ("novel", "code"):
            for trial in range(2 if recipe == "cut-short" else 3):
                where = {"recipe": recipe, "model": "small", "text": text, "length": 4096, "trial": trial}
                scores = [{**where, "depth": 0.5, "task": task, "score": found * task} for task in (0, 1)]
                append_rows(tmp_path / "needle.csv", scores)
                calls = [{**where, "call": call, "valid": True, "exact": call < 4 * found} for call in range(4)]
                append_rows(tmp_path / "tool-calls.csv", calls)
    row = {"recipe": "int4", "problems": 400, "exact_match": 0.36, "standard_error": 0.024, "model": "small"}
    append_rows(tmp_path / "gsm8k.csv", [row])
    printed = summary(tmp_path, monkeypatch, capsys)
    assert "### Needles: small, 4,096 tokens, 6 haystacks\n" in printed
    assert "| recipe | novel | code | all texts | against `bf16` |\n" in printed
    assert "| `bf16` | 50.0 % (50 to 50) | 50.0 % (50 to 50) | 50.0 % (50 to 50) |  |\n" in printed
    assert "| 25.0 % (25 to 25) | 25.0 % (25 to 25) | -25.0 (-25.0 to -25.0) |\n" in printed
    assert "| 25.0 % (25 to 25) | 25.0 % (25 to 25) | other haystacks |\n" in printed
    valid, exact = printed[printed.index("Tool calls, valid") :].split("Tool calls, exact")
    assert "| 100.0 % (100 to 100) | 100.0 % (100 to 100) | +0.0 (+0.0 to +0.0) |\n" in valid
    assert "| 50.0 % (50 to 50) | 50.0 % (50 to 50) | -50.0 (-50.0 to -50.0) |\n" in exact
    assert "| `int4` | 36.0 % ± 2.4 |\n" in printed
