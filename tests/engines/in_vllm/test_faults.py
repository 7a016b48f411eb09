"""vLLM's server as a user starts it: under load, when a part of it dies, and what it shows."""

import os
import shutil
import signal
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from operations_files import metrics_asked_for
from safetensors.torch import save_file
from served import Server, kvfold, serving

from kvfold.bench import soak
from kvfold.bench.client import Server as Endpoint

RECIPE = "int2:block=16,centre=false"
# a cache for 100 pages, fewer than 16 requests may need, so that some are preempted
FLAGS = (
    *("--max-model-len", "512", "--max-num-seqs", "16", "--max-num-batched-tokens", "512"),
    *("--block-size", "32", "--num-gpu-blocks-override", "100"),
)
PROMPT = list(range(700, 780))  # begins as no other prompt


def engine_core(server: Server) -> psutil.Process:
    """The process that runs the model."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    (core,) = [child for child in children if "EngineCore" in child.name() or "EngineCore" in " ".join(child.cmdline())]
    return core


@pytest.fixture
def _known_tokens(monkeypatch):
    """Of the small model."""
    monkeypatch.setattr(soak, "TOKENS", range(100, 2000))


@pytest.mark.usefixtures("_known_tokens")
def test_a_server_loses_no_answer_and_ends_with_a_clear_error(small: Path):
    with serving("-r", RECIPE, *FLAGS, model=str(small)) as server:
        before = server.complete(PROMPT, 20)
        load = soak.Soak(users=24, seconds=300, requests=250, longest=200, output=12, leaving=20)
        row, lost = soak.run(Endpoint.find(server.address, None), load, RECIPE, "none")
        assert lost == []
        assert row.requests == 250 == row.answered + row.left
        assert row.left > 10
        assert row.kv_tokens_left == 0
        assert server.complete(PROMPT, 20) == before
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(server.complete, PROMPT, 400)
            os.kill(engine_core(server).pid, signal.SIGKILL)
            with pytest.raises((urllib.error.HTTPError, ConnectionError)):
                waiting.result(timeout=60)
        assert server.process.wait(timeout=60) is not None
    assert "EngineDeadError" in server.printed
    with serving("-r", RECIPE, *FLAGS, model=str(small)) as server:
        server.complete(tokens := list(range(100, 500)), 1)
        server.complete([*tokens[:300], *range(600, 650)], 1)
        assert server.complete(PROMPT, 20) == before
        server.complete(PROMPT, 40)  # gauges are updated every 16 steps, and tell what was 16 steps ago
        gauges = server.metrics("/metrics")
    assert gauges["kvfold:bytes_per_token"] == (16 + 4) * 2 * 3 * 2  # 64 numbers of 2 bits, 3 KV heads, 2 layers
    assert gauges["kvfold:compression"] == pytest.approx(128 / 20)
    assert gauges["kvfold:non_finite_tokens"] == 0
    exported = {name.partition("{")[0] for name in gauges}
    assert metrics_asked_for("vllm") | metrics_asked_for("kvfold") <= exported
    assert "2 packed" in server.printed


def test_what_stops_a_worker_is_the_last_line(small: Path, tmp_path: Path):
    folder = shutil.copytree(small, tmp_path / "model")
    save_file({"fold4/key_order": torch.zeros(1)}, folder / "tensors.safetensors")  # as an artifact among the weights
    with kvfold("serve", str(folder), "-r", RECIPE, *FLAGS) as process:
        printed = process.communicate()[0]
    *_, last = printed.splitlines()
    assert process.returncode == 1
    assert last.startswith("error: ")
    assert "fold4/key_order" in last


def test_a_server_that_starts_ends_by_sigterm(small: Path, pytestconfig: pytest.Config):
    """While it waits for its processes, vLLM itself would ignore it."""
    if not pytestconfig.getoption("whole_product"):
        pytest.skip("a server that is ended while it starts takes most of a minute: `make test-all` does")
    with kvfold("serve", str(small), "-r", RECIPE, *FLAGS) as process:
        next(line for line in process.stdout if "Initializing a V1 LLM engine" in line)  # in the first of them
        process.terminate()
        printed = process.communicate(timeout=300)[0]
    assert process.returncode == 1
    assert printed.splitlines()[-1] == "error: the server was ended before it had started"
