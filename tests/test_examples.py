"""The examples. `cli/test_documented_commands.py` runs the commands of their README."""

import json
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer
from fenced_blocks import ROOT
from own_methods import forget_methods
from random_layers import FIRST, random_layer
from tiny_models import tiny
from transformers import GenerationMixin

from kvfold.calibration.automatic import kept
from kvfold.methods.integers import Integers
from kvfold.recipes import RECIPES, add, parse

NOTEBOOK = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())
OWN_METHOD = ROOT / "examples" / "own_method.py"


@pytest.fixture(autouse=True)
def _no_more_recipes_than_before() -> Iterator[None]:
    before = dict(RECIPES)
    yield
    RECIPES.clear()
    RECIPES.update(before)
    forget_methods()


def test_the_notebook_is_one_that_jupyter_opens_and_has_no_outputs():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
        else:
            assert cell.keys() == {"cell_type", "id", "metadata", "source"}


def test_the_notebook_runs(embedded, monkeypatch):
    """Cell by cell in one namespace, as in Jupyter: it has no magics. The texts are shorter."""
    monkeypatch.setattr("kvfold.models.load_model", lambda name: embedded)
    names: dict = {}
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]).replace("1024", "256"), cell["id"], "exec"), names)
    assert "Paris" in names["answers"]["fold4"]
    smaller, kl = zip(*names["rows"].values(), strict=True)
    assert smaller[0] < smaller[1], "fold4 and fold2"
    assert kl[0] < kl[1] < kl[2], "the last one is int2"


def test_a_document_is_read_once_and_questions_do_not_see_each_other(tmp_path, monkeypatch, capsys):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "User: {{ messages[0].content }} Answer:"
    tokenizer.save_pretrained(tmp_path)
    tiny(vocab_size=len(tokenizer), max_position_embeddings=4096).save_pretrained(tmp_path)
    monkeypatch.setattr("kvfold.calibration.automatic.TOKENS", {"cpu": 128})
    asked = []  # every prompt, and how many tokens of it the cache holds

    def generate(model, prompt, **options):
        asked.append((tokenizer.decode(prompt[0]), options["past_key_values"].get_seq_length()))
        return real(model, prompt, **options)

    real = GenerationMixin.generate
    monkeypatch.setattr(GenerationMixin, "generate", generate)
    script = ROOT / "examples" / "long_document.py"
    questions = ("Who?", "Where and when was it?", "Who?")
    options = ("--tokens", "1200", "--max-new-tokens", "2")  # two pieces of text
    monkeypatch.setattr(sys, "argv", [str(each) for each in (script, tmp_path, script, *questions, *options)])
    runpy.run_path(str(script), run_name="__main__")
    told, *answers = capsys.readouterr().out.split("\n\n")
    assert told.startswith("1,200 tokens read, ")
    assert [answer.partition("\n")[0] for answer in answers] == list(questions)
    document = ("User: " + script.read_text())[:1200]
    assert asked == [(f"{document}\n\n{question} Answer:", 1200) for question in questions]


def test_turned_keys_are_uncorrelated_and_the_strong_ones_come_first(monkeypatch):
    monkeypatch.setenv("KVFOLD_METHODS", str(OWN_METHOD))
    layer, recipe = random_layer(d=64, tokens=200), parse("principal-int2")
    fit = recipe.fit(layer.statistics, layer.rope, layer.means)
    for head, rotation in enumerate(fit["key_rotation"].double().numpy()):
        np.testing.assert_allclose(rotation.T @ rotation, np.eye(64), atol=1e-5)
        covariance = np.cov(layer.k[FIRST:, head] @ rotation, rowvar=False)
        variances = np.diag(covariance)
        np.testing.assert_allclose(covariance, np.diag(variances), atol=1e-5 * variances[0])
        assert (np.diff(variances) < 1e-5 * variances[0]).all()
    key, value = recipe.layouts(64, 64, fit)
    assert key.slot_bytes == 16 * 4 // 8 + 48 * 2 // 8 + 8  # plus a scale and an offset per segment
    assert value.slot_bytes == 64 * 2 // 8 + 4


def test_files_with_methods_are_run_once_and_a_missing_one_is_named(tmp_path, monkeypatch):
    other = tmp_path / "counted.py"
    other.write_text("import builtins\nbuiltins.times_run = getattr(builtins, 'times_run', 0) + 1\n")
    monkeypatch.setattr("builtins.times_run", 0, raising=False)
    monkeypatch.setenv("KVFOLD_METHODS", os.pathsep.join((str(OWN_METHOD), str(other))))
    parsed = [parse(f"principal-int2:strong={strong}") for strong in (8, 24)]
    assert [recipe.strong for recipe in parsed] == [8, 24]
    assert [str(recipe) for recipe in parsed] == ["principal-int2:strong=8", "principal-int2:strong=24"]
    assert times_run == 1  # noqa: F821 - see above
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "counted.py").write_text(other.read_text())
    monkeypatch.setenv("KVFOLD_METHODS", os.pathsep.join((str(other), str(tmp_path / "more" / "counted.py"))))
    parse("int4")
    assert times_run == 2, "of two files with one name"  # noqa: F821
    forget_methods()
    monkeypatch.setenv("KVFOLD_METHODS", "nowhere.py")
    with pytest.raises(FileNotFoundError, match=r"^KVFOLD_METHODS names 'nowhere.py', which is no Python file"):
        parse("int4")


@pytest.mark.parametrize("name", ["int4", "fold", "tq-k5v5"])
def test_names_of_our_own_recipes_cannot_be_taken(name: str):
    with pytest.raises(ValueError, match=f"kvfold has a recipe '{name}' itself"):
        add(Integers(name=name, bits=4, summary="mine"))


@pytest.mark.parametrize("name", ["a/b", "a:b", "Mine", ""])
def test_names_that_would_break_files_are_refused(name: str):
    with pytest.raises(ValueError, match="is no name of a recipe"):
        add(Integers(name=name, bits=4, summary="mine"))


def test_what_a_method_learned_is_not_kept_if_its_file_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("KVFOLD_CACHE", str(tmp_path / "cache"))
    tiny().save_pretrained(tmp_path / "model")
    made = SimpleNamespace(only=lambda recipe: SimpleNamespace(save=Path.mkdir))
    file = tmp_path / "own_method.py"
    monkeypatch.setenv("KVFOLD_METHODS", str(file))

    def folder(source: str) -> Path:
        file.write_text(source)
        forget_methods()
        (kept_in,) = kept(str(tmp_path / "model"), [parse("principal-int2")], lambda name: None, lambda *_: made)
        return kept_in

    source = OWN_METHOD.read_text()
    assert folder(source) != folder(source.replace("means[0]", "None"))
    assert folder(source) == folder(source)
