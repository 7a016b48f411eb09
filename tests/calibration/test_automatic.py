"""Calibration where no artifact is given: one policy, wherever it is asked for."""

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from tiny_models import tiny
from typer.testing import CliRunner

from kvfold.artifact import Artifact
from kvfold.calibration.automatic import TOKENS, calibrate_automatically, joined, kept, tokens_on
from kvfold.cli import app
from kvfold.engines.transformers import _calibrate_once
from kvfold.models import load_model
from kvfold.recipes import parse

RECIPE = "oscar-int2"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny(vocab_size=len(tokenizer), max_position_embeddings=4096).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVFOLD_CACHE", str(tmp_path / "cache"))


class Reached(Exception):
    """Where the artifact that was found is known."""


def of_serve(model: Path, monkeypatch: pytest.MonkeyPatch) -> Artifact:
    served: list[str] = []
    server = SimpleNamespace(serve=lambda folder, name, config, flags: served.append(config.artifact))
    monkeypatch.setitem(sys.modules, "kvfold.engines.vllm.serve_vllm", server)
    CliRunner().invoke(app, ["serve", str(model), "-r", RECIPE], catch_exceptions=False)
    return Artifact.load(served[0])


def of_command(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Artifact:
    """Of a command that evaluates."""

    def evaluate(*_, artifact: Artifact, **__) -> None:
        raise Reached(artifact)

    monkeypatch.setattr("kvfold.evaluate.run.evaluate", evaluate)
    with pytest.raises(Reached) as reached:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    return reached.value.args[0]


def test_every_command_and_python_find_the_same(model, monkeypatch):
    network, tokenizer = load_model(str(model))
    monkeypatch.setattr("kvfold.cli.command_demo.DEMO_RECIPES", ("int4", RECIPE))
    monkeypatch.setattr("kvfold.cli.command_demo.EMBEDDED", str(model))
    monkeypatch.setattr("kvfold.cli.inputs.loads_at_once", lambda name: True)
    monkeypatch.setattr("kvfold.cli.inputs.load_model", lambda name: (network, tokenizer))
    found = {
        "cache": _calibrate_once(network, parse(RECIPE)),
        "serve": of_serve(model, monkeypatch),
        "eval": of_command(["eval", str(model), "-r", RECIPE, "-r", "saw-int4", "--tokens", "64"], monkeypatch),
        "demo": of_command(["demo", "--tokens", "1024"], monkeypatch),
    }
    for name, artifact in found.items():
        assert artifact.metadata == found["cache"].metadata, name
        assert artifact.tensors.keys() == found["cache"].tensors.keys(), name
        for tensor, numbers in artifact.tensors.items():
            assert torch.equal(numbers, found["cache"].tensors[tensor]), (name, tensor)
    assert (artifact.metadata.calibration.tokens, artifact.metadata.calibration.context) == (
        TOKENS["cpu"],
        TOKENS["cpu"],
    )


def test_passages_are_no_longer_than_the_model_takes(tmp_path):
    tokenizer = byte_tokenizer()
    network = tiny(vocab_size=len(tokenizer), max_position_embeddings=512)
    made = calibrate_automatically(network, tokenizer, []).metadata.calibration
    assert (made.tokens, made.context) == (TOKENS["cpu"], 512)


def test_what_a_server_needs_is_kept_for_the_same_weights(model, tmp_path):
    runs: list[str] = []

    def run(loaded, recipes):
        runs.append(str(recipes[0]))
        return calibrate_automatically(*loaded, recipes)

    def folder(name: Path, recipe: str) -> Path:
        (kept_in,) = kept(str(name), [parse(recipe)], load_model, run)
        return kept_in

    first = folder(model, "saw-int4")
    assert sorted(path.name for path in first.iterdir()) == ["kvfold.json", "tensors.safetensors"]
    assert first.parent == tmp_path / "cache" / "artifacts"
    assert list(first.parent.iterdir()) == [first]
    shutil.copytree(model, tmp_path / "copy")
    assert folder(tmp_path / "copy", "int4:block=64") == first, "means are for all recipes"
    assert folder(model, "gtq-k3v3") != first
    assert runs == ["saw-int4", "gtq-k3v3"]
    network, _ = load_model(str(model))
    network.model.layers[0].self_attn.k_proj.weight.data += 1
    network.save_pretrained(tmp_path / "copy")
    assert folder(tmp_path / "copy", "saw-int4") != first
    for path in (tmp_path / "copy").glob("*.safetensors"):
        path.unlink()
    torch.save(network.state_dict(), tmp_path / "copy" / "pytorch_model.bin")  # weights that only transformers reads
    again = folder(tmp_path / "copy", "saw-int4")
    assert folder(tmp_path / "copy", "saw-int4") == again
    assert runs == ["saw-int4", "gtq-k3v3", "saw-int4", "saw-int4"]


def test_what_is_missing_is_calibrated_at_once_and_kept_apart(model):
    runs: list[list[str]] = []

    def run(loaded, recipes):
        runs.append([str(recipe) for recipe in recipes])
        return calibrate_automatically(*loaded, recipes)

    def folders(*names: str) -> list[Path]:
        return kept(str(model), [parse(name) for name in names], load_model, run)

    (alone,) = folders("gtq-k3v3")
    together = folders("oscar-int2", "gtq-k3v3:block=64", "int4", "saw-int4")
    assert runs == [["gtq-k3v3"], ["oscar-int2", "saw-int4"]], "the last recipe that needs means alone names the folder"
    oscar, gtq, *means = together
    assert (gtq, len(set(means)), len({oscar, gtq, *means})) == (alone, 1, 3)
    assert [Artifact.load(one).metadata.recipes for one in (oscar, gtq, means[0])] == [
        ("oscar-int2",),
        ("gtq-k3v3",),
        (),
    ]
    found = joined(together)
    assert found.metadata.recipes == ("oscar-int2", "gtq-k3v3")
    expected = calibrate_automatically(*load_model(str(model)), [parse("oscar-int2"), parse("gtq-k3v3")])
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "MODEL", "-r", RECIPE, "-r", "int4", "--tokens", "256", "--context", "128"],
        ["generate", "MODEL", "-r", RECIPE, "-p", "Hello", "--max-tokens", "1"],
    ],
    ids=lambda words: words[0],
)
def test_commands_calibrate_once(model, words, tmp_path, monkeypatch):
    """They use what another command has kept, and keep what they find."""
    monkeypatch.setattr("kvfold.calibration.automatic.TOKENS", {"cpu": 256})
    words = [str(model) if word == "MODEL" else word for word in words]
    CliRunner().invoke(app, words, catch_exceptions=False)
    kept_now = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.safetensors")}
    assert any(path.parent.name.endswith(f"-{RECIPE}") for path in kept_now)
    monkeypatch.setattr("kvfold.calibration.automatic.calibrate", lambda *_, **__: pytest.fail("calibrated again"))
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    assert kept_now == {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.safetensors")}


def test_a_cache_that_cannot_be_written_is_refused_before_the_work(model, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVFOLD_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("kvfold.calibration.automatic.calibrate", lambda *_, **__: pytest.fail("calibrated"))
    with pytest.raises(OSError, match=rf"^cannot write to the cache folder {tmp_path}/file: .*KVFOLD_CACHE=FOLDER"):
        CliRunner().invoke(app, ["generate", str(model), "-p", "Hello"], catch_exceptions=False)


def test_the_slower_of_two_servers_takes_what_the_faster_has_found(model):
    faster: list[Path] = []

    def run(loaded, recipes):
        made = calibrate_automatically(*loaded, recipes)
        if not faster:
            faster.append(Path())
            (faster[0],) = kept(str(model), [parse("saw-int4")], load_model, run)
        return made

    (folder,) = kept(str(model), [parse("saw-int4")], load_model, run)
    assert faster == [folder]
    assert list(folder.parent.iterdir()) == [folder]


def test_the_documents_state_the_number_of_tokens():
    root = Path(__file__).parents[2]
    for document in (f"docs/{page}.md" for page in ("index", "transformers", "calibrate", "vllm", "sglang")):
        pattern = r"first ([\d,]+) tokens of Python's own documentation \(([\d,]+) on a CPU\)"
        stated = re.findall(pattern, (root / document).read_text())
        assert set(stated) == {(f"{TOKENS['cuda']:,}", f"{TOKENS['cpu']:,}")}, document


def test_other_devices_read_as_much_as_a_cpu():
    assert [tokens_on(device) for device in ("cuda", "cpu", "mps")] == [8192, 2048, 2048]
