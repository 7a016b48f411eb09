"""`kvfold fold`."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import FITTED, run
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny_models import random_tokens, tiny
from transformers import LlamaForCausalLM

import kvfold
from kvfold.artifact import Artifact, digest_model
from kvfold.models import load_config, load_model

BIASED = {"Llama": {"attention_bias": True}, "Qwen2": {}}


@pytest.fixture(scope="module", params=BIASED)
def folded(request: pytest.FixtureRequest, small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model (plain), an artifact of it (fits), and what `kvfold fold` makes of them (folded)."""
    folder = tmp_path_factory.mktemp(request.param)
    shutil.copytree(small, folder / "plain")
    tiny(request.param, vocab_size=257, **BIASED[request.param]).save_pretrained(folder / "plain")
    run("calibrate", folder / "plain", "--out", folder / "fits", *FITTED, "--tokens", 200, "--context", 64)
    fold = ("fold", folder / "plain", "-r", "oscar-int2:block=48", "--artifact", folder / "fits")
    result = run(*fold, "--out", folder / "folded")
    *_, command = result.stdout.splitlines()
    assert command == f"kvfold serve {folder / 'folded'} --recipe oscar-int2:block=48"
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


def test_a_folded_model_and_its_artifact_belong_together(error_of, folded: Path):
    for model, artifact in (("folded", folded / "fits"), ("plain", folded / "folded" / "kvfold")):
        config, weights = load_config(str(folded / model)), digest_model(str(folded / model))
        with pytest.raises(ValueError, match=r"another model: its weights are others.*folding makes another model"):
            Artifact.load(artifact).metadata.model.check_files(config, weights)
        line = error_of("generate", folded / model, "-p", "Hello", "--artifact", artifact)
        assert "folding makes another model, with an artifact of its own" in line
    fits = Artifact.load(folded / "folded" / "kvfold")
    fits.metadata.model.check_files(load_config(str(folded / "folded")), digest_model(str(folded / "folded")))


def test_a_folded_model_carries_its_artifact(folded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVFOLD_CACHE", str(tmp_path / "cache"))
    model = folded / "folded"
    rows = json.loads(run("eval", model, "--tokens", 1000, "--context", 500, "--json", "-").stdout)
    assert [row["recipe"] for row in rows] == ["bf16", "oscar-int2"]
    run("generate", model, "-p", "Hello", "--max-tokens", 2)
    served: list[tuple] = []
    server = SimpleNamespace(serve=lambda *arguments: served.append(arguments))
    monkeypatch.setitem(sys.modules, "kvfold.engines.vllm.serve_vllm", server)
    run("serve", model, "-r", "oscar-int2")
    run("serve", model, "-r", "oscar-int2:block=48", "--artifact", folded / "fits")
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
    assert "was not calibrated for oscar-int2:per_head=true" in line
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
    line = error_of("fold", small, "-r", "oscar-int2:block=48", "--artifact", fits, "--out", tmp_path / "folded")
    assert line == "error: No space left on device"
    assert not any(tmp_path.iterdir())


def test_fold_into_a_folder_that_is_not_empty(error_of, folded: Path, fits: Path, small: Path, tmp_path: Path):
    fold = ("fold", small, "-r", "oscar-int2:block=48", "--artifact", fits, "--out")
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    for there in (fits, fits / "kvfold.json", tmp_path / "link"):
        assert f"cannot write {there}: it is there already, and no plain, empty folder" in error_of(*fold, there)
    (tmp_path / "link").unlink()
    assert f"there is no folder {tmp_path / 'missing'}" in error_of(*fold, tmp_path / "missing" / "out")
    line = error_of("fold", folded / "folded", "-r", "oscar-int2", "--out", tmp_path)
    assert "oscar-int2 has no rotation of values left" in line, "it was folded already"
    assert not any(tmp_path.iterdir())
    run(*fold, tmp_path)
    assert (tmp_path / "kvfold" / "kvfold.json").exists()
