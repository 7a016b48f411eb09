"""What happens before the first request: refusals, and the server as a user starts it."""

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import vllm
from served import kvfold, serving
from vllm import EngineArgs

from kvfold.engines.vllm import backend, plugin
from kvfold.models import embedded_folder


@pytest.fixture(scope="module")
def config(artifact):
    """The configuration of an engine that can be served."""
    given = {"kvfold": {"recipe": "saw-int4", "artifact": artifact}}
    return EngineArgs(str(embedded_folder()), dtype="float32", additional_config=given).create_engine_config()


def test_nothing_is_refused_that_works(config):
    assert backend.make_plan(config).token_bytes == (32 + 4) * 2 * 3 * 30


def test_what_is_made_for_layers_does_not_depend_on_the_default_device(config, monkeypatch):
    monkeypatch.setattr(backend, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(backend.Engine, "current", None, raising=False)
    with torch.device("meta"):  # vLLM makes layers where it is the GPU
        engine = backend.Engine.of(config)
    assert {key.transform.mean.device.type for key, _ in engine.plan.codecs} == {"cpu"}
    assert backend.Engine.of(copy.copy(config)) is engine, "as vLLM copies it for the language model of a larger one"


def test_memory_as_measured_with_another_recipe_is_refused(config, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_STARTUP_PLAN", "1")
    with pytest.raises(ValueError, match="VLLM_ENABLE_STARTUP_PLAN takes memory as measured with other recipes"):
        backend.make_plan(config)


@pytest.mark.parametrize(
    ("part", "field", "value", "reason"),
    [
        ("cache_config", "cache_dtype", "fp8", "--kv-cache-dtype fp8 packs the cache in another way"),
        ("cache_config", "block_size", 24, "multiple of 16 tokens, not --block-size 24"),
        ("model_config", "enable_sleep_mode", True, "--enable-sleep-mode would lose means and rotations"),
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline parallelism is not supported"),
        ("parallel_config", "decode_context_parallel_size", 2, "context parallelism is not supported"),
        (None, "kv_transfer_config", object(), "KV connectors would ship pages"),
        (None, "speculative_config", object(), "speculative decoding is not supported"),
    ],
)
def test_configurations_that_are_refused(config, part, field, value, reason):
    changed = copy.copy(config)
    if part:
        setattr(changed, part, copy.copy(getattr(config, part)))
    setattr(getattr(changed, part) if part else changed, field, value)
    with pytest.raises(ValueError, match=reason):
        backend.make_plan(changed)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("saw-int5", "unknown recipe 'saw-int5'"),
        ("saw-int4:skip=0", "vLLM has pages of one size for all layers"),
        ("kivi-2", "quantizes whole pages"),
        ("hessian-int4", "was not calibrated for hessian-int4"),
    ],
)
def test_recipes_that_are_refused(config, artifact, recipe, reason):
    changed = copy.copy(config)
    changed.additional_config = {"kvfold": {"recipe": recipe, "artifact": artifact}}
    with pytest.raises(ValueError, match=reason):
        backend.make_plan(changed)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"alibi_slopes": [0.5]}, "ALiBi"),
        ({"sliding_window": 128}, "a sliding window"),
        ({"logits_soft_cap": 30.0}, "logit soft-capping"),
        ({"kv_sharing_target_layer_name": "layers.0"}, "another layer's cache"),
        ({"attn_type": "encoder_only"}, "bidirectional"),
        ({"sinks": [1.0]}, "sinks"),
    ],
)
def test_layers_that_are_refused(options, what):
    with pytest.raises(ValueError, match=f"attention with {what}"):
        backend.PackedImpl(9, 64, 0.125, 3, **options)


def other_weights(artifact: str, folder: Path) -> None:
    """An artifact that says it was made for a model of the same shape with other weights."""
    shutil.copytree(artifact, folder)
    metadata = json.loads((folder / "kvfold.json").read_text())
    metadata["model"]["weights"] |= {"norm.weight": "0" * 16}
    (folder / "kvfold.json").write_text(json.dumps(metadata))


def test_an_artifact_of_other_weights_is_refused(config, artifact, tmp_path):
    other_weights(artifact, tmp_path / "artifact")
    changed = copy.copy(config)
    changed.additional_config = {"kvfold": {"recipe": "saw-int4", "artifact": str(tmp_path / "artifact")}}
    with pytest.raises(ValueError, match=r"made for another model: its weights are others, norm\.weight"):
        backend.make_plan(changed)


def test_other_versions_are_refused(config, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    with pytest.raises(ValueError, match=r"kvfold serves with vLLM 0\.32, this is 0\.33\.1"):
        backend.make_plan(config)


def test_a_plugin_that_cannot_be_imported_stops_vllm(monkeypatch):
    """vLLM only swallows what fails while it imports the entry point's own module, which therefore imports nothing."""
    monkeypatch.setitem(sys.modules, "kvfold.engines.vllm.backend", None)
    with pytest.raises(ImportError):
        plugin.register()
    code = "import sys, kvfold.engines.vllm.plugin; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("recipe", "kind", "line"),
    [
        ("saw-int5", None, "error: unknown recipe 'saw-int5': did you mean 'saw-int4'?"),
        ("int4", "missing", "error: {folder} is no artifact: there is no kvfold.json in it"),
        ("int4", "cut short", "error: {folder}/tensors.safetensors is damaged"),
        ("int4", "of other weights", "error: the artifact was made for another model: its weights are others"),
    ],
)
def test_the_server_refuses_in_one_line(artifact, tmp_path, recipe, kind, line):
    folder = tmp_path / "artifact"
    if kind == "cut short":  # as a full disk leaves a copy
        shutil.copytree(artifact, folder)
        tensors = folder / "tensors.safetensors"
        tensors.write_bytes(tensors.read_bytes()[:-1000])
    elif kind == "of other weights":
        other_weights(artifact, folder)
    with kvfold("serve", "embedded", "-r", recipe, *(("--artifact", str(folder)) if kind else ())) as server:
        printed = server.communicate()[0].splitlines()
    assert server.returncode == 1
    assert printed[-1].startswith(line.format(folder=folder))
    assert not any("Traceback" in each for each in printed)


def test_the_server_says_in_one_line_that_vllm_cannot_be_imported(tmp_path):
    (tmp_path / "vllm.py").write_text("raise ImportError('vllm is broken')")
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    with kvfold("serve", "embedded", "-r", "int4", env={**os.environ, "PYTHONPATH": path}) as server:
        assert server.communicate()[0] == "error: vllm is broken\n"
    assert server.returncode == 1


def test_the_server_answers_and_shows_its_gauges():
    flags = ("--max-model-len", "512", "--max-num-seqs", "4")
    with serving("-r", "saw-int4:sink=4,recent=40,centre=false", *flags) as server:
        assert json.loads(server.get("/v1/models"))["data"][0]["id"] == "embedded"
        assert server.complete().startswith(" Berlin")
        gauges = server.metrics("/metrics")
    assert gauges["kvfold:bytes_per_token"] == (32 + 4) * 2 * 3 * 30
    assert gauges["kvfold:compression"] == pytest.approx(128 / 36)
    assert gauges["kvfold:shadow_pages_used"] >= 1
    assert gauges["kvfold:non_finite_tokens"] == 0
    assert any(name.startswith("vllm:prompt_tokens_total") for name in gauges)
    assert "30 packed" in server.printed
