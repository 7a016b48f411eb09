"""`kvfold inspect`."""

import json
import re
from pathlib import Path

import pytest
from commands import LAYERS, plain, run
from safetensors.torch import load_file

import kvfold


def test_inspect_as_tables(fits: Path):
    shown = plain(run("inspect", fits).stdout)
    for text in (
        "llama: 2 layers, 4 query and 2 KV heads of 16",
        "RoPE on 16 of them (half)",
        "calibrated on 200 tokens in passages of 64",
        f"kvfold {kvfold.__version__}",
    ):
        assert text in " ".join(shown.split())
    assert "seed" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown, "a column is cut off"
    clip = float(load_file(fits / "tensors.safetensors")["oscar-int2/key_clip"][1])
    assert re.search(rf"^ +1 +16×2 +{clip:.4g} +16×2 +[\d.]+ *$", shown, re.MULTILINE)
    oscar, gtq = shown.index("oscar-int2"), shown.index("gtq-k3v3")
    assert oscar < shown.index("16×2") < gtq
    assert shown.index("16×3") > gtq, "the values of gtq-k3v3"


def test_inspect_as_json(fits: Path, tmp_path: Path):
    rows = json.loads(run("inspect", fits, "--json", "-").stdout)
    names = [(row["recipe"], row["layer"]) for row in rows]
    assert names == [(name, layer) for name in ("oscar-int2", "gtq-k3v3") for layer in range(LAYERS)]
    tensors = load_file(fits / "tensors.safetensors")
    for row in rows[:LAYERS]:
        assert row["key dims×bits"] == row["value dims×bits"] == "16×2"
        assert row["key clip"] == pytest.approx(float(tensors["oscar-int2/key_clip"][row["layer"]]), abs=1e-4)
    assert "oscar-int2" in run("inspect", fits, "--json", tmp_path / "rows.json").stdout
    assert json.loads((tmp_path / "rows.json").read_text()) == rows


def test_inspect_means_alone_or_nothing(error_of, means: Path, tmp_path: Path):
    shown = plain(run("inspect", means).stdout)
    assert "calibrated on 100 tokens in passages of 64" in " ".join(shown.split())
    assert json.loads(run("inspect", means, "--json", "-").stdout) == []
    assert "is no artifact" in error_of("inspect", tmp_path)


def test_inspect_says_where_passages_were_drawn(small: Path, tmp_path: Path):
    run("calibrate", small, "--out", tmp_path, "--tokens", 100, "--context", 64, "--seed", 5)
    assert "drawn with seed 5" in " ".join(plain(run("inspect", tmp_path).stdout).split())
