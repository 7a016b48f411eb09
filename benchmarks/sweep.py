"""Servers of one model, each with another cache, all under the same loads.

    python benchmarks/sweep.py vllm Qwen3-8B -r bf16 --own fp8 -r saw-int4 -r oscar-int2:group=128 \\
        --load 8192x32 --load 16384x64 --csv rows.csv -- --kv-cache-memory-bytes 51000000000 --max-model-len 20480
    python benchmarks/sweep.py sglang Qwen3-4B -r bf16 -r oscar-int2:group=128 --load 100000x1@100 --output 256 \\
        --csv rows.csv -- --mem-fraction-static 0.459

It runs in an environment with the engine and kvfold. Flags after `--` go to every server.

A shape as Qwen3-8B gets random weights and random fits, so speed and memory are real and answers are not. Values are
folded if the recipe folds them.

Imports and compilation take longer than most loads. So all servers start at once and wait at a gate. Only one at a time
has pages and is under load. A server or a load that fails is reported and has no row.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, PreTrainedTokenizerFast

from kvfold.bench import serving_times
from kvfold.bench.random_fits import random_artifact
from kvfold.files import append_rows
from kvfold.geometry import example_configs, text_config
from kvfold.recipes import parse

GATES = Path(__file__).parent / "gate"
WARM_UP = 32  # tokens per answer of a load of two users before the others: it compiles what is left to compile
STOCK = {  # the engines' own servers
    "vllm": ["-m", "vllm.entrypoints.openai.api_server", "--model"],
    "sglang": ["-m", "sglang.launch_server", "--model-path"],
}
PACKED = ["-c", "from kvfold.cli import main; main()", "serve"]


@dataclass(frozen=True)
class Cache:
    name: str  # a recipe, or a type of the engine's own cache
    own: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=STOCK)
    parser.add_argument("model", help="an example as Qwen3-8B, or a folder with config.json")
    caches = {"action": "append", "dest": "caches"}
    parser.add_argument("-r", "--recipe", type=lambda name: Cache(name, False), **caches, help="bf16: the engine's own")
    parser.add_argument("--own", type=lambda name: Cache(name, True), **caches, help="a --kv-cache-dtype of the engine")
    parser.add_argument(
        "--load", type=parse_load, action="append", required=True, help="tokens of prompts x users, @ percent shared"
    )
    parser.add_argument("--output", type=int, default=1024, help="tokens of each answer")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a load is given up")
    parser.add_argument("--csv", type=Path, required=True, help="rows are added to it")
    parser.add_argument("--logs", type=Path, default=Path("sweep"), help="a folder for what servers print")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:end])
    if not options.caches:
        parser.error("name a cache at least: -r saw-int4, -r bf16, --own fp8")
    loads = [serving_times.Load(tokens, options.output, users, hit, 1) for tokens, users, hit in options.load]
    options.logs.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        folder = model_folder(options.model, Path(scratch), max(load.input + load.output for load in loads))
        servers = [
            Server(options, sys.argv[end + 1 :], folder, cache, Path(scratch) / str(i))
            for i, cache in enumerate(options.caches)
        ]
        try:
            for server in servers:
                server.arrive()
            for server in servers:
                sweep(server, loads, options.limit, options.csv)
        finally:
            for server in servers:
                server.end()


def parse_load(text: str) -> tuple[int, int, int]:
    tokens, _, rest = text.partition("x")
    users, _, hit = rest.partition("@")
    return int(tokens), int(users), int(hit or 0)


def model_folder(model: str, scratch: Path, longest: int, changes: dict[str, Any] | None = None) -> Path:
    """A folder with the configuration of a model, for requests of up to `longest` tokens. Of a multimodal model it is
    the language model's; `changes` then has to name its class."""
    if model not in example_configs():
        return Path(model)
    folder, config = scratch / model, {**text_config(example_configs()[model]), **(changes or {})}
    config["max_position_embeddings"] = max(config.get("max_position_embeddings", 0), longest + 2)  # 2 for SGLang
    config["dtype"] = "bfloat16"  # without it SGLang would take float16
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    words = WordLevel({f"{token} ": token for token in range(config["vocab_size"])}, unk_token="0 ")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(folder)  # SGLang answers in text
    return folder


class Server:
    """A server process in a session of its own. It waits at its gate."""

    def __init__(
        self, options: argparse.Namespace, flags: list[str], folder: Path, cache: Cache, scratch: Path
    ) -> None:
        self.cache, self.gate = cache, scratch / "gate"
        scratch.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        command, environment = [*STOCK[options.engine], str(folder)], dict(os.environ)
        if cache.own:
            command += ["--kv-cache-dtype", cache.name]
        elif cache.name != "bf16":
            recipe, config = parse(cache.name), AutoConfig.from_pretrained(folder).to_dict()
            random_artifact(config, [recipe], folded=recipe.folds).save(scratch / "artifact")
            command = [*PACKED, str(folder), "-r", cache.name, "--artifact", str(scratch / "artifact")]
            command += ["--engine", options.engine]
        command += ["--served-model-name", folder.name, "--load-format", "dummy"]
        command += ["--host", "127.0.0.1", "--port", self.url.rpartition(":")[2], *flags]
        paths = [str(GATES), *filter(None, [os.environ.get("PYTHONPATH")])]
        # Each server keeps what it compiles for itself, and none gives up while it waits.
        environment |= {"GATE": str(self.gate), "PYTHONPATH": os.pathsep.join(paths)}
        environment |= {"VLLM_CACHE_ROOT": str(scratch / "cache"), "VLLM_ENGINE_READY_TIMEOUT_S": "100000"}
        with (options.logs / f"{cache.name}.log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command], stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def arrive(self) -> None:
        """Wait until the server is at its gate or has ended."""
        while not Path(f"{self.gate}.ready").exists() and self.process.poll() is None:
            time.sleep(0.1)

    def open(self) -> bool:
        """Open the gate. The result is whether the server answers."""
        Path(f"{self.gate}.open").touch()
        while self.process.poll() is None:
            with suppress(URLError, ConnectionError, TimeoutError), urlopen(f"{self.url}/health", timeout=5):
                return True
            time.sleep(0.1)
        return False

    def end(self) -> None:
        """End the server and all processes that it has started, so that their memory is free."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def sweep(server: Server, loads: list[serving_times.Load], limit: float, rows: Path) -> None:
    begin = time.monotonic()
    if not server.open():
        print(f"{server.cache.name}: the server ended, see its log", flush=True)
        return
    print(f"{server.cache.name}: up after {time.monotonic() - begin:.0f} s", flush=True)
    warm_up = serving_times.Load(loads[0].input, WARM_UP, 2, 0, 1)
    for load in (warm_up, *loads):
        try:
            asked = serving_times.Server.find(server.url, None)
            answers = asyncio.run(asyncio.wait_for(serving_times.drive(asked, load, lambda: None), limit))
        except (TimeoutError, serving_times.ServerError) as error:
            print(f"{server.cache.name}: {load} failed: {error or f'no end after {limit} s'}", flush=True)
            continue
        if load is not warm_up:
            row = serving_times.row(asked, load, *answers, server.cache.name, serving_times.this_machine())
            append_rows(rows, [asdict(row)])
            print(row, flush=True)
    server.end()


if __name__ == "__main__":
    main()
