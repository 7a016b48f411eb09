"""A Hub that does not answer: commands say so within seconds, and use what is on this machine."""

import json
import socket
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from tiny_models import tiny

from kvfold import hub
from kvfold.artifact import Artifact, digest_model
from kvfold.models import load_config, load_model, load_tokenizer
from kvfold.publish.transfer import push


@pytest.fixture
def _silent_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """At an address where connections are taken and nothing is ever said."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "PATIENCE", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield


@pytest.mark.usefixtures("_silent_hub")
@pytest.mark.parametrize(
    "ask", [load_config, load_tokenizer, load_model, Artifact.load], ids=lambda ask: ask.__qualname__
)
def test_a_silent_hub_is_given_up_within_seconds(ask):
    start = time.monotonic()
    with pytest.raises((OSError, ValueError), match=r"nobody/nothing .*127\.0\.0\.1:\d+ does not answer; HF_HUB_ETAG"):
        ask("nobody/nothing")
    assert time.monotonic() - start < 5
    assert not constants.HF_HUB_OFFLINE, "only kvfold's own calls go without it"


@pytest.mark.usefixtures("_silent_hub")
def test_push_to_a_silent_hub(monkeypatch):
    monkeypatch.setattr("kvfold.publish.transfer._published", lambda *_: {})
    with pytest.raises(OSError, match=r"cannot push to me/fits: http://127.* does not answer"):
        push(Path("fits"), "me/fits")


@pytest.mark.usefixtures("_silent_hub")
def test_what_was_downloaded_before_is_found(tmp_path, capsys):
    repository = tmp_path / "hub" / "models--nobody--nothing"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for _ in range(2):
        assert load_config("nobody/nothing") == {"model_type": "llama"}
    assert capsys.readouterr().err == f"{constants.ENDPOINT} does not answer: what was downloaded before is used\n"


@pytest.mark.usefixtures("_silent_hub")
def test_a_revision_has_its_own_weights(tmp_path):
    repository, digests = tmp_path / "hub" / "models--nobody--nothing", {}
    (repository / "refs").mkdir(parents=True)
    for number, revision in enumerate(("main", "tuned")):
        (repository / "refs" / revision).write_text(str(number) * 40)
        snapshot = repository / "snapshots" / (str(number) * 40)
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps({"model_type": "llama"}))
        save_file({"weight": torch.full((2, 2), float(number))}, snapshot / "model.safetensors")
        digests[revision] = digest_model(str(snapshot))
    assert digests["main"] != digests["tuned"]
    assert digest_model("nobody/nothing") == digests["main"]
    assert digest_model("nobody/nothing", "tuned") == digests["tuned"]


@pytest.mark.parametrize("name", ["./no/such/folder", "no/such/folder", "/no/such/folder", "nothing/config.json"])
def test_what_cannot_be_on_the_hub_is_not_asked_for(name, monkeypatch):
    monkeypatch.setattr(hub, "asked", None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", None)
    with pytest.raises(FileNotFoundError, match=name):
        load_config(name)


def test_a_model_on_this_machine_needs_no_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "_answers", None)
    monkeypatch.setattr("kvfold.models.load_tokenizer", lambda name: None)
    tiny().save_pretrained(tmp_path)
    assert load_model(str(tmp_path))[0].config.model_type == "llama"


@pytest.mark.usefixtures("_silent_hub")
def test_the_users_own_settings_win(monkeypatch):
    assert hub.silent()
    hub._answers.cache_clear()
    monkeypatch.setattr(hub, "PATIENCE", 60)
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "1")
    start = time.monotonic()
    assert hub.silent()
    assert time.monotonic() - start < 5
    monkeypatch.setattr(hub, "_answers", None)  # which is not called any more
    for offline in ("0", "1"):
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
        with hub.asked():
            assert not constants.HF_HUB_OFFLINE, "read by the Hub's client when it was imported"


@pytest.mark.usefixtures("_silent_hub")
def test_an_engine_does_not_ask_a_silent_hub_again(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # so that what is set here is taken back
    monkeypatch.delenv("HF_HUB_OFFLINE")
    hub.tell_engine(str(tmp_path))
    assert "HF_HUB_OFFLINE" not in hub.os.environ
    hub.tell_engine("nobody/nothing")
    assert hub.os.environ["HF_HUB_OFFLINE"] == "1"
    assert constants.HF_HUB_OFFLINE
