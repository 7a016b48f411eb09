"""`kvfold calibrate`."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import FITTED, HEAD_DIM, KV_HEADS, LAYERS, plain, run
from safetensors.torch import load_file
from typer.testing import CliRunner

from kvfold.cli import app


def test_calibrate_writes_an_artifact(means: Path):
    assert sorted(path.name for path in means.iterdir()) == ["kvfold.json", "tensors.safetensors"]
    metadata = json.loads((means / "kvfold.json").read_text())
    assert metadata["schema_version"] == 6
    assert metadata["recipes"] == []
    assert metadata["model"]["model_type"] == "llama"
    assert (metadata["calibration"]["tokens"], metadata["calibration"]["context"]) == (100, 64)
    tensors = load_file(means / "tensors.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "key_mean": (LAYERS, KV_HEADS, HEAD_DIM),
        "value_mean": (LAYERS, KV_HEADS, HEAD_DIM),
        "key_first": (LAYERS, KV_HEADS, HEAD_DIM),
        "text": (3,),  # hashes of the whole blocks of 32 among 100 tokens
    }


def test_calibrate_fits_recipes(small: Path, fits: Path, tmp_path: Path):
    """The open block is not fitted, so it is not in the name."""
    shown = run(
        "calibrate", small, "--out", tmp_path / "new" / "fits", *FITTED, "--tokens", 200, "--context", 64
    ).stdout
    assert " ".join(shown.split()).endswith("fits: means, oscar-int2, gtq-k3v3")
    for folder in (fits, tmp_path / "new" / "fits"):
        assert sorted(path.name for path in folder.iterdir()) == ["kvfold.json", "tensors.safetensors"]
    metadata = json.loads((fits / "kvfold.json").read_text())
    assert metadata["recipes"] == ["oscar-int2", "gtq-k3v3"]
    assert metadata["calibration"]["seed"] is None
    tensors = load_file(fits / "tensors.safetensors")
    assert {name.split("/")[0] for name in tensors if "/" in name} == {"oscar-int2", "gtq-k3v3"}
    assert tensors["oscar-int2/key_rotation"].shape == (LAYERS, 1, HEAD_DIM, HEAD_DIM)


def test_calibrate_draws_passages_with_a_seed(small: Path, tmp_path: Path):
    hashes = {}
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        run("calibrate", small, "--out", tmp_path / name, "--tokens", 100, "--context", 64, "--seed", seed)
        made = json.loads((tmp_path / name / "kvfold.json").read_text())["calibration"]
        assert (made["seed"], made["tokens"]) == (seed, 100)
        hashes[name] = made["tokens_sha256"]
    assert hashes["first"] == hashes["again"] != hashes["other"]


def test_calibrate_refuses_what_does_not_fit_before_it_begins(error_of, small: Path, tmp_path: Path):
    folder = tmp_path / "fits"
    assert "unknown recipe 'oscar'" in error_of("calibrate", "nobody/nothing", "-r", "oscar", "--out", folder)
    assert "group=5 does not divide the head" in error_of("calibrate", small, "-r", "int4:group=5", "--out", folder)
    text = tmp_path / "text.txt"
    text.write_text("few words " * 10)
    line = error_of("calibrate", small, "--text", text, "--out", folder, "--seed", 1, "--tokens", 99, "--context", 64)
    assert "the text has 100 tokens, too few for 2 passages of 64" in line
    assert not folder.exists()


@pytest.mark.parametrize("name", ["unfinished.safetensors", "tensors.safetensors", "kvfold.json"])
def test_calibrate_says_that_the_disk_is_full(error_of, small: Path, tmp_path: Path, name: str, monkeypatch):
    write = Path.write_bytes

    def onto_a_full_disk(path: Path, content: bytes) -> int:
        if path.name.startswith(f".{name}."):
            path.symlink_to("/dev/full")
        return write(path, content)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", onto_a_full_disk)
        line = error_of("calibrate", small, "--out", tmp_path, "--tokens", 100, "--context", 64)
    assert line == f"error: cannot write {tmp_path}: No space left on device"
    left = [] if name == "unfinished.safetensors" else ["unfinished.safetensors"]  # from which the next run goes on
    assert [path.name for path in tmp_path.iterdir()] == left
    assert f"Wrote {tmp_path}" in "".join(
        run("calibrate", small, "--out", tmp_path, "--tokens", 100, "--context", 64).stdout.splitlines()
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kvfold.json", "tensors.safetensors"]


def test_calibrate_into_a_file_is_refused_before_the_model_is_loaded(error_of, small: Path, tmp_path, monkeypatch):
    monkeypatch.setattr("kvfold.cli.inputs.load_model", None)
    (tmp_path / "file").write_text("mine")
    line = error_of("calibrate", small, "--out", tmp_path / "file")
    assert line == f"error: cannot write {tmp_path / 'file'}: it is a file, not a folder"
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("command", ["calibrate", "tune", "pull", "push"])
def test_no_artifact_is_written_beside_weights(error_of, small: Path, means: Path, tmp_path: Path, command: str):
    """vLLM reads every safetensors file of a model's folder as its weights."""
    model, tensors = tmp_path / "model", tmp_path / "tensors"
    shutil.copytree(small, model)
    tensors.mkdir()
    (tensors / "tensors.safetensors").write_text("of somebody")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    arguments = {
        "calibrate": lambda folder: (small, "--out", folder),
        "tune": lambda folder: (small, "--bits", 5, "--out", folder),
        "pull": lambda folder: (means, "--out", folder),
        "push": lambda folder: (means, folder),
    }[command]
    line = error_of(command, *arguments(model))
    assert line.startswith(f"error: {model} holds a model, ")
    assert line.endswith(f": write to {model / 'kvfold'}")
    line = error_of(command, *arguments(tensors))
    assert f"{tensors / 'tensors.safetensors'} belongs to no artifact: move it away, or write to another" in line
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_calibrate_interrupted_early_leaves_no_folder(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(model: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvfold.cli.inputs.load_model", interrupt)
    result = CliRunner().invoke(app, ["calibrate", str(small), "--out", str(tmp_path / "new" / "fits")])
    assert result.exit_code == 130
    assert plain(result.stderr).strip() == "Stopped. Nothing is kept: the run had not come to its first checkpoint."
    assert not any(tmp_path.iterdir())


STUCK = """
import signal, time
from kvfold.calibration import capture
from kvfold.cli import main

def stuck(*arguments, add=capture._add_passage, passages=[]):
    passages.append(None)
    if len(passages) == 2:
        time.sleep(600)
    add(*arguments)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
capture._add_passage = stuck
capture.capture.__wrapped__.__kwdefaults__["checkpoint_seconds"] = 0
main()
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=lambda how: how.name)
def test_calibrate_goes_on_after_it_was_broken_off(error_of, small: Path, fits: Path, tmp_path: Path, how):
    """In a process of its own, which saves a checkpoint after the first of its four passages and is stuck then."""
    folder = tmp_path / "fits"
    command = ("calibrate", small, "--out", folder, *FITTED, "--tokens", 200, "--context", 64)
    process = subprocess.Popen([sys.executable, "-c", STUCK, *map(str, command)], stderr=subprocess.PIPE, text=True)
    while not (folder / "unfinished.safetensors").exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    line = error_of(*command)
    assert f"cannot write {folder}: it is in use by another kvfold, process {process.pid}: wait for it" in line
    process.send_signal(how)
    _, said = process.communicate()
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    if how == signal.SIGINT:
        assert [path.name for path in folder.iterdir()] == ["unfinished.safetensors"]
        kept = f"{folder}/unfinished.safetensors keeps 64 of 200 tokens: the same command goes on from there."
        assert plain(said).strip() == f"Stopped. {kept}"
    passages: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        from kvfold.calibration import capture

        add = capture._add_passage
        patched.setattr(capture, "_add_passage", lambda *arguments: (passages.append(arguments[4]), add(*arguments)))
        run(*command)
    assert passages == [64, 128, 192], "where the passages begin that were left"
    assert sorted(path.name for path in folder.iterdir()) == ["kvfold.json", "tensors.safetensors"]
    assert (folder / "tensors.safetensors").read_bytes() == (fits / "tensors.safetensors").read_bytes()


def test_calibrate_again_gives_the_same_artifact(small: Path, means: Path, tmp_path: Path):
    shown = run("calibrate", small, "--out", tmp_path / "again", "--tokens", 100, "--context", 64).stdout
    assert " ".join(shown.split()) == f"Wrote {tmp_path / 'again'}: means"
    for name in ("kvfold.json", "tensors.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (means / name).read_bytes()
