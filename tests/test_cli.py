"""The `kvfold` command, as it is typed."""

import csv
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from byte_tokenizer import byte_tokenizer
from rich.text import Text
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny_models import random_tokens, tiny
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

import kvfold
from kvfold.artifact import Artifact, digest_model
from kvfold.cli import app, main
from kvfold.geometry import Geometry
from kvfold.models import EMBEDDED, load_config, load_model
from kvfold.recipes import RECIPES, parse

GIB = 2**30
COMMANDS = (
    "recipes",
    "plan",
    "calibrate",
    "fold",
    "inspect",
    "push",
    "eval",
    "generate",
    "demo",
    "bench decode",
    "bench kernels",
)
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 16  # of the small model
FITTED = ("-r", "oscar-int2:sink=8", "-r", "gtq-k3v3")
BITS = {  # with a 16-bit scale and offset for each head of 128
    "bf16": 16,
    "int8": 8.25,
    "int4": 4.25,
    "int2": 2.25,
    "saw-int4": 4.25,
    "quarot-int2": 2.25,
}


@pytest.fixture(autouse=True)
def _narrow_terminal_without_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that runs in no time: random weights, and a token for each byte."""
    folder = tmp_path_factory.mktemp("small")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "User: {{ messages[0].content }} Answer:"
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2 * KV_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def means(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of the small model."""
    folder = tmp_path_factory.mktemp("artifacts") / "means"
    run("calibrate", small, "--out", folder, "--tokens", 100, "--context", 64)
    return folder


@pytest.fixture(scope="module")
def fits(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of the small model, with what two recipes learned."""
    folder = tmp_path_factory.mktemp("artifacts") / "fits"
    run("calibrate", small, "--out", folder, *FITTED, "--tokens", 200, "--context", 64)
    return folder


def run(*arguments: object) -> Result:
    """The command's result, which must be a success."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def plain(output: str) -> str:
    """Without colours, should the terminal have some."""
    return Text.from_ansi(output).plain


@pytest.fixture
def error_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must fail: nothing on standard output, one line on the error stream, which is returned.

    An empty line may stand before it, where a progress bar was."""

    def fail(*arguments: object) -> str:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["kvfold", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        assert (stop.value.code, captured.out) == (1, "")
        (line,) = filter(str.strip, plain(captured.err).splitlines())
        assert line.startswith("error: ")
        return line

    return fail


# The command itself


def test_version():
    assert run("--version").stdout == f"{kvfold.__version__}\n"


def test_help_names_every_command():
    shown = plain(run("--help").stdout)
    assert all(re.search(rf"\b{command.split()[0]}\b", shown) for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_gives_an_example(command: str):
    assert re.search(rf"Example: kvfold {command}\b", plain(run(*command.split(), "--help").stdout))


def test_what_is_gained_is_said_alike_everywhere():
    """Of 16 bits: 4-bit integers to 2-bit integers with one group and their windows, at head dimension 128."""
    shape = Geometry("any", layers=1, q_heads=1, kv_heads=1, head_dim=128)
    bits = [parse(name).bits_per_element(shape, 131072) for name in ("saw-int4", "oscar-int2:group=128")]
    assert [f"{16 / each:.2g}" for each in bits] == ["3.8", "7"]
    root = Path(__file__).parents[1]
    said = [(root / file).read_text() for file in ("README.md", "pyproject.toml")]
    for text in (*said, kvfold.__doc__, " ".join(plain(run("--help").stdout).split())):
        assert "3.8 to 7 times smaller" in text
        assert "4 to 8 times" not in text


# recipes


@pytest.mark.parametrize(("head_dim", "metadata"), [(128, 0.25), (64, 0.5)])
def test_recipes_as_json(head_dim: int, metadata: float):
    rows = json.loads(run("recipes", "--head-dim", head_dim, "--json", "-").stdout)
    assert [row["recipe"] for row in rows] == list(RECIPES)
    for row in rows:
        assert row["summary"]
        if (bits := BITS.get(row["recipe"])) is None:
            continue
        expected = bits if bits == 16 else int(bits) + metadata
        assert row["bits_per_element_2k"] == row["bits_per_element_128k"] == expected
        assert row["key_slot_bytes"] == row["value_slot_bytes"] == expected * head_dim / 8
        assert row["needs"] == ("nothing" if row["recipe"] == "bf16" else "means")
    learning = {"kmeans-int4", "kmeans-saw-int4", "hessian-int4", "oscar-int2", "gtq-k2v2", "gtq-k3v3", "gtq-k4v4"}
    assert {row["recipe"] for row in rows if row["needs"] == "calibration"} == learning
    options = {row["recipe"]: set(row["options"]) for row in rows}
    assert options["bf16"] == set()
    assert options["int4"] == {"sink", "recent", "centre", "skip", "group"}
    assert options["saw-int4"] == options["int4"] | {"order", "values"}


def test_recipes_as_a_table():
    shown = plain(run("recipes").stdout)
    assert all(name in shown for name in RECIPES), "a name is cut off in a terminal of 80 columns"
    assert all(number in shown for number in ("16", "8.25", "4.25", "2.25", "68 + 68", "36 + 36"))
    assert re.search(r"oscar-int2 .*\bcalibration\b", shown)
    assert re.search(r"saw-int4 .*\bmeans\b", shown)
    assert max(map(len, shown.splitlines())) <= 80
    assert "head dimension 64" in plain(run("recipes", "--head-dim", 64).stdout)


def test_recipes_that_do_not_fit_are_left_out_and_named(config_file):
    """Halves of 36 dims, OSCAR's groups, are no whole bytes; and Block-GTQ takes 8 dims at a time."""
    path = config_file(hidden_size=8 * 36)
    for arguments in (("recipes", "--head-dim", 36), ("plan", path, "--memory", "1GB")):
        rows = json.loads(run(*arguments, "--json", "-").stdout)
        assert [row["recipe"] for row in rows] == [name for name in RECIPES if not name.startswith(("oscar", "gtq"))]
        shown = plain(run(*arguments).stdout)
        assert "oscar-int2 does not fit: group=18: 18 codes of 2 bits do not fill whole bytes\n" in shown
        assert "gtq-k2v2 does not fit: Block-GTQ takes heads of a multiple of 8 dims, not 36\n" in shown
        assert shown.count("does not fit") == 4


def test_recipes_into_a_file_shows_the_table_too(tmp_path: Path):
    shown = run("recipes", "--json", tmp_path / "recipes.json").stdout
    assert "saw-int4" in shown
    assert json.loads((tmp_path / "recipes.json").read_text())[0]["recipe"] == "bf16"


# plan: every example has 8 KV heads of 128, so a token takes 2·8·128 numbers in each layer


@pytest.mark.parametrize(
    ("model", "layers", "context"),
    [("Qwen3-8B", 36, 40960), ("Qwen3-32B", 64, 40960), ("Llama-3.1-8B", 32, 131072), ("GLM-4.7", 92, 202752)],
)
def test_plan_of_every_example(model: str, layers: int, context: int):
    rows = json.loads(run("plan", model, "--memory", "80GiB", "--json", "-").stdout)
    assert [row["recipe"] for row in rows] == list(RECIPES)
    for row in (row for row in rows if row["recipe"] in BITS):
        bits = BITS[row["recipe"]]
        per_token = layers * 2048 * bits / 8
        assert row["bytes_per_token"] == per_token
        assert row["compression"] == pytest.approx(16 / bits)
        assert row["tokens"] == 80 * GIB // per_token
        assert (row["context"], row["requests"]) == (context, 80 * GIB // (per_token * context))


def test_plan_counts_whole_pages():
    """1000 tokens take 63 pages of 16."""
    rows = json.loads(run("plan", "Qwen3-8B", "--memory", "1GiB", "--context", 1000, "--json", "-").stdout)
    request = {row["recipe"]: row["bytes_per_token"] * 1000 for row in rows}
    assert request["int4"] == 36 * 1088 * 1008
    assert [row["requests"] for row in rows] == [GIB // int(request[row["recipe"]]) for row in rows]


def test_plan_as_a_table(tmp_path: Path):
    shown = plain(run("plan", "Qwen3-8B", "--memory", "80GiB", "--json", tmp_path / "plan.json").stdout)
    assert all(name in shown for name in RECIPES)
    for text in ("36 layers", "32 query and 8 KV heads of 128", "39,168", "3.76×", "2,193,100", "53", "40,960"):
        assert text in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert json.loads((tmp_path / "plan.json").read_text())[2]["requests"] == 53


@pytest.mark.parametrize(
    ("memory", "amount"),
    [("80GiB", 80 * GIB), ("512MB", 512e6), ("1.5 gb", 1.5e9), ("2TiB", 2048 * GIB), ("64kib", 65536), ("1e9", 1e9)],
)
def test_memory(memory: str, amount: float):
    (row, *_) = json.loads(run("plan", "Qwen3-8B", "--memory", memory, "--context", 16, "--json", "-").stdout)
    assert row["tokens"] == amount // (36 * 4096)


@pytest.mark.parametrize("memory", ["lots", "80 GiBs", "", "GB", "1.2.3GB", "5 PB"])
def test_memory_that_is_none(error_of, memory: str):
    assert f"{memory!r} is no amount of memory" in error_of("plan", "Qwen3-8B", "--memory", memory)


@pytest.mark.parametrize("memory", ["1e400GiB", "1e400", "9" * 400 + "GB", "1e9TiB"])
def test_memory_that_no_machine_has(error_of, memory: str):
    assert f"'{memory}' is more memory than any machine has" in error_of("plan", "Qwen3-8B", "--memory", memory)


def test_memory_without_a_unit(error_of):
    assert "'40' is less than a megabyte: write a unit" in error_of("plan", "Qwen3-8B", "--memory", 40)


def test_plan_names_its_examples(error_of):
    assert "examples are Qwen3-4B, Qwen3-8B" in error_of("plan", "Qwen3-5B", "--memory", "40GiB")


CONFIG = {
    "architectures": ["SomeForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "hidden_size": 512,
}


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[..., Path]:
    def write(**changes: object) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**CONFIG, **changes}))
        return path

    return write


def test_plan_of_a_configuration_without_weights(config_file, small: Path):
    path = config_file(max_position_embeddings=4096)
    for model in (path, path.parent):
        rows = json.loads(run("plan", model, "--memory", "1GB", "--json", "-").stdout)
        assert [row["bytes_per_token"] for row in rows[:3]] == [10 * 128 * bits / 8 for bits in (16, 8.5, 4.5)]
        assert {row["context"] for row in rows} == {4096}
    (row, *_) = json.loads(run("plan", small, "--memory", "1GB", "--json", "-").stdout)
    assert row["bytes_per_token"] == 2 * LAYERS * KV_HEADS * HEAD_DIM * 2


def test_plan_without_a_longest_context(config_file):
    (row, *_) = json.loads(run("plan", config_file(), "--memory", "1GB", "--json", "-").stdout)
    assert row["context"] == 32768


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_lora_rank": 512}, "multi-head latent attention (MLA)"),
        ({"sliding_window": 4096}, "sliding attention in layers 0, 1, 2, 3, 4, 5, 6, 7, 8, 9"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 5}, "sliding attention in layers 1, 3, 5, 7, 9"),
        ({"attn_logit_softcapping": 50.0}, "soft-capping"),
        ({"model_type": "gpt_oss"}, "learned sink logits"),
    ],
)
def test_plan_refuses_what_cannot_be_packed(error_of, config_file, changes: dict, reason: str):
    line = error_of("plan", config_file(**changes), "--memory", "1GB")
    assert line.startswith("error: SomeForCausalLM: ")
    assert reason in line


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": -4}, "num_hidden_layers is -4"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000, which is beyond any model"),
        ({"head_dim": 2**40}, "head_dim is 1099511627776, which is beyond any model"),
        ({"head_dim": 64.5}, "head_dim is 64.5"),
        ({"num_attention_heads": -8}, "num_attention_heads is -8"),
        ({"num_attention_heads": "eight"}, "num_attention_heads is 'eight'"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"layer_types": "full"}, "layer_types is 'full'"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries, and num_hidden_layers is 10"),
    ],
)
def test_plan_names_the_field_that_no_model_can_have(error_of, config_file, changes: dict, field: str):
    line = error_of("plan", config_file(**changes), "--memory", "1GB")
    assert line.startswith(f"error: SomeForCausalLM: {field}")


def test_a_head_dimension_that_no_model_has(error_of):
    assert "head_dim is 1099511627776, which is beyond any model" in error_of("recipes", "--head-dim", 2**40)


def test_a_configuration_that_is_missing(error_of, tmp_path: Path):
    assert f"there is no file {tmp_path}/config.json" in error_of("plan", tmp_path / "config.json", "--memory", "1GB")
    (tmp_path / "notes.txt").touch()
    line = error_of("plan", tmp_path / "notes.txt", "--memory", "1GB")
    assert f"{tmp_path}/notes.txt is neither a config.json nor a .gguf file" in line


def test_a_configuration_that_is_none(error_of, config_file):
    path = config_file()
    path.write_text("{")
    assert "is not JSON" in error_of("plan", path, "--memory", "1GB")


# Mistakes: one line, and before anything takes long


@pytest.mark.parametrize("command", [("eval",), ("generate", "-p", "Hello"), ("bench", "decode")], ids=" ".join)
@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("saw-int5", "unknown recipe 'saw-int5': did you mean 'saw-int4'?"),
        ("int4:order=64", "int4 has no option 'order'; it takes centre, group, recent, sink, skip"),
        ("int4:sink=few", "int4: sink='few'"),
        ("int4:sink", "write options as name=value, not 'sink'"),
        ("tq-k9v9", "tq-k9v9: keys and values take 1 to 8 bits, not 9 and 9"),
        ("gtq-k0v3", "gtq-k0v3: keys and values take 1 to 8 bits, not 0 and 3"),
    ],
)
def test_a_recipe_is_read_before_the_model(error_of, command: tuple[str, ...], recipe: str, message: str):
    """The model does not exist either; that the recipe is what is wrong shows that nobody went looking for it."""
    assert message in error_of(*command, "nobody/nothing", "-r", recipe)


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "--memory", "1GB"),
        ("eval", "-r", "int4"),
        ("generate", "-p", "Hello"),
        ("calibrate", "--out", "means"),
        ("fold", "-r", "oscar-int2", "--out", "folded"),
        ("bench", "decode", "-r", "int4"),
    ],
    ids=lambda command: command[0],
)
def test_an_unknown_model(error_of, command: tuple[str, ...]):
    assert "nobody/nothing is neither 'embedded', a model folder" in error_of(*command, "nobody/nothing")


def test_a_recipe_that_does_not_fit_the_model(error_of, small: Path):
    assert "order=64 does not divide the head dimension 16" in error_of("eval", small, "-r", "saw-int4:order=64")
    assert "int4:skip=2: the model has layers 0 to 1" in error_of("generate", small, "-p", "Hello", "-r", "int4:skip=2")
    line = error_of("eval", small, "-r", "saw-int4", "-r", "oscar-int2:group=1")
    assert line == "error: oscar-int2: group=1: 1 codes of 2 bits do not fill whole bytes"


def test_a_folder_that_is_no_artifact(error_of, tmp_path: Path):
    line = error_of("eval", "nobody/nothing", "-r", "int4", "--artifact", tmp_path)
    assert line == f"error: {tmp_path} is no artifact: there is no kvfold.json in it"


def test_an_artifact_of_another_model(error_of, means: Path):
    line = error_of("generate", EMBEDDED, "-p", "Hello", "--artifact", means)
    assert "the artifact was made for another model: its layers is 2, the model's is 30" in line


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_missing_folder_is_named_before_the_model_is_loaded(error_of, tmp_path: Path, option: str):
    path = tmp_path / "missing" / "report"
    line = error_of("eval", "nobody/nothing", "-r", "int4", option, path)
    assert f"there is no folder {path.parent}" in line


def test_a_text_that_is_missing_empty_or_short(error_of, small: Path, tmp_path: Path):
    text = tmp_path / "text.txt"
    assert f"cannot read the text {text}" in error_of("eval", small, "-r", "int4", "--text", text)
    text.write_text(" \n")
    assert f"{text} is empty" in error_of("calibrate", small, "--out", tmp_path / "means", "--text", text)
    text.write_text("Four words are few.")
    line = error_of("calibrate", small, "--out", tmp_path / "means", "--text", text)
    assert "the text has 19 tokens, fewer than the 8192 asked for" in line
    assert not (tmp_path / "means").exists()


# The small model: what is printed and written


def test_calibrate_writes_an_artifact(means: Path):
    assert sorted(path.name for path in means.iterdir()) == ["kvfold.json", "tensors.safetensors"]
    metadata = json.loads((means / "kvfold.json").read_text())
    assert metadata["schema_version"] == 3
    assert metadata["recipes"] == []
    assert metadata["model"]["model_type"] == "llama"
    assert (metadata["calibration"]["tokens"], metadata["calibration"]["context"]) == (100, 64)
    tensors = load_file(means / "tensors.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "key_mean": (LAYERS, KV_HEADS, HEAD_DIM),
        "value_mean": (LAYERS, KV_HEADS, HEAD_DIM),
        "text": (3,),  # hashes of the whole blocks of 32 among 100 tokens
    }


def test_calibrate_fits_recipes(small: Path, fits: Path, tmp_path: Path):
    """Windows are not fitted, so they are not in the name."""
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


def test_calibrate_draws_windows_with_a_seed(small: Path, tmp_path: Path):
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
    assert "the text has 100 tokens, too few for 2 windows of 64" in line
    assert not folder.exists()


@pytest.mark.parametrize("name", ["unfinished.safetensors", "tensors.safetensors", "kvfold.json"])
def test_calibrate_says_that_the_disk_is_full(error_of, small: Path, tmp_path: Path, name: str, monkeypatch):
    write = Path.write_bytes

    def onto_a_full_disk(path: Path, content: bytes) -> int:
        if path.name.startswith(name):
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
    monkeypatch.setattr("kvfold.cli.load_model", None)
    (tmp_path / "file").write_text("mine")
    line = error_of("calibrate", small, "--out", tmp_path / "file")
    assert line == f"error: cannot write {tmp_path / 'file'}: it is a file, not a folder"
    assert (tmp_path / "file").read_text() == "mine"


def test_calibrate_interrupted_early_leaves_no_folder(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(model: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvfold.cli.load_model", interrupt)
    result = CliRunner().invoke(app, ["calibrate", str(small), "--out", str(tmp_path / "new" / "fits")])
    assert result.exit_code == 130
    assert plain(result.stderr).strip() == "Stopped. Nothing is kept: the run had not come to its first checkpoint."
    assert not any(tmp_path.iterdir())


STUCK = """
import signal, time
from kvfold.calibration import capture
from kvfold.cli import main

def stuck(*arguments, add=capture._add_window, windows=[]):
    windows.append(None)
    if len(windows) == 2:
        time.sleep(600)
    add(*arguments)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
capture._add_window = stuck
capture.capture.__wrapped__.__kwdefaults__["checkpoint_seconds"] = 0
main()
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=lambda how: how.name)
def test_calibrate_goes_on_after_it_was_broken_off(error_of, small: Path, fits: Path, tmp_path: Path, how):
    """In a process of its own, which saves a checkpoint after the first of its four windows and is stuck then."""
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
    windows: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        from kvfold.calibration import capture

        add = capture._add_window
        patched.setattr(capture, "_add_window", lambda *arguments: (windows.append(arguments[-1]), add(*arguments)))
        run(*command)
    assert windows == [64, 128, 192], "where the windows begin that were left"
    assert sorted(path.name for path in folder.iterdir()) == ["kvfold.json", "tensors.safetensors"]
    assert (folder / "tensors.safetensors").read_bytes() == (fits / "tensors.safetensors").read_bytes()


def test_calibrate_again_gives_the_same_artifact(small: Path, means: Path, tmp_path: Path):
    shown = run("calibrate", small, "--out", tmp_path / "again", "--tokens", 100, "--context", 64).stdout
    assert " ".join(shown.split()) == f"Wrote {tmp_path / 'again'}: means"
    for name in ("kvfold.json", "tensors.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (means / name).read_bytes()


# fold

BIASED = {"Llama": {"attention_bias": True}, "Qwen2": {}}


@pytest.fixture(scope="module", params=BIASED)
def folded(request: pytest.FixtureRequest, small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model (plain), an artifact of it (fits), and what `kvfold fold` makes of them (folded)."""
    folder = tmp_path_factory.mktemp(request.param)
    shutil.copytree(small, folder / "plain")
    tiny(request.param, vocab_size=257, **BIASED[request.param]).save_pretrained(folder / "plain")
    run("calibrate", folder / "plain", "--out", folder / "fits", *FITTED, "--tokens", 200, "--context", 64)
    fold = ("fold", folder / "plain", "-r", "oscar-int2:sink=8", "--artifact", folder / "fits")
    result = run(*fold, "--out", folder / "folded")
    *_, command = result.stdout.splitlines()
    assert command == f"kvfold serve {folder / 'folded'} --recipe oscar-int2:sink=8"
    return folder


@torch.no_grad()
def logits(folder: Path, recipe: str | None = None, artifact: Path | None = None) -> torch.Tensor:
    model, _ = load_model(str(folder), dtype="float32", device="cpu")
    packed = recipe and kvfold.cache(model, recipe, Artifact.load(artifact))
    return model(random_tokens(96).unsqueeze(0), past_key_values=packed, use_cache=bool(packed)).logits


def test_fold_writes_a_model_that_computes_the_same(folded: Path):
    before, after = logits(folded / "plain"), logits(folded / "folded")
    assert (before - after).abs().max() < 1e-5 * before.abs().max()
    names = {path.name for path in (folded / "folded").iterdir()}
    assert names == {path.name for path in (folded / "plain").iterdir()} | {"kvfold"}
    assert sorted(path.name for path in (folded / "folded" / "kvfold").iterdir()) == [
        "kvfold.json",
        "tensors.safetensors",
    ]
    assert load_config(str(folded / "folded")) == load_config(str(folded / "plain"))


def test_a_folded_model_packs_as_it_did(folded: Path):
    recipe = "oscar-int2:sink=4,recent=20"
    exact, before = logits(folded / "plain"), logits(folded / "plain", recipe, folded / "fits")
    after = logits(folded / "folded", recipe, folded / "folded" / "kvfold")
    assert (before - exact).norm() > 0.01 * exact.norm(), "nothing was quantized"
    assert (after - before).norm() < 0.2 * (before - exact).norm()


def test_a_folded_model_and_its_artifact_belong_together(error_of, folded: Path):
    for model, artifact in (("folded", folded / "fits"), ("plain", folded / "folded" / "kvfold")):
        config, weights = load_config(str(folded / model)), digest_model(str(folded / model))
        with pytest.raises(ValueError, match=r"another model: its weights are others.*folding makes another model"):
            Artifact.load(artifact).metadata.model.check_files(config, weights)
        line = error_of("generate", folded / model, "-p", "Hello", "--artifact", artifact)
        assert "folding makes another model, with an artifact of its own" in line
    fits = Artifact.load(folded / "folded" / "kvfold")
    fits.metadata.model.check_files(load_config(str(folded / "folded")), digest_model(str(folded / "folded")))


def test_a_folded_model_carries_its_artifact(folded: Path, monkeypatch: pytest.MonkeyPatch):
    model = folded / "folded"
    rows = json.loads(run("eval", model, "--tokens", 1000, "--context", 500, "--json", "-").stdout)
    assert [row["recipe"] for row in rows] == ["bf16", "oscar-int2"]
    run("generate", model, "-p", "Hello", "--max-tokens", 2)
    served: list[tuple] = []
    server = SimpleNamespace(serve=lambda *arguments: served.append(arguments))
    monkeypatch.setitem(sys.modules, "kvfold.engines.vllm.serve_vllm", server)
    run("serve", model, "-r", "oscar-int2")
    run("serve", model, "-r", "oscar-int2", "--artifact", folded / "fits")
    run("serve", model, "-r", "saw-int4")  # wants means alone
    carried = str(model / "kvfold")
    assert [config.artifact for _, _, config, _ in served] == [carried, str(folded / "fits"), carried]
    run("generate", model, "-r", "hessian-int4", "-p", "Hello", "--max-tokens", 2)  # learns what is not there


def test_fold_calibrates_where_there_is_no_artifact_and_keeps_the_dtype(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KVFOLD_CACHE", str(tmp_path / "cache"))
    shutil.copytree(small, tmp_path / "half")
    LlamaForCausalLM.from_pretrained(small).half().save_pretrained(tmp_path / "half")
    run("fold", tmp_path / "half", "-r", "oscar-int2", "--out", tmp_path / "folded")
    (artifact,) = (tmp_path / "cache" / "artifacts").iterdir()
    assert artifact.name.endswith("-oscar-int2")
    assert load_config(str(tmp_path / "folded"))["dtype"] == "float16"
    weights = load_file(tmp_path / "folded" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    fits = Artifact.load(tmp_path / "folded" / "kvfold")
    fits.metadata.model.check_files(load_config(str(tmp_path / "folded")), digest_model(str(tmp_path / "folded")))


def test_fold_refuses_before_it_writes(error_of, small: Path, fits: Path, tmp_path: Path):
    out = ("--artifact", fits, "--out", tmp_path / "out")
    assert "saw-int4 learns no rotation of values" in error_of("fold", small, "-r", "saw-int4", *out)
    line = error_of("fold", small, "-r", "oscar-int2:per_head=true", *out)
    assert "oscar-int2:per_head=true has no rotation of values in the artifact" in line
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    config = {**load_config(str(small)), "quantization_config": {"quant_method": "fp8"}}
    (quantized / "config.json").write_text(json.dumps(config))
    assert "cannot be folded into quantized weights" in error_of("fold", quantized, "-r", "oscar-int2", *out)
    fused = tmp_path / "fused"
    shutil.copytree(small, fused)
    tiny("Phi3", vocab_size=257).save_pretrained(fused)
    run("calibrate", fused, "--out", tmp_path / "of-fused", "-r", "oscar-int2", "--tokens", 100, "--context", 64)
    line = error_of("fold", fused, "-r", "oscar-int2", "--artifact", tmp_path / "of-fused", "--out", tmp_path / "out")
    assert "Phi3ForCausalLM: values cannot be folded, its layers have no plain v_proj and o_proj" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fused", "of-fused", "quantized"]


def test_fold_says_that_the_disk_is_full(error_of, small: Path, fits: Path, tmp_path: Path, monkeypatch):
    def save_pretrained(_, folder: Path) -> None:
        folder.mkdir()
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", save_pretrained)
    line = error_of("fold", small, "-r", "oscar-int2", "--artifact", fits, "--out", tmp_path / "folded")
    assert line == "error: No space left on device"
    assert not any(tmp_path.iterdir())


def test_fold_into_a_folder_that_is_not_empty(error_of, folded: Path, fits: Path, small: Path, tmp_path: Path):
    fold = ("fold", small, "-r", "oscar-int2", "--artifact", fits, "--out")
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    for there in (fits, fits / "kvfold.json", tmp_path / "link"):
        assert f"cannot write {there}: it is there already, and no plain, empty folder" in error_of(*fold, there)
    (tmp_path / "link").unlink()
    assert f"there is no folder {tmp_path / 'missing'}" in error_of(*fold, tmp_path / "missing" / "out")
    line = error_of("fold", folded / "folded", "-r", "oscar-int2", "--out", tmp_path)
    assert "oscar-int2 has no rotation of values in the artifact" in line, "it was folded already"
    assert not any(tmp_path.iterdir())
    run(*fold, tmp_path)
    assert (tmp_path / "kvfold" / "kvfold.json").exists()


# inspect and push


def test_inspect_as_tables(fits: Path):
    shown = plain(run("inspect", fits).stdout)
    for text in (
        "llama: 2 layers, 4 query and 2 KV heads of 16",
        "RoPE on 16 of them (half)",
        "calibrated on 200 tokens in windows of 64",
        f"kvfold {kvfold.__version__}",
    ):
        assert text in " ".join(shown.split())
    assert "seed" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown, "a column is cut off"
    clip = float(load_file(fits / "tensors.safetensors")["oscar-int2/key_clip"][1])
    assert re.search(rf"^ +1 +16×2 +{clip:.4g} +\d+% +16×2 +[\d.]+ +\d+% *$", shown, re.MULTILINE)
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


def test_inspect_draws(error_of, fits: Path, means: Path, tmp_path: Path):
    run("inspect", fits, "--png", tmp_path / "fits.png")
    assert (tmp_path / "fits.png").read_bytes().startswith(b"\x89PNG")
    assert "nothing to draw" in error_of("inspect", means, "--png", tmp_path / "means.png")
    assert not (tmp_path / "means.png").exists()


def test_inspect_means_alone_or_nothing(error_of, means: Path, tmp_path: Path):
    shown = plain(run("inspect", means).stdout)
    assert "calibrated on 100 tokens in windows of 64" in " ".join(shown.split())
    assert json.loads(run("inspect", means, "--json", "-").stdout) == []
    assert "is no artifact" in error_of("inspect", tmp_path)


def test_inspect_says_where_windows_were_drawn(small: Path, tmp_path: Path):
    run("calibrate", small, "--out", tmp_path, "--tokens", 100, "--context", 64, "--seed", 5)
    assert "drawn with seed 5" in " ".join(plain(run("inspect", tmp_path).stdout).split())


def test_push(error_of, fits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple] = []

    class Hub:
        def create_repo(self, hub_id: str, private: bool, exist_ok: bool) -> None:
            calls.append(("create", hub_id, private))

        def upload_folder(self, repo_id: str, folder_path: Path, allow_patterns: list[str]) -> str:
            calls.append(("upload", repo_id, folder_path, sorted(allow_patterns)))
            return f"https://hub/{repo_id}"

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    assert run("push", fits, "me/fits").stdout == "https://hub/me/fits\n"
    upload = ("upload", "me/fits", fits, ["kvfold.json", "tensors.safetensors"])
    assert calls == [("create", "me/fits", False), upload]
    calls.clear()
    run("push", fits, "me/fits", "--private")
    assert calls == [("create", "me/fits", True), upload]
    calls.clear()
    assert "is no artifact" in error_of("push", tmp_path, "me/fits")
    assert calls == []


# eval, generate and bench of the small model


def test_eval_refuses_text_that_was_calibrated_on(error_of, small: Path, tmp_path: Path):
    text, other = tmp_path / "text.txt", tmp_path / "other.txt"
    text.write_text("".join(f"{number} squared is {number**2}. " for number in range(300)))
    other.write_text("".join(f"{number} cubed gives {number**3}. " for number in range(300)))
    run("calibrate", small, "--out", tmp_path / "means", "--text", text, "--tokens", 640, "--context", 64)
    arguments = ("eval", small, "-r", "int4", "--artifact", tmp_path / "means", "--tokens", 1000, "--context", 500)
    line = error_of(*arguments, "--text", text)
    assert "640 of the 1,000 evaluation tokens were calibrated on" in line
    assert "evaluate on another text, or calibrate on another" in line
    assert "int4" in run(*arguments, "--text", other).stdout


def test_eval_with_an_artifact_that_lacks_the_recipe(error_of, small: Path, means: Path, fits: Path):
    """Options that are fitted are part of what it must hold; windows are not."""
    sizes = ("--tokens", 1000, "--context", 500)
    line = error_of("eval", small, "-r", "oscar-int2", "--artifact", means, *sizes)
    assert "was not calibrated for oscar-int2, it holds means alone" in line
    assert "run `kvfold calibrate MODEL --recipe oscar-int2 --out DIR`" in line
    line = error_of("eval", small, "-r", "oscar-int2:recent=0,per_head=true", "--artifact", fits, *sizes)
    assert "was not calibrated for oscar-int2:per_head=true, it holds oscar-int2, gtq-k3v3" in line
    line = error_of("generate", small, "-r", "gtq-k2v2", "-p", "Hello", "--artifact", means)
    assert "--recipe gtq-k2v2 --out DIR" in line


def test_eval_looks_into_layers(small: Path, fits: Path, tmp_path: Path):
    names = ["bf16", "oscar-int2:sink=0,recent=0", "int2"]
    recipes = ("-r", names[1], "-r", names[2])
    sizes = ("--tokens", 1000, "--context", 500, "--artifact", fits)
    files = ("--json", tmp_path / "rows.json", "--csv", tmp_path / "rows.csv")
    shown = plain(run("eval", small, *recipes, *sizes, *files, "--layers").stdout)
    assert all(column in shown for column in ("attention", "top-10", "logit"))
    assert max(map(len, shown.splitlines())) <= 80
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["recipe"] for row in rows] == names
    for row in rows:
        assert [layer["layer"] for layer in row["layers"]] == list(range(LAYERS))
        for layer in row["layers"]:
            assert set(layer) == {"layer", "softmax_kl", "top10", "logit_mae"}
            assert 0 <= layer["top10"] <= 1
    assert all(a["logit_mae"] < b["logit_mae"] for a, b in zip(rows[0]["layers"], rows[2]["layers"], strict=True))
    with (tmp_path / "rows.csv").open() as file:
        assert "layers" not in next(csv.reader(file))
    without = json.loads(run("eval", small, "-r", "int2", *sizes, "--json", "-").stdout)
    assert {row["layers"] for row in without} == {None}


def test_eval_json_leaves_nothing_else_on_the_terminal(small: Path, means: Path):
    """And a recipe that is named twice is one row."""
    recipes = ("-r", "int8", "-r", "int2:recent=16", "-r", "int8")
    result = run("eval", small, *recipes, "--tokens", 2048, "--context", 1000, "--artifact", means, "--json", "-")
    assert [row["recipe"] for row in json.loads(result.stdout)] == ["bf16", "int8", "int2:recent=16"]


def test_generate_answers_or_continues(small: Path):
    """Random weights say nothing sensible, but they do read the chat template or leave it out."""
    arguments = ("generate", small, "-r", "int4:centre=false", "-p", "Hello", "--max-tokens", 4)
    for more, prompt in (((), "User: Hello Answer:"), (("--raw",), "Hello")):
        first, second = run(*arguments, *more), run(*arguments, *more)
        assert first.stdout == second.stdout
        assert int(plain(first.stderr).split()[0]) == len(prompt) + 3  # nobody has read the last token yet


def test_bench_decode(small: Path, means: Path, tmp_path: Path):
    arguments = ("bench", "decode", small, "-r", "int4", "-r", "int2:sink=4", "--artifact", means)
    sizes = ("--context", 100, "--batch", 2, "--steps", 2)
    result = run(*arguments, *sizes, "--json", tmp_path / "rows.json", "--csv", tmp_path / "rows.csv")
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["recipe"] for row in rows] == ["transformers", "int4", "int2:sink=4"]
    assert all(row["recipe"] in plain(result.stdout) for row in rows)
    assert all(row["tokens_per_s"] > 0 and row["context"] == 100 and row["batch"] == 2 for row in rows)
    assert rows[0]["ratio"] == 1
    head_tokens = LAYERS * KV_HEADS * 2  # of two sequences
    assert rows[1]["cache_bytes"] == head_tokens * 7 * 16 * 2 * (HEAD_DIM // 2 + 4)  # 102 tokens are 7 pages of 16
    with (tmp_path / "rows.csv").open() as file:
        assert [row["recipe"] for row in csv.DictReader(file)] == [row["recipe"] for row in rows]


# The embedded model: a real one


@pytest.fixture(scope="module")
def embedded_means(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts") / "embedded"
    run("calibrate", EMBEDDED, "--out", folder, "--tokens", 512, "--context", 512)
    return folder


def test_generate_streams_sensible_text(embedded_means: Path):
    prompt = ("--raw", "--prompt", "The capital of France is", "--max-tokens", 8)
    result = run("generate", EMBEDDED, *prompt, "-r", "saw-int4:sink=4", "--artifact", embedded_means)
    assert "Paris" in result.stdout
    found = re.fullmatch(
        r"(\d+) tokens in (\d+) KiB of cache \((\d+) in 16 bits\), [\d.]+ s", plain(result.stderr).strip()
    )
    assert found
    tokens, packed, wide = map(int, found.groups())
    assert tokens == 12  # five of the prompt and eight new ones, the last of which nobody has read yet
    page = 30 * 3 * 2 * 16  # numbers and metadata of one page of all layers
    assert wide * 1024 == page * 64 * 2
    assert packed == round((page * (32 + 4) + page * 64 * 2) / 1024)  # a packed page, and its shadow for the sink


def test_eval_compares_recipes(embedded_means: Path, tmp_path: Path):
    names = ["bf16", "saw-int4:sink=4"]
    sizes = ("--tokens", 512, "--context", 256)
    files = ("--json", tmp_path / "report.json", "--html", tmp_path / "report.html")
    result = run("eval", EMBEDDED, "-r", names[1], "-r", names[0], *sizes, *files, "--artifact", embedded_means)
    rows = json.loads((tmp_path / "report.json").read_text())
    assert {(row["model"], row["text"], row["context"]) for row in rows} == {("embedded", "Python documentation", 256)}
    assert [row["recipe"] for row in rows] == names
    needed = {"recipe", "bits_per_element_2k", "bits_per_element_128k", "perplexity", "kl", "top1", "tokens"}
    assert all(needed <= row.keys() for row in rows)
    assert [row["bits_per_element_2k"] for row in rows] == [16, 4.625]  # the sink takes one page of 16 in 16 bits
    assert [row["bits_per_element_128k"] for row in rows] == [16, 4.501953125]
    assert {row["tokens"] for row in rows} == {2 * 255}  # the last token of a window has no follower in it
    reference, packed = rows
    assert (reference["kl"], reference["top1"]) == (0, 1)
    assert reference["noise_floor"] < packed["kl"] < 0.1
    assert 0.8 < packed["top1"] < 1
    assert reference["perplexity"] == pytest.approx(reference["plain_perplexity"], rel=0.01)
    assert packed["perplexity"] == pytest.approx(reference["perplexity"], rel=0.1)
    assert all(0 <= row[share] <= 1 for row in rows for share in ("copy", "needle"))
    assert all(list(row["needle_by_depth"]) == ["10%", "30%", "50%", "70%", "90%"] for row in rows)
    shown, page = plain(result.stdout), (tmp_path / "report.html").read_text()
    assert max(map(len, shown.splitlines())) <= 80
    assert "<svg" in page
    assert all(name.split(":")[0] in text for name in names for text in (shown, page))


def test_recipes_come_from_the_artifact_where_none_is_named():
    from kvfold.cli import _panel

    artifact = SimpleNamespace(metadata=SimpleNamespace(recipes=("oscar-int2:group=64", "gtq-k3v3")))
    means = SimpleNamespace(metadata=SimpleNamespace(recipes=()))
    assert [str(recipe) for recipe in _panel(None, artifact)] == ["oscar-int2:group=64", "gtq-k3v3"]
    assert [str(recipe) for recipe in _panel(["int4"], artifact)] == ["int4"]
    assert [str(recipe) for recipe in _panel(None, means, "saw-int4")] == ["saw-int4"]
    with pytest.raises(ValueError, match="name a recipe with --recipe"):
        _panel(None, means)
