"""A server under load: any OpenAI endpoint, prompts and answers of fixed lengths, so many users at a time.

Each user sends its next request when the last is answered. Prompts are random token ids; as much of them as asked for
is the same for all, and in the server's prefix cache before timing begins.
"""

import asyncio
import json
import platform
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

import numpy as np
import torch

TOKENS = range(1000, 30000)  # ids that every vocabulary has, and no special ones
# Requests before timing: a short one of each user, all at once, as servers compile for numbers of requests; then some
# like those that are timed, which leave the shared prefix in the cache
WARM_UP_INPUT = 16  # tokens of the short ones
WARM_UP = 2  # others
WARM_UP_OUTPUT = 4  # tokens of each answer
POLL = 0.25  # seconds between looks at the server's metrics
WAIT = 10.0  # seconds for what is not an answer


class ServerError(ValueError):
    """What the server does not do; the message says what to change."""


@dataclass(frozen=True)
class Load:
    """One point of a sweep."""

    input: int  # tokens of each prompt
    output: int  # tokens of each answer
    concurrency: int  # users
    prefix_hit: int  # percent of each prompt that is the same for all
    rounds: int  # requests of each user

    @property
    def requests(self) -> int:
        return self.concurrency * self.rounds


@dataclass(frozen=True)
class Server:
    url: str
    model: str
    engine: str
    version: str

    @classmethod
    def find(cls, url: str, model: str | None) -> "Server":
        """The server at `url` with its model of that name, or its only one."""
        url = url.rstrip("/").removesuffix("/v1")
        try:
            served = [entry["id"] for entry in json.loads(_get(f"{url}/v1/models"))["data"]]
        except (HTTPError, HTTPException, KeyError, TypeError, ValueError) as error:
            raise ServerError(f"{url} is no OpenAI endpoint: {url}/v1/models gives no models ({error})") from None
        except OSError as error:
            raise ServerError(f"no server answers at {url}: {error}") from None
        if model is None and len(served) != 1:
            raise ServerError(f"{url} serves {', '.join(served) or 'nothing'}: choose one with --model")
        if model is not None and model not in served:
            raise ServerError(f"{url} does not serve {model}, it serves {', '.join(served)}")
        return cls(url, model or served[0], *_engine(url))

    def kv_tokens(self) -> int | None:
        """Tokens that the cache holds for running requests, where the server says so."""
        try:
            text = _get(f"{self.url}/metrics")
        except (OSError, HTTPException):
            return None
        if used := _values(text, "sglang:num_used_tokens"):
            return int(sum(value for _, value in used))
        shares, sizes = _values(text, "vllm:kv_cache_usage_perc"), _values(text, "vllm:cache_config_info")
        if not shares or len(sizes) != len(shares):  # one of each for every engine behind the server
            return None
        tokens = (int(labels["num_gpu_blocks"]) * int(labels["block_size"]) for labels, _ in sizes)
        return round(sum(size * share for size, (_, share) in zip(tokens, shares, strict=True)))


@dataclass(frozen=True)
class Answer:
    """Seconds from the request to the first token and to the last."""

    ttft: float
    e2e: float


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
    request_tps: float  # of one answer after its first token; the median request
    ttft_p50: float  # seconds
    ttft_p90: float
    ttft_p99: float
    e2e_p50: float
    e2e_p90: float
    e2e_p99: float
    kv_tokens: int | None  # at most, in running requests; None: the server does not say
    gpu: str
    date: str


def run(
    server: Server,
    loads: Sequence[Load],
    recipe: str,
    gpu: str,
    progress: Callable[[float], None] = lambda share: None,
) -> Iterator[Row]:
    """Every load after the other; a request that fails ends the run."""
    requests = sum(load.requests for load in loads)
    for load in loads:
        answers, seconds, kv_tokens = asyncio.run(drive(server, load, lambda: progress(1 / requests)))
        yield row(server, load, answers, seconds, kv_tokens, recipe, gpu)


def this_machine() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


def row(
    server: Server, load: Load, answers: list[Answer], seconds: float, kv_tokens: int | None, recipe: str, gpu: str
) -> Row:
    ttft, e2e = (np.array([getattr(answer, name) for answer in answers]) for name in ("ttft", "e2e"))
    percentiles = {
        f"{name}_p{p}": round(float(np.percentile(times, p)), 4)
        for name, times in (("ttft", ttft), ("e2e", e2e))
        for p in (50, 90, 99)
    }
    return Row(
        engine=server.engine,
        version=server.version,
        model=server.model,
        recipe=recipe,
        input=load.input,
        output=load.output,
        concurrency=load.concurrency,
        prefix_hit=load.prefix_hit,
        requests=load.requests,
        system_tps=round(load.requests * load.output / seconds, 2),
        request_tps=round(float(np.median((load.output - 1) / (e2e - ttft))), 2),
        **percentiles,
        kv_tokens=kv_tokens,
        gpu=gpu,
        date=datetime.now(UTC).date().isoformat(),
    )


async def drive(server: Server, load: Load, answered: Callable[[], None]) -> tuple[list[Answer], float, int | None]:
    """All answers of a load, the seconds they took together, and the most tokens that the cache held."""
    rng = random.Random()  # no seed: what an earlier load left in the server's cache must be no prefix of these prompts
    shared = rng.choices(TOKENS, k=load.input * load.prefix_hit // 100)

    def prompts(n: int) -> list[list[int]]:
        return [shared + rng.choices(TOKENS, k=load.input - len(shared)) for _ in range(n)]

    short = [rng.choices(TOKENS, k=min(load.input, WARM_UP_INPUT)) for _ in range(load.concurrency)]
    await asyncio.gather(*(request(server, prompt, WARM_UP_OUTPUT) for prompt in short))
    for prompt in prompts(WARM_UP):
        await request(server, prompt, WARM_UP_OUTPUT)
    waiting, answers = prompts(load.requests), list[Answer]()

    async def user() -> None:
        while waiting:
            answers.append(await request(server, waiting.pop(), load.output))
            answered()

    watch = asyncio.create_task(_watch(server))
    start = time.perf_counter()
    users = [asyncio.create_task(user()) for _ in range(load.concurrency)]
    try:
        await asyncio.gather(*users)
        seconds = time.perf_counter() - start
    finally:
        for task in (watch, *users):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await watch
    return answers, seconds, watch.result()


async def _watch(server: Server) -> int | None:
    """The most tokens in the cache until cancelled."""
    peak = None
    with suppress(asyncio.CancelledError):
        while (now := await asyncio.to_thread(server.kv_tokens)) is not None:
            peak = max(peak or 0, now)
            await asyncio.sleep(POLL)
    return peak


async def request(server: Server, prompt: list[int], output: int) -> Answer:
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,  # as vLLM and SGLang call it
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage: dict[str, int] = {}
    ttft = reason = None
    start = time.perf_counter()
    async for event in _stream(f"{server.url}/v1/completions", body):
        if "error" in event:
            raise ServerError(f"{server.url} gave up on a request: {event['error']}")
        if event.get("choices") and ttft is None:
            ttft = time.perf_counter() - start
        for choice in event.get("choices", ()):
            reason = choice.get("finish_reason") or reason
        usage = event.get("usage") or usage
    e2e = time.perf_counter() - start
    if (sent := usage.get("prompt_tokens")) != len(prompt):
        raise ServerError(f"{server.url} read a prompt of {len(prompt)} tokens as {sent}")
    if (got := usage.get("completion_tokens")) != output or ttft is None:
        raise ServerError(
            f"{server.url} gave {got} tokens of {output} (it finished for {reason!r}): the server must know "
            "ignore_eos, and its context hold prompt and answer"
        )
    return Answer(ttft, e2e)


async def _stream(url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The events of a POST that is answered as a stream of them."""
    parts = urlsplit(url)
    secure, content = parts.scheme == "https", json.dumps(body).encode()
    try:
        reader, writer = await asyncio.open_connection(
            parts.hostname, parts.port or (443 if secure else 80), ssl=secure or None, limit=2**24
        )
    except OSError as error:
        raise ServerError(f"no server answers at {parts.scheme}://{parts.netloc}: {error}") from None
    try:
        head = (
            f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + content)
        await writer.drain()
        status = (await reader.readuntil(b"\r\n")).split(None, 2)
        headers = {}
        while line := (await reader.readline()).strip():
            name, _, value = line.partition(b":")
            headers[name.lower()] = value.strip().lower()
        text = _chunks(reader) if headers.get(b"transfer-encoding") == b"chunked" else reader
        if status[1:2] != [b"200"]:
            said = b"".join([line async for line in text]).decode(errors="replace")
            raise ServerError(f"{url} refused a request: {b' '.join(status[1:]).decode().strip()}: {said.strip()}")
        async for event in _lines(text):
            if event.startswith(b"data:") and event != b"data: [DONE]":
                yield json.loads(event.removeprefix(b"data:"))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise ServerError(f"{url} broke off an answer: {error}") from None
    finally:
        writer.close()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The body of an answer with `Transfer-Encoding: chunked`."""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.strip()


def _get(url: str) -> str:
    with urlopen(url, timeout=WAIT) as answer:
        return answer.read().decode()


def _engine(url: str) -> tuple[str, str]:
    """Name and version of the engine, as far as it says so."""
    for engine, path in (("vllm", "version"), ("sglang", "get_server_info")):
        with suppress(OSError, ValueError, KeyError, TypeError, HTTPException):
            return engine, str(json.loads(_get(f"{url}/{path}"))["version"])
    return "unknown", ""


def _values(text: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Labels and values of a metric in Prometheus' text format, one for each set of labels."""
    found = []
    for line in text.splitlines():
        if line.startswith((name + "{", name + " ")):
            labels, _, value = line.removeprefix(name).rpartition(" ")
            pairs = (pair.partition("=") for pair in labels.strip("{} ").split('",') if pair)
            found.append(({key.strip(): value.strip('"') for key, _, value in pairs}, float(value)))
    return found
