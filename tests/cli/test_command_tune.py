"""`kvfold tune`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import LAYERS, plain, run
from typer.testing import CliRunner

import kvfold
from kvfold.calibration import capture
from kvfold.cli import app
from kvfold.fitted import Fitted
from kvfold.geometry import Geometry
from kvfold.models import load_config
from kvfold.recipes import TUNED
from kvfold.tune import curves

TOKENS = ("--tokens", 128)


@pytest.fixture(scope="module")
def tuned(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the artifact of the small model at 4 bits, and with what the command wrote beside it."""
    folder = tmp_path_factory.mktemp("tuned")
    given = ("--bits", 4, "--context", 2048, "--json", folder / "rows.json")
    (folder / "shown.txt").write_text(run("tune", small, "--out", folder / "fits", *given, *TOKENS).stdout)
    return folder


def allocated(small: Path, folder: Path, context: int) -> int:
    """Bytes of a sequence with the tuned recipe."""
    geometry = Geometry.from_config(load_config(str(small)))
    return Fitted.of(TUNED, geometry, kvfold.Artifact.load(folder)).sequence_bytes(context)


def test_tune_by_bits(small: Path, tuned: Path):
    assert sorted(path.name for path in (tuned / "fits").iterdir()) == ["kvfold.json", "tensors.safetensors"]
    shown = plain((tuned / "shown.txt").read_text())
    assert max(map(len, shown.splitlines()[:8])) <= 80
    assert f"kvfold serve {small} --recipe fold --artifact {tuned / 'fits'}" in shown
    rows = json.loads((tuned / "rows.json").read_text())
    assert [row["recipe"] for row in rows] == ["fold2", "fold3", "fold4", *["fold"] * 10]
    (chosen,) = [row for row in rows if row["chosen"]]
    assert chosen["bits"] <= 4 < max(row["bits"] for row in rows)
    assert chosen["sequence_bytes"] == allocated(small, tuned / "fits", 2048)
    curve = [row["bits"] for row in rows if row["recipe"] == "fold"][:-1]
    assert curve == sorted(curve)
    assert all(row["kl"] > 0 and row["copy_kl"] > 0 for row in rows)


def test_a_tuned_artifact_is_inspected_evaluated_and_generates(small: Path, tuned: Path):
    rows = json.loads(run("inspect", tuned / "fits", "--json", "-").stdout)
    (chosen,) = [row for row in json.loads((tuned / "rows.json").read_text()) if row["chosen"]]
    layers = [row for row in rows if row["recipe"] == "fold"]
    assert len(layers) == LAYERS
    for row, quarters in zip(layers, chosen["value widths"], strict=True):
        widths = quarters[1:3]  # heads of 16 dims have halves alone
        assert row["value bits"] == sum(widths) / 2 + 8 * len(set(widths)) / 16
    shown = run("eval", small, "-r", "fold:block=8", "--artifact", tuned / "fits", "--tokens", 64).stdout
    assert "fold:block=8" in plain(shown)
    run("generate", small, "-r", "fold", "--artifact", tuned / "fits", "-p", "Hello", "--max-tokens", 2)


def test_tune_by_memory_or_quality_from_an_artifact(small: Path, tuned: Path, tmp_path: Path):
    """Memory of 4 requests; then a KL that the largest widths keep, and twice of that."""
    budget = 4 * allocated(small, tuned / "fits", 4096) + 2**20
    given = (small, "--artifact", tuned / "fits", *TOKENS)
    run("tune", *given, "--out", tmp_path / "a", "--memory", f"{budget}B", "--context", 4096, "--requests", 4)
    assert 4 * allocated(small, tmp_path / "a", 4096) <= budget
    rows = json.loads(run("tune", *given, "--out", tmp_path / "b", "--quality", 1, "--json", "-").stdout)
    least = next(row for row in rows if row["recipe"] == "fold")
    assert rows[-1]["sequence_bytes"] == least["sequence_bytes"], "any KL will do"
    middle = rows[6]["kl"]
    rows = json.loads(run("tune", *given, "--out", tmp_path / "c", "--quality", middle, "--json", "-").stdout)
    assert rows[-1]["kl"] <= middle
    assert rows[-1]["sequence_bytes"] <= rows[6]["sequence_bytes"]


def test_what_cannot_be_tuned(error_of: Callable[..., str], small: Path, means: Path, tuned: Path, tmp_path: Path):
    out = ("--out", tmp_path / "new")
    assert "one of --bits, --memory and --quality" in error_of("tune", "nobody/nothing", *out)
    assert "one of --bits, --memory and --quality" in error_of("tune", small, *out, "--bits", 3, "--memory", "1GiB")
    line = error_of("tune", small, *out, "--bits", 1.2)
    assert "--bits 1.2 is too little: 1 × 131,072 tokens take 2.5" in line
    line = error_of("tune", small, *out, "--memory", "1MiB", "--requests", 8)
    assert "--memory 1MiB is too little: 8 × 131,072 tokens take 0." in line
    line = error_of("tune", small, *out, "--bits", 3, "--artifact", means)
    assert "was not calibrated for fold2, it holds means alone: run `kvfold calibrate MODEL --recipe fold2" in line
    line = error_of("tune", small, "--out", means, "--bits", 5, "--artifact", tuned / "fits")
    assert "holds another artifact" in line
    line = error_of("tune", small, *out, "--quality", 0, "--artifact", tuned / "fits", *TOKENS)
    assert "--quality 0: the least KL is " in line
    left = [path.name for path in (tmp_path / "new").iterdir()]
    assert left == ["unfinished.jsonl"], "what was measured serves another --quality"


@pytest.mark.parametrize(
    ("name", "part", "kept"),
    [("_add_passage", 1, "Nothing is kept"), ("divergence", 6, "unfinished.jsonl keeps"), ("divergence", 18, "keeps")],
    ids=["calibrating", "curves", "points"],
)
def test_an_interrupted_tune_goes_on(small: Path, tuned: Path, tmp_path: Path, monkeypatch, name, part: int, kept: str):
    """Two layers have four options of keys and three of values each, then 13 points are measured."""
    owner = curves._Run if name == "divergence" else capture
    original, calls = getattr(owner, name), []

    def counted(*arguments: object) -> object:
        calls.append(name)
        if len(calls) == part:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(owner, name, counted)
    folder, rows = tmp_path / "fits", tmp_path / "rows.json"
    command = ("tune", small, "--out", folder, "--bits", 4, "--context", 2048, *TOKENS, "--json", rows)
    result = CliRunner().invoke(app, list(map(str, command)))
    assert result.exit_code == 130
    said = plain(result.stderr).strip().splitlines()[-1]
    assert said.startswith("Stopped. ")
    assert kept in said
    assert (folder / "unfinished.jsonl").exists() == (name == "divergence")
    done, part = len(calls) - 1, 0
    run(*command)
    points = {str((row["key widths"], row["value widths"])) for row in json.loads((tuned / "rows.json").read_text())}
    if name == "divergence":
        assert len(calls) - 1 - done == 14 + len(points) - done, "a part that was finished is not measured again"
    assert rows.read_bytes() == (tuned / "rows.json").read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == ["kvfold.json", "tensors.safetensors"]
    for file in folder.iterdir():
        assert file.read_bytes() == (tuned / "fits" / file.name).read_bytes()


def test_what_another_tune_has_kept_is_refused(error_of, small: Path, tuned: Path, tmp_path: Path):
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "unfinished.jsonl").write_text("of the user")
    line = error_of("tune", small, "--out", folder, "--bits", 5, "--artifact", tuned / "fits", *TOKENS)
    assert line.startswith(f"error: {folder / 'unfinished.jsonl'} was kept by a run with another model, text, option")
    assert (folder / "unfinished.jsonl").read_text() == "of the user"
