"""`kvfold check`, and what inspect and serve make of its result."""

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checked_model import CONTEXT, save_model, text
from commands import plain, run
from typer.testing import CliRunner, Result

import kvfold
from kvfold.artifact import Artifact
from kvfold.cli import app
from kvfold.evaluate.check import CALL_HAYSTACKS
from kvfold.evaluate.limits import MOST_TRIALS, Limits
from kvfold.evaluate.tool_calls import CALLS
from kvfold.models import load_model
from kvfold.recipes import parse
from kvfold.text import tokenize

MEASURES = ["KL", "KL tail", "needles", "valid calls", "exact calls"]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is measured on."""
    file = tmp_path_factory.mktemp("text") / "words.txt"
    file.write_text(text()[:20_000])
    return file


@pytest.fixture(scope="module")
def checked(words: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Result]]:
    """A model, and what checks of two recipes returned. Their artifact is in the user's cache, which is `cache`."""
    model = tmp_path_factory.mktemp("checked")
    save_model(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        patch.setenv("KVFOLD_CACHE", str(model / "cache"))
        patch.setattr("kvfold.evaluate.check.SCORED", CONTEXT)
        options = "--context", str(CONTEXT), "--haystack", str(words), "--max-trials", "1"
        results = {
            recipe: CliRunner().invoke(
                app, ["check", str(model), "-r", recipe, *options, "--html", str(model / f"{recipe}.html")]
            )
            for recipe in ("int8", "int2")
        }
    return model, results


@pytest.fixture
def served(checked, monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What an engine was asked to serve."""
    monkeypatch.setenv("KVFOLD_CACHE", str(checked[0] / "cache"))
    calls: list[tuple] = []
    server = SimpleNamespace(serve=lambda *arguments: calls.append(arguments))
    monkeypatch.setitem(sys.modules, "kvfold.engines.vllm.serve_vllm", server)
    return calls


def folder(model: Path) -> Path:
    (kept,) = (model / "cache" / "artifacts").iterdir()
    return kept


def test_a_recipe_that_loses_little_passes(checked):
    _, results = checked
    assert results["int8"].exit_code == 0, results["int8"].output
    shown = plain(results["int8"].stdout)
    lines = [line for line in shown.splitlines() if line.strip().endswith("passed")]
    assert [next(name for name in reversed(MEASURES) if line.strip().startswith(name)) for line in lines] == MEASURES
    kl = r"0\.00\d\d"
    assert re.search(rf"^ *KL +0\.0000 +{kl} +{kl} +{kl} to {kl} +0\.0300 +passed", shown, re.MULTILINE)
    assert re.search(r"^ *needles .* 3\.0 +passed", shown, re.MULTILINE)
    assert "needles: 16 bits find too little here to tell what is lost" in shown, "weights are random"
    assert "1,536 tokens" in shown
    assert "-0.0" not in shown
    assert "Kept in " in shown
    assert max(len(line) for line in shown.splitlines() if not line.startswith("Kept")) <= 80


def test_a_recipe_that_loses_more_fails(checked):
    _, results = checked
    assert results["int2"].exit_code == 1
    assert re.fullmatch(r"int2 failed: KL is 0\.\d{4} \(.*\), and 0\.03 is allowed.*", str(results["int2"].exception))
    assert re.search(r"^ *KL .* 0\.0300 +failed", plain(results["int2"].stdout), re.MULTILINE)


def test_the_result_is_kept_in_the_artifact(checked, words: Path):
    """KL is computed here once more, by its definition, in float64."""
    model, _ = checked
    artifact = Artifact.load(folder(model))
    network, tokenizer = load_model(str(model))
    ids = tokenize(words.read_text(), tokenizer, CONTEXT)
    for recipe, verdict in (("int8", "passed"), ("int2", "failed")):
        result = artifact.check_result(parse(recipe))
        assert result is not None
        assert (result.verdict, result.context) == (verdict, CONTEXT)
        assert result.versions["kvfold"] == kvfold.__version__
        with torch.no_grad():
            q, p = (
                network(ids[None, :-1], past_key_values=kvfold.cache(network, each, artifact)).logits[0].double()
                for each in (recipe, "bf16")
            )
        kl = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1)
        mean, tail, *shares = result.measures
        assert mean.value == pytest.approx(float(kl.mean()), rel=0.01, abs=1e-6)
        assert tail.value == pytest.approx(float(kl.quantile(0.999)), rel=0.01, abs=1e-6)
        assert mean.low < mean.value < mean.high
        assert tail.low <= tail.value <= tail.high
        assert [(share.value, share.reference, share.loss) for share in shares] == [(0, 0, 0)] * 3
        # Five haystacks: three scores in all of 30 scores of needles, as of 30 calls, would be 10 points.
        assert [(share.low, share.high) for share in shares] == [(-0.1, 0.1)] * 3


def test_it_writes_a_page(checked):
    model, _ = checked
    for recipe, verdict in (("int8", "passed"), ("int2", "failed")):
        page = (model / f"{recipe}.html").read_text()
        assert f"<strong>{recipe}: {verdict}.</strong>" in page
        assert page.count("<blockquote>") == 2
        assert (f"kvfold serve {model} -r {recipe} --require-check" in page) == (verdict == "passed")


def test_inspect_shows_it(checked):
    model, _ = checked
    shown = plain(run("inspect", folder(model)).stdout)
    assert "int8, checked at 1,536 tokens, 20" in shown
    assert re.search(r"^ *KL .* failed", shown[shown.index("int2, checked") :], re.MULTILINE)
    assert max(map(len, shown.splitlines())) <= 80
    rows = json.loads(run("inspect", folder(model), "--json", "-").stdout)
    assert [(row["recipe"], row["measure"]) for row in rows] == [(r, m) for r in ("int8", "int2") for m in MEASURES]
    assert [row["verdict"] for row in rows[:6]] == ["passed"] * 5 + ["failed"]
    assert all(row["context"] == CONTEXT and row["loss"] <= row["allowed"] for row in rows[:5])


def test_serve_can_require_it(checked, served, error_of):
    model, _ = checked
    run("serve", model, "-r", "int8", "--require-check", "--port", 9000)
    ((_, _, config, flags),) = served
    assert (config.artifact, flags) == (str(folder(model)), ["--port", "9000"])
    line = error_of("serve", model, "-r", "int2", "--require-check")
    assert re.search(r"int2 failed its check on 20\d\d-\d\d-\d\d: KL is 0\.\d+ \(.*\), and 0\.03 is allowed", line)
    assert f"allow more in `kvfold check {model} --recipe int2`" in line
    line = error_of("serve", model, "-r", "int8:block=64", "--require-check")
    run_this = f"run `kvfold check {model} --recipe int8:block=64`"
    assert line.endswith(f"int8:block=64 was not checked on this model: {run_this}")
    assert len(served) == 1
    run("serve", model, "-r", "int2")
    assert len(served) == 2, "nobody required it"


def test_another_check_replaces_it_and_a_later_calibration_leaves_it(checked, served, error_of, words, tmp_path):
    model, _ = checked
    fits = tmp_path / "fits"
    shutil.copytree(folder(model), fits)
    options = "--artifact", fits, "--context", CONTEXT, "--haystack", words, "--max-trials", 1
    rows = json.loads(
        run("check", model, "-r", "int2", *options, "--max-kl", 50, "--max-tail", 50, "--json", "-").stdout
    )
    assert [(row["measure"], row["allowed"], row["verdict"]) for row in rows[:3]] == [
        ("KL", 50, "passed"),
        ("KL tail", 50, "passed"),
        ("needles", 0.03, "passed"),
    ]
    assert not (fits / ".kvfold-in-use").exists()
    run("serve", model, "-r", "int2", "--require-check", "--artifact", fits)
    artifact = Artifact.load(fits)
    made = artifact.metadata.calibration
    network, tokenizer = load_model(str(model))
    from kvfold.text import default_text

    ids = tokenize(default_text("calibration"), tokenizer, made.tokens)
    more = kvfold.calibrate(network, ids, made.context, [parse("gtq-k3v3")], into=artifact)
    assert more.check_result(parse("int2")) == artifact.check_result(parse("int2")) is not None
    more.tensors["key_mean"][0, 0, 0] += 1
    assert more.check_result(parse("int2")) is None, "it was made with other means"
    more.save(fits)
    line = error_of("serve", model, "-r", "int2", "--require-check", "--artifact", fits)
    assert line.endswith(f"run `kvfold check {model} --recipe int2 --artifact {fits}`")


def test_what_is_not_decided_has_its_own_exit_code_and_words(checked, served, error_of, words, tmp_path):
    """If just the measured KL is allowed, its interval reaches to both sides."""
    model, _ = checked
    fits = tmp_path / "fits"
    shutil.copytree(folder(model), fits)
    measured = Artifact.load(fits).check_result(parse("int2")).measures[0].value
    allowed = "--max-kl", str(measured), "--max-tail", "50"
    options = "--context", str(CONTEXT), "--haystack", str(words), "--max-trials", "1", "--artifact", str(fits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvfold.evaluate.check.SCORED", CONTEXT)
        result = CliRunner().invoke(app, ["check", str(model), "-r", "int2", *options, *allowed])
    assert result.exit_code == 3
    assert re.search(r"^ *KL .* not decided$", plain(result.stdout), re.MULTILINE)
    assert re.fullmatch(
        r"int2 is not decided: KL is 0\.\d{4} \(.*\), and [\d.]+ is allowed\. Read more with --max-trials 2, or allow "
        "more with --max-kl, --max-tail and --max-loss",
        result.stderr.strip().splitlines()[-1],
    )
    line = error_of("serve", model, "-r", "int2", "--require-check", "--artifact", fits)
    assert re.search(r"the check of int2 on 20\d\d-\d\d-\d\d did not decide: KL is 0\.\d+ \(.*\), and", line)
    assert f"`kvfold check {model} --recipe int2 --artifact {fits} --max-trials {2 * MOST_TRIALS}`" in line
    assert not served


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--context", 4096), "the model takes 2,048 tokens at most: give a --context up to that"),
        (("--artifact", "me/fits"), "me/fits is no folder on this machine, where the result could be kept"),
        (("--context", 700), "contexts of 700 tokens cannot be checked: haystacks of 508 tokens do not work"),
    ],
)
def test_what_cannot_be_checked_is_refused(checked, served, words, error_of, options, message):
    assert message in error_of("check", checked[0], "-r", "int8", "--haystack", words, *options)


def test_short_texts_are_refused(checked, served, error_of, tmp_path):
    (tmp_path / "short.txt").write_text(text()[:500])
    line = error_of("check", checked[0], "-r", "int8", "--haystack", tmp_path / "short.txt")
    assert line.endswith("no text has 2,048 tokens: name a longer one with --haystack FILE")


def test_the_documents_state_what_is_allowed():
    page = (Path(__file__).parents[2] / "docs" / "calibrate.md").read_text()
    loss = f"--max-loss {100 * Limits.share:g}` points"
    for option in (f"--max-kl {Limits.kl:g}", f"--max-tail {Limits.tail:g}", loss):
        assert option in page
    assert f"`--max-trials {MOST_TRIALS}`" in page
    assert f"{2 * MOST_TRIALS * CALL_HAYSTACKS * CALLS} calls" in page, "of both default texts"
