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
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, PreTrainedTokenizerFast

from kvfold.bench import client
from kvfold.bench.random_fits import random_artifact
from kvfold.files import append_rows
from kvfold.geometry import example_configs, text_config
from kvfold.recipes import parse

GATES = Path(__file__).parent / "gate"
WARM_UP = 32  # tokens per answer of a load of two users before the others: it compiles what is left to compile
# Requests before timing come in two parts. First one short request per user, all at once: servers compile kernels per
# number of requests. Then some requests like the timed ones, which leave the shared prefix in the cache.
WARM_UP_INPUT = 16  # tokens of a short prompt
WARM_UP_REQUESTS = 2  # of the second part
WARM_UP_OUTPUT = 4  # tokens per answer, in both parts
POLL = 0.25  # seconds between two reads of the server's metrics
STOCK = {  # the engines' own servers
    "vllm": ["-m", "vllm.entrypoints.openai.api_server", "--model"],
    "sglang": ["-m", "sglang.launch_server", "--model-path"],
}
PACKED = ["-c", "from kvfold.cli import main; main()", "serve"]


@dataclass(frozen=True)
class Cache:
    name: str  # a recipe, or a type of the engine's own cache
    own: bool


@dataclass(frozen=True)
class Load:
    """One point of a sweep: a request per user."""

    input: int  # tokens per prompt
    output: int  # tokens per answer
    concurrency: int  # users
    prefix_hit: int  # percent of each prompt that is the same for all


@dataclass(frozen=True)
class Row:
    engine: str
    version: str
    model: str
    recipe: str
    input: int
    output: int
    concurrency: int
    prefix_hit: int  # percent
    requests: int
    system_tps: float  # tokens of all answers per second
    request_tps: float  # tokens per second of the median answer after its first token
    ttft_p50: float  # seconds
    ttft_p90: float
    ttft_p99: float
    e2e_p50: float
    e2e_p90: float
    e2e_p99: float
    kv_tokens: int | None  # the most that running requests held; None: the server does not say
    gpu: str
    date: str


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
    loads = [Load(tokens, options.output, users, hit) for tokens, users, hit in options.load]
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


def row_of(
    server: client.Server,
    load: Load,
    answers: list[client.Answer],
    seconds: float,
    kv_tokens: int | None,
    recipe: str,
    gpu: str,
) -> Row:
    ttft, e2e = (np.array([getattr(answer, name) for answer in answers]) for name in ("ttft", "e2e"))
    return Row(
        **client.served_by(server, recipe, gpu),
        input=load.input,
        output=load.output,
        concurrency=load.concurrency,
        prefix_hit=load.prefix_hit,
        requests=load.concurrency,
        system_tps=round(load.concurrency * load.output / seconds, 2),
        request_tps=round(float(np.median((load.output - 1) / (e2e - ttft))), 2),
        **client.percentiles("ttft", ttft, 50, 90, 99),
        **client.percentiles("e2e", e2e, 50, 90, 99),
        kv_tokens=kv_tokens,
    )


async def drive(server: client.Server, load: Load) -> tuple[list[client.Answer], float, int | None]:
    """All answers of a load, the seconds from the first request to the last token, and the peak of `kv_tokens`."""
    rng = random.Random()  # no seed: the server's cache must hold no prefix of these prompts from an earlier load
    shared = rng.choices(client.TOKENS, k=load.input * load.prefix_hit // 100)

    def prompts(n: int) -> list[list[int]]:
        return [shared + rng.choices(client.TOKENS, k=load.input - len(shared)) for _ in range(n)]

    short = [rng.choices(client.TOKENS, k=min(load.input, WARM_UP_INPUT)) for _ in range(load.concurrency)]
    async with client.client_session() as session:
        ask = partial(client.request, session, server)
        await asyncio.gather(*(ask(prompt, WARM_UP_OUTPUT) for prompt in short))
        for prompt in prompts(WARM_UP_REQUESTS):
            await ask(prompt, WARM_UP_OUTPUT)
        asked = prompts(load.concurrency)
        watch = asyncio.create_task(watch_tokens(server))
        start = time.perf_counter()
        users = [asyncio.create_task(ask(prompt, load.output)) for prompt in asked]
        try:
            answers = await asyncio.gather(*users)
            seconds = time.perf_counter() - start
        finally:
            for task in (watch, *users):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await watch
    return answers, seconds, watch.result()


async def watch_tokens(server: client.Server) -> int | None:
    """The peak of `kv_tokens` until cancelled."""
    peak = None
    with suppress(asyncio.CancelledError):
        while (now := await asyncio.to_thread(server.kv_tokens)) is not None:
            peak = max(peak or 0, now)
            await asyncio.sleep(POLL)
    return peak


def sweep(server: Server, loads: list[Load], limit: float, rows: Path) -> None:
    begin = time.monotonic()
    if not server.open():
        print(f"{server.cache.name}: the server ended, see its log", flush=True)
        return
    print(f"{server.cache.name}: up after {time.monotonic() - begin:.0f} s", flush=True)
    warm_up = Load(loads[0].input, WARM_UP, 2, 0)
    for load in (warm_up, *loads):
        try:
            asked = client.Server.find(server.url, None)
            answers = asyncio.run(asyncio.wait_for(drive(asked, load), limit))
        except (TimeoutError, client.ServerError) as error:
            print(f"{server.cache.name}: {load} failed: {error or f'no end after {limit} s'}", flush=True)
            continue
        if load is not warm_up:
            row = row_of(asked, load, *answers, server.cache.name, client.this_machine())
            append_rows(rows, [asdict(row)])
            print(row, flush=True)
    server.end()


if __name__ == "__main__":
    main()
