"""README's commands, as they stand there, in the environments that `make` has made. CI runs `make test` itself, and has
no time for `make demo`."""

import json
import os
import re
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from fenced_blocks import ROOT, blocks

TEXT = "".join(block.text for block in blocks("sh") if block.page == "README.md" and not block.needs)
LINES = [line for line in TEXT.splitlines() if line]
(SERVE,) = [line for line in LINES if line.startswith("make serve")]
(GENERATE,) = re.findall(r"`(model\.generate\(.*\))`", (ROOT / "README.md").read_text())
IN_TRANSFORMERS = ".venv/bin/python -c " + shlex.quote(f"""
import kvfold
from kvfold.models import load_model
model, tokenizer = load_model("embedded")
inputs = tokenizer("The capital of France is", return_tensors="pt")
print(tokenizer.decode(({GENERATE})[0]))""")
SERVER = "http://localhost:8000"
OURS = re.compile("TRITON_|VLLM_|KVFOLD_|MAKE|MFLAGS")  # variables that tests and `make test` set


def start(line: str, log: Path) -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if not OURS.match(name)}
    with log.open("w") as output:
        streams = {"stdout": output, "stderr": subprocess.STDOUT}
        return subprocess.Popen(
            ["bash", "-c", f"exec {line}"], cwd=ROOT, env=environment, start_new_session=True, **streams
        )


@pytest.mark.parametrize(
    "line",
    [*(line for line in LINES if not line.startswith("make")), IN_TRANSFORMERS],
    ids=lambda line: line.split()[1],
)
def test_a_line_runs(line: str, tmp_path: Path):
    process = start(line, log := tmp_path / "log")
    assert process.wait() == 0, log.read_text()
    assert log.read_text()


def chat(stream: bool) -> str:
    """What the server answers to a question."""
    asked = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": "embedded", "messages": [asked], "max_tokens": 16, "temperature": 0, "stream": stream}
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{SERVER}/v1/chat/completions", json.dumps(body).encode(), kind)
    with urllib.request.urlopen(request, timeout=300) as answer:
        text = answer.read().decode()
    if not stream:
        return json.loads(text)["choices"][0]["message"]["content"]
    events = re.findall(r"^data: (\{.*\})$", text, re.MULTILINE)
    assert text.endswith("data: [DONE]\n\n")
    return "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events)


def wait_until_ready(process: subprocess.Popen, log: Path) -> None:
    while True:
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(f"{SERVER}/health", timeout=60)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)


def runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.timeout(900)
def test_make_serve_starts_answers_and_ends(tmp_path: Path):
    """With the default recipe, on vLLM's defaults."""
    process = start(SERVE, log := tmp_path / "log")
    try:
        wait_until_ready(process, log)
        answer = chat(stream=False)
        assert "Paris" in answer
        assert chat(stream=True) == answer
        children = psutil.Process(process.pid).children(recursive=True)
        served = log.read_text()
        process.terminate()
        process.wait(timeout=300)
        while any(map(runs, children)):  # Python's resource tracker ends after the others
            time.sleep(1)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert children
    assert "Traceback" not in served
    # While it ends, vLLM may log an EngineDeadError: its output handler races with the end of its engine.
    assert f"{os.sep}src{os.sep}kvfold{os.sep}" not in log.read_text()[len(served) :]
