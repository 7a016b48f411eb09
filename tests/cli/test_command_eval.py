"""`kvfold eval` and `kvfold generate`."""

import csv
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import LAYERS, plain, run
from typer.testing import CliRunner

from kvfold.cli import app
from kvfold.cli.inputs import choose_recipes
from kvfold.models import EMBEDDED

PASSAGE = "kvfold.evaluate.logits._compare"  # measures one


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
    """Options that are fitted are part of what it must hold; the open block is not."""
    sizes = ("--tokens", 1000, "--context", 500)
    line = error_of("eval", small, "-r", "oscar-int2", "--artifact", means, *sizes)
    assert "was not calibrated for oscar-int2, it holds means alone" in line
    assert "run `kvfold calibrate MODEL --recipe oscar-int2 --out DIR`" in line
    line = error_of("eval", small, "-r", "oscar-int2:block=0,per_head=true", "--artifact", fits, *sizes)
    assert "was not calibrated for oscar-int2:per_head=true, it holds oscar-int2, gtq-k3v3" in line
    line = error_of("generate", small, "-r", "gtq-k2v2", "-p", "Hello", "--artifact", means)
    assert "--recipe gtq-k2v2 --out DIR" in line


def test_eval_looks_into_layers(small: Path, fits: Path, tmp_path: Path):
    names = ["bf16", "oscar-int2:block=0", "int2"]
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
    assert {row["kl_beyond_16k"] for row in without} == {None}


def test_eval_measures_needles_and_tool_calls_in_haystacks(error_of, small: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("kvfold.evaluate.tool_calls.MOST_TOKENS", 2)
    texts = [tmp_path / "one.txt", tmp_path / "other.txt"]
    texts[0].write_text("".join(f"{number} squared is {number**2}. " for number in range(300)))
    texts[1].write_text("".join(f"{number} cubed gives {number**3}. " for number in range(300)))
    sizes = ("--tokens", 600, "--context", 300, "--needle", 1500, "--tool-calls", 3000, "--trials", 1)
    files = ("--json", tmp_path / "rows.json", "--csv", tmp_path / "rows.csv")
    arguments = ("eval", small, "-r", "int4:centre=false", *sizes, "--haystack", texts[0])
    shown = plain(run(*arguments, "--haystack", texts[1], *files).stdout)
    assert all(words in shown for words in ("needles", "valid calls", "exact calls", "95 %", "against bf16"))
    assert max(map(len, shown.splitlines())) <= 80
    rows = json.loads((tmp_path / "rows.json").read_text())
    for row in rows:
        haystacks = {(cell["text"], cell["depth"], cell["trial"]) for cell in row["suite"]}
        assert haystacks == {(text.name, depth / 4, 0) for text in texts for depth in range(5)}
        assert {(call["text"], call["length"]) for call in row["tool_calls"]} == {(text.name, 3000) for text in texts}
        assert 0 <= row["needles_1500_low"] <= row["needles_1500"] <= row["needles_1500_high"] <= 1
    with (tmp_path / "rows.csv").open() as file:
        in_file = list(csv.DictReader(file))
    assert [row["recipe"] for row in in_file] == ["bf16", "int4:centre=false"]
    for name in ("kl_tail", "kl_beyond_16k", "needles_1500_difference_low", "exact_calls_3000_high"):
        assert name in in_file[0]
    assert "haystacks of 100000 tokens do not work" in error_of(*arguments, "--tool-calls", 100_000)


def test_eval_json_leaves_nothing_else_on_the_terminal(small: Path, means: Path):
    """And a recipe that is named twice is one row."""
    recipes = ("-r", "int8", "-r", "int2:block=16", "-r", "int8")
    result = run("eval", small, *recipes, "--tokens", 2048, "--context", 1000, "--artifact", means, "--json", "-")
    assert [row["recipe"] for row in json.loads(result.stdout)] == ["bf16", "int8", "int2:block=16"]


def test_generate_answers_or_continues(small: Path):
    """Random weights say nothing sensible, but they do read the chat template or leave it out."""
    arguments = ("generate", small, "-r", "int4:centre=false", "-p", "Hello", "--max-tokens", 4)
    for more, prompt in (((), "User: Hello Answer:"), (("--raw",), "Hello")):
        first, second = run(*arguments, *more), run(*arguments, *more)
        assert first.stdout == second.stdout
        assert int(plain(first.stderr).split()[0]) == len(prompt) + 3  # nobody has read the last token yet


def test_generate_says_why_a_short_cache_is_larger(small: Path):
    """20 tokens are two pages of 16. Beside the open block of 20 tokens, a ring has room for 64 that may be taken back,
    and in a server for 16. A number takes 6 bits (codes of 4, and 32 bits for 16 numbers) or 16."""
    arguments = ("generate", small, "--raw", "--max-tokens", 1)
    short = plain(run(*arguments, "-r", "int4:block=20,centre=false", "-p", "a" * 20).stderr)
    one_line = " ".join(short.split())
    smaller = 32768 * 16 / (32768 * 6 + (20 + 16) * 16)
    assert "20 tokens in 24 KiB of cache (8 in 16 bits)" in one_line
    assert (
        f"the open block keeps them in 16 bits too, and pages are whole. 32,768 tokens take {smaller:.1f} times less"
        in one_line
    )
    without = plain(run(*arguments, "-r", "int4:centre=false", "-p", "a" * 20).stderr)
    assert "open block" not in without


# The embedded model: a real one


@pytest.fixture(scope="module")
def embedded_means(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts") / "embedded"
    run("calibrate", EMBEDDED, "--out", folder, "--tokens", 512, "--context", 512)
    return folder


def test_generate_streams_sensible_text(embedded_means: Path):
    prompt = ("--raw", "--prompt", "The capital of France is", "--max-tokens", 8)
    result = run("generate", EMBEDDED, *prompt, "-r", "saw-int4:block=4", "--artifact", embedded_means)
    assert "Paris" in result.stdout
    line, *others = plain(result.stderr).strip().splitlines()
    assert " ".join(others).startswith("So few tokens take more than in 16 bits")
    found = re.fullmatch(r"(\d+) tokens in ([\d,]+) KiB of cache \((\d+) in 16 bits\), [\d.]+ s", line)
    assert found
    tokens, packed, wide = (int(number.replace(",", "")) for number in found.groups())
    assert tokens == 12  # five of the prompt and eight new ones, the last of which nobody has read yet
    page = 30 * 3 * 2 * 16  # numbers and metadata of one page of all layers
    assert wide * 1024 == page * 64 * 2
    # a packed page, and a ring of 4 tokens and of 64 that may be taken back
    assert packed == round((page * (32 + 4) + 30 * 3 * 2 * (4 + 64) * 64 * 2) / 1024)


def test_eval_compares_recipes(embedded_means: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvfold.evaluate.answers.READ", 16)
    monkeypatch.setattr("kvfold.evaluate.answers.SAID", 4)
    names = ["bf16", "saw-int4:block=64"]
    sizes = ("--tokens", 512, "--context", 256)
    files = ("--json", tmp_path / "report.json", "--html", tmp_path / "report.html")
    result = run("eval", EMBEDDED, "-r", names[1], "-r", names[0], *sizes, *files, "--artifact", embedded_means)
    rows = json.loads((tmp_path / "report.json").read_text())
    assert {(row["model"], row["text"], row["context"]) for row in rows} == {("embedded", "Python documentation", 256)}
    assert [row["recipe"] for row in rows] == names
    needed = {"recipe", "bits_per_element_2k", "bits_per_element_128k", "perplexity", "kl", "top1", "tokens"}
    assert all(needed <= row.keys() for row in rows)
    assert [row["bits_per_element_2k"] for row in rows] == [16, 4.5 + 16 * 80 / 2048]  # a ring of 64 + 16 tokens
    assert [row["bits_per_element_128k"] for row in rows] == [16, 4.5 + 16 * 80 / 131072]
    assert {row["tokens"] for row in rows} == {2 * 255}  # the last token of a passage has no follower in it
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
    assert f"kvfold serve embedded -r {names[1]} --artifact {embedded_means}" in page
    assert page.count("<blockquote>") == 2
    assert all(row["answer"] and row["kl_99"] <= row["kl_tail"] for row in rows)
    assert packed["layer_bits"] == [{"layer": layer, "keys": 4.5, "values": 4.5} for layer in range(30)]
    assert all(name.split(":")[0] in text for name in names for text in (shown, page))


def test_recipes_come_from_the_artifact_where_none_is_named():
    artifact = SimpleNamespace(metadata=SimpleNamespace(recipes=("oscar-int2:group=64", "gtq-k3v3")))
    means = SimpleNamespace(metadata=SimpleNamespace(recipes=()))
    assert [str(recipe) for recipe in choose_recipes(None, artifact)] == ["oscar-int2:group=64", "gtq-k3v3"]
    assert [str(recipe) for recipe in choose_recipes(["int4"], artifact)] == ["int4"]
    assert [str(recipe) for recipe in choose_recipes(None, means, "saw-int4")] == ["saw-int4"]
    with pytest.raises(ValueError, match="name a recipe with --recipe"):
        choose_recipes(None, means)


# Interrupted


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch, means: Path, tmp_path: Path) -> tuple[object, ...]:
    """Options of an evaluation in three passages, with a cache folder of its own."""
    monkeypatch.setenv("KVFOLD_CACHE", str(tmp_path / "cache"))
    return ("-r", "int4", "--artifact", means, "--tokens", 300, "--context", 100)


def calls_of(monkeypatch: pytest.MonkeyPatch, function: str, interrupted: int = 0) -> list[str]:
    """A list that gets the calls of a function. One of them, if its number is given, is interrupted by Ctrl-C."""
    module, _, name = function.rpartition(".")
    original, calls = getattr(sys.modules[module], name), []

    def counted(*arguments: object) -> object:
        calls.append(name)
        if len(calls) == interrupted:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(function, counted)
    return calls


def test_an_interrupted_eval_goes_on(error_of, small, sizes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """First in the last passage, then where the second cache looks for needles."""
    unfinished = tmp_path / "cache" / "unfinished"
    arguments = ("eval", small, *sizes, "--json", tmp_path / "rows.json")
    run(*arguments)
    assert not any(unfinished.iterdir()), "nothing is left of a run that was not interrupted"
    whole = (tmp_path / "rows.json").read_bytes()
    passages = calls_of(monkeypatch, PASSAGE)
    for function, number, counted in ((PASSAGE, 3, 2), ("kvfold.evaluate.run.needle_accuracy", 2, 1)):
        with monkeypatch.context() as patched:
            calls_of(patched, function, number)
            result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == 130
        (file,) = unfinished.iterdir()
        said = plain(result.stderr).strip().splitlines()[-1]
        assert said == f"Stopped. {file} keeps what is finished: the same command goes on from there."
        assert len(passages) == counted, "a passage that was finished is not read again"
        passages.clear()
    kept = file.read_bytes()
    file.write_bytes(kept.replace(b"logits", b"logitz", 1))
    assert error_of(*arguments) == f"error: {file} is damaged; delete it to begin anew"
    file.write_bytes(kept)
    run(*arguments, "--tokens", 299)
    assert len(passages) == 3, "another run reads everything"
    passages.clear()
    run(*arguments)
    assert passages == []
    assert (tmp_path / "rows.json").read_bytes() == whole
    assert not file.exists()


def test_a_cache_folder_that_cannot_be_written_only_costs_the_checkpoint(small, sizes, tmp_path: Path):
    (tmp_path / "cache").write_text("a file")
    result = run("eval", small, *sizes, "--json", "-")
    assert len(json.loads(result.stdout)) == 2
    assert plain(result.stderr).strip().startswith("An interrupted run will begin anew: ")


def test_a_failure_at_the_end_costs_nothing(error_of, small, sizes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = {name: tmp_path / f"report.{name}" for name in ("json", "csv", "html")}
    options = [part for name, file in files.items() for part in (f"--{name}", file)]

    def fail(*_: object) -> None:
        raise OSError("the printer is on fire")

    with monkeypatch.context() as patched:
        patched.setattr("kvfold.evaluate.page.write_html", fail)
        assert error_of("eval", small, *sizes, *options) == "error: the printer is on fire"
    with files["csv"].open() as file:
        assert [row["recipe"] for row in csv.DictReader(file)] == ["bf16", "int4"]
    assert [row["recipe"] for row in json.loads(files["json"].read_text())] == ["bf16", "int4"]
    passages = calls_of(monkeypatch, PASSAGE)
    run("eval", small, *sizes, *options)
    assert files["html"].exists()
    assert passages == []
