"""A model behind `kvfold serve`, as a user starts it, and how to ask it."""

import json
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PROMPT = "The capital of France is Paris. The capital of Germany is"


def kvfold(*arguments: str, **options) -> subprocess.Popen:
    command = [str(Path(sys.executable).with_name("kvfold")), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


@dataclass
class Server:
    address: str
    process: subprocess.Popen
    model: str
    printed: str = ""  # once it has ended

    def get(self, path: str, **body) -> str:
        url = self.address + path
        request = urllib.request.Request(url, json.dumps(body).encode() or None, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request if body else url, timeout=120) as answer:
            return answer.read().decode()

    def metrics(self, path: str) -> dict[str, float]:
        """By name and labels."""
        lines = [line for line in self.get(path).splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(maxsplit=1) for line in lines)}

    def complete(self, prompt: str | list[int] = PROMPT, tokens: int = 40) -> str:
        """What comes after a prompt, which may be tokens."""
        asked = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return json.loads(self.get("/v1/completions", **asked))["choices"][0]["text"]


def free_port() -> int:
    """Below those that the system hands out, one of which another process may take before a server has started."""
    while True:
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", random.randrange(10_000, 30_000)))
            return free.getsockname()[1]


@contextmanager
def serving(*arguments: str, model: str = "embedded") -> Iterator[Server]:
    port = free_port()
    where = ("--host", "127.0.0.1", "--port", str(port))
    with kvfold("serve", model, *arguments, *where) as process:
        server = Server(f"http://127.0.0.1:{port}", process, model)
        try:
            for _ in range(240):
                assert process.poll() is None, process.communicate()[0]
                try:
                    server.get("/health")
                    break
                except (urllib.error.URLError, ConnectionError):
                    time.sleep(1)
            yield server
        finally:
            process.terminate()
            server.printed = process.communicate()[0]
