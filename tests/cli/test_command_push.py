"""`kvfold push` and `kvfold pull`: to a folder, and to a Hub on this machine."""

import datetime
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import plain, run
from fake_hub import TOKEN, FakeHub, fake_hub
from huggingface_hub import constants

import kvfold
from kvfold import hub
from kvfold.artifact import Artifact, CheckResult, Measure
from kvfold.recipes import parse

FILES = ["README.md", "kvfold.json", "tensors.safetensors"]
RECIPE = "oscar-int2:block=48"


@pytest.fixture
def checked(fits: Path, tmp_path: Path) -> Path:
    """An artifact with the result of a check."""
    artifact, recipe = kvfold.Artifact.load(fits), parse(RECIPE)
    result = CheckResult(
        context=1536,
        date=datetime.date(2026, 11, 18),
        versions={"kvfold": "1.2", "torch": "3.4"},
        fit_sha256=artifact.fit_sha256(recipe),
        measures=(
            Measure(
                name="KL", unit="nats", value=0.01234, reference=0, loss=0.01234, low=0.01, high=0.03, allowed=0.03
            ),
            Measure(
                name="needles", unit="share", value=0.875, reference=0.9, loss=0.025, low=0.0, high=0.03, allowed=0.03
            ),
        ),
    )
    artifact.with_check(recipe, result).save(tmp_path / "checked")
    return tmp_path / "checked"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    hub._answers.cache_clear()
    with fake_hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server
    hub._answers.cache_clear()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_the_card_says_what_it_is_and_how_to_serve_it(checked: Path, small: Path, tmp_path: Path):
    """16 numbers of 2 bits and 2 groups with a scale and an offset of 16 bits: 6 bits each. The ring has 48 + 16 tokens
    of 16 bits, beside 2,048 or 131,072 packed ones."""
    place = tmp_path / "shared" / "fits"
    assert plain(run("push", checked, place, "--model", small).stdout).strip() == str(place)
    card = (place / "README.md").read_text()
    front, body = re.fullmatch(r"---\n(.*?)\n---\n(.*)", card, re.DOTALL).groups()
    assert front.splitlines() == ["library_name: kvfold", "tags: [kvfold, kv-cache, quantization]"]
    assert "| recipe | bits at 2k | at 128k | KL | needles | check |\n| --- | ---: | ---: | ---: | ---: | --- |" in body
    assert f"| `{RECIPE}` | 6.50 | 6.01 | 0.0123 | 87.5 of 90.0 % | passed |" in body
    assert re.search(r"\| `gtq-k3v3` \| [\d.]+ \| [\d.]+ \| – \| – \| not checked \|", body)
    assert f"`{RECIPE}` was checked on 2026-11-18 at 1,536 tokens, with kvfold 1.2, torch 3.4." in body
    serve = f"kvfold serve {small.name} --recipe {RECIPE} --artifact fits"
    assert f"```sh\nkvfold pull {place} --out fits\n{serve}\n```" in body
    model = json.loads((checked / "kvfold.json").read_text())["model"]
    digest = hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()
    assert f"Hash of the model: `{digest}`" in body
    assert digest in plain(run("inspect", checked).stdout)
    assert "200 tokens in passages of 64" in body


def test_the_card_says_each_verdict_and_serves_what_is_likeliest_to_pass(checked: Path, tmp_path: Path):
    artifact = kvfold.Artifact.load(checked)
    old = artifact.check_result(parse(RECIPE))
    for recipe, low, high in ((RECIPE, 0.04, 0.05), ("gtq-k3v3", 0.02, 0.05)):
        needles = old.measures[1].model_copy(update={"low": low, "high": high})
        update = {"measures": (old.measures[0], needles), "fit_sha256": artifact.fit_sha256(parse(recipe))}
        artifact = artifact.with_check(parse(recipe), old.model_copy(update=update))
    artifact.save(checked)
    run("push", checked, tmp_path / "place")
    card = (tmp_path / "place" / "README.md").read_text()
    assert re.search(rf"\| `{RECIPE}` .*\| failed \|\n", card)
    assert re.search(r"\| `gtq-k3v3` .*\| not decided \|\n", card)
    assert "kvfold serve MODEL --recipe gtq-k3v3 --artifact fits" in card


def test_a_folder_that_looks_like_a_hub_id_is_none(checked: Path, small: Path, tmp_path: Path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine").symlink_to(small)
    monkeypatch.chdir(tmp_path)
    run("push", checked, tmp_path / "place", "--model", "models/mine")
    card = (tmp_path / "place" / "README.md").read_text()
    assert "models/mine" not in card
    assert "kvfold serve mine " in card


def test_means_alone_have_a_card(means: Path, tmp_path: Path):
    run("push", means, tmp_path / "place")
    card = (tmp_path / "place" / "README.md").read_text()
    assert "Means alone. They serve every recipe that learns nothing else" in card
    assert "kvfold serve MODEL --recipe int4 --artifact fits" in card
    assert "base_model" not in card


def test_to_a_folder_and_back(error_of, checked: Path, means: Path, tmp_path: Path):
    place, back = tmp_path / "place", tmp_path / "back"
    for _ in range(2):  # what is there already is the same
        run("push", checked, place)
    assert sorted(contents(place)) == FILES
    shown = " ".join(plain(run("pull", place, "--out", back).stdout).split())
    assert f"Wrote {back}: means, oscar-int2, gtq-k3v3" in shown
    assert contents(back) == contents(place)
    assert {**contents(checked), "README.md": b""} == {**contents(back), "README.md": b""}
    again = Artifact.load(checked)
    Artifact(again.metadata.model_copy(update={"checks": {}}), again.tensors).save(tmp_path / "unchecked")
    run("push", tmp_path / "unchecked", place)
    assert (place / "kvfold.json").read_bytes() == (tmp_path / "unchecked" / "kvfold.json").read_bytes()
    assert "holds another artifact" in error_of("pull", place, "--out", back), "a check made there would be lost"
    run("push", checked, place)
    for command in (("push", means, place), ("pull", means, "--out", back)):
        assert "holds another artifact: name a new folder" in error_of(*command)
    assert contents(back) == contents(place)
    assert "is no artifact" in error_of("push", tmp_path / "shared", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    assert "is no artifact" in error_of("pull", tmp_path, "--out", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_to_a_hub_and_back(checked: Path, small: Path, tmp_path: Path, server: FakeHub):
    server.files["maker/small"] = contents(small)
    assert run("push", checked, "me/fits", "--model", "maker/small").stdout == f"{server.endpoint}/me/fits\n"
    assert sorted(server.files["me/fits"]) == FILES
    card = server.files["me/fits"]["README.md"].decode()
    assert "\nbase_model: maker/small\n---\n" in card
    assert f"\nkvfold pull me/fits --out fits\nkvfold serve maker/small --recipe {RECIPE} --artifact fits\n" in card
    run("pull", "me/fits", "--out", tmp_path / "back")
    assert contents(tmp_path / "back") == server.files["me/fits"]
    assert "oscar-int2" in run("inspect", "me/fits").stdout
    run("push", checked, "me/hidden", "--private")
    assert server.private == {"me/hidden"}


def test_a_hub_that_refuses(error_of, checked: Path, server: FakeHub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody")
    line = error_of("push", checked, "me/fits")
    assert line.startswith("error: cannot push to me/fits: ")
    assert line.endswith(": run `hf auth login`, with a token that may write there")
    assert server.files == {}
    line = error_of("pull", "me/none", "--out", "none")
    assert line.startswith("error: me/none is neither a folder nor what the Hugging Face Hub gives: ")


@pytest.mark.parametrize("command", ["push", "pull"])
def test_a_readme_of_the_user_stays(error_of, fits: Path, tmp_path: Path, command: str):
    place, published = tmp_path / "place", tmp_path / "published"
    run("push", fits, published)
    arguments = (fits, place) if command == "push" else (published, "--out", place)
    place.mkdir()
    (place / "README.md").write_text("mine")
    line = error_of(command, *arguments)
    assert line.startswith(f"error: {place} has a README.md that kvfold did not write, or that was changed since: move")
    assert contents(place) == {"README.md": b"mine"}
    (place / "README.md").unlink()
    run(command, *arguments)
    (place / "README.md").write_text((place / "README.md").read_text().replace("smaller", "much smaller"))
    assert "or that was changed since" in error_of(command, *arguments)
    assert b"much smaller" in contents(place)["README.md"]


def test_a_readme_of_the_user_stays_at_the_hub(error_of, fits: Path, server: FakeHub):
    server.files["me/model"] = {"README.md": b"mine"}
    line = error_of("push", fits, "me/model")
    assert line.startswith("error: me/model has a README.md that kvfold did not write")
    assert server.files["me/model"] == {"README.md": b"mine"}
    for _ in range(2):
        run("push", fits, "me/fits")
    assert sorted(server.files["me/fits"]) == FILES


def test_a_card_names_no_other_model(error_of, fits: Path, small: Path, tmp_path: Path):
    config = tmp_path / "other" / "config.json"
    shutil.copytree(small, config.parent)
    changed = {**json.loads(config.read_text()), "num_hidden_layers": 3}
    config.write_text(json.dumps(changed))
    line = error_of("push", fits, tmp_path / "place", "--model", config.parent)
    assert "the artifact was made for another model: its layers is 2, the model's is 3" in line
    assert not (tmp_path / "place").exists()
