"""What happens before the first request: refusals, and the server as a user starts it."""

import copy
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import vllm
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


@pytest.mark.parametrize(
    ("part", "field", "value", "reason"),
    [
        ("cache_config", "cache_dtype", "fp8", "--kv-cache-dtype fp8 packs the cache in another way"),
        ("cache_config", "block_size", 24, "multiple of 16 tokens, not --block-size 24"),
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


def test_an_artifact_of_other_weights_is_refused(config, artifact, tmp_path):
    metadata = json.loads((Path(artifact) / "kvfold.json").read_text())
    metadata["model"]["weights"] = "0" * 64
    (tmp_path / "kvfold.json").write_text(json.dumps(metadata))
    (tmp_path / "tensors.safetensors").write_bytes((Path(artifact) / "tensors.safetensors").read_bytes())
    changed = copy.copy(config)
    changed.additional_config = {"kvfold": {"recipe": "saw-int4", "artifact": str(tmp_path)}}
    with pytest.raises(ValueError, match="made for another model: its weights is 000"):
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


def kvfold(*arguments: str, **options) -> subprocess.Popen:
    command = [str(Path(sys.executable).with_name("kvfold")), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("-r", "saw-int5"), "error: unknown recipe 'saw-int5': did you mean 'saw-int4'?"),
        (("-r", "int4", "--artifact", "nowhere"), "error: nowhere is no artifact: there is no kvfold.json in it"),
    ],
)
def test_the_server_refuses_in_one_line(arguments, line):
    with kvfold("serve", "embedded", *arguments) as server:
        printed = server.communicate()[0].splitlines()
    assert server.returncode == 1
    assert printed[-1].startswith(line)


def get(url: str, **body) -> str:
    request = urllib.request.Request(url, json.dumps(body).encode() or None, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request if body else url, timeout=120) as answer:
        return answer.read().decode()


def test_the_server_answers_and_shows_its_gauges():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    flags = ("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512", "--max-num-seqs", "4")
    with kvfold("serve", "embedded", "-r", "saw-int4:sink=4,recent=40,centre=false", *flags) as server:
        try:
            for _ in range(240):
                assert server.poll() is None, server.communicate()[0]
                try:
                    get(f"{address}/health")
                    break
                except (urllib.error.URLError, ConnectionError):
                    time.sleep(1)
            assert json.loads(get(f"{address}/v1/models"))["data"][0]["id"] == "embedded"
            prompt = "The capital of France is Paris. The capital of Germany is"
            answer = json.loads(
                get(f"{address}/v1/completions", model="embedded", prompt=prompt, max_tokens=40, temperature=0)
            )
            assert answer["choices"][0]["text"].startswith(" Berlin")
            gauges = dict(line.split() for line in get(f"{address}/metrics").splitlines() if line.startswith("kvfold"))
        finally:
            server.terminate()
            printed = server.communicate()[0]
    assert float(gauges["kvfold:bytes_per_token"]) == (32 + 4) * 2 * 3 * 30
    assert float(gauges["kvfold:compression"]) == pytest.approx(128 / 36)
    assert float(gauges["kvfold:shadow_pages_used"]) >= 1
    assert "30 packed" in printed
