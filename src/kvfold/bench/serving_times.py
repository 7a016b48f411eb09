"""`kvfold bench serving`: a server under load. Any OpenAI endpoint will do.

Prompts and answers have fixed lengths. Each user sends its next request when the last is answered. Prompts are random
token ids. A given share of every prompt is the same for all users, and is in the server's prefix cache before timing
begins.
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
from functools import partial
from http.client import HTTPException
from itertools import pairwise
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import aiohttp
import numpy as np
import torch

TOKENS = range(1000, 30000)  # ids that every vocabulary has and that are not special
# Requests before timing come in two parts. First one short request per user, all at once: servers compile kernels per
# number of requests. Then some requests like the timed ones, which leave the shared prefix in the cache.
WARM_UP_INPUT = 16  # tokens of a short prompt
WARM_UP = 2  # requests of the second part
WARM_UP_OUTPUT = 4  # tokens per answer, in both parts
POLL = 0.25  # seconds between two reads of the server's metrics
WAIT = 10.0  # the time-out of all requests but completions, in seconds


class ServerError(ValueError):
    """The server cannot be measured. The message says what to change."""


@dataclass(frozen=True)
class Load:
    """One point of a sweep."""

    input: int  # tokens per prompt
    output: int  # tokens per answer
    concurrency: int  # users
    prefix_hit: int  # percent of each prompt that is the same for all
    rounds: int  # requests per user

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
        """The server at `url`, with its model of that name. With None, it must serve a single model."""
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
        """Tokens that the cache holds for running requests. None: the server does not say."""
        try:
            text = _get(f"{self.url}/metrics")
        except (OSError, HTTPException):
            return None
        if used := _values(text, "sglang:num_used_tokens"):
            return int(sum(value for _, value in used))
        shares, sizes = _values(text, "vllm:kv_cache_usage_perc"), _values(text, "vllm:cache_config_info")
        if not shares or len(sizes) != len(shares):  # one of each per engine behind the server
            return None
        tokens = (int(labels["num_gpu_blocks"]) * int(labels["block_size"]) for labels, _ in sizes)
        return round(sum(size * share for size, (_, share) in zip(tokens, shares, strict=True)))


@dataclass(frozen=True)
class Answer:
    """Seconds from the request to the first token and to the last, and between events with tokens."""

    ttft: float
    e2e: float
    gaps: tuple[float, ...] = ()
    tokens: int = 0


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


def run(
    server: Server,
    loads: Sequence[Load],
    recipe: str,
    gpu: str,
    progress: Callable[[float], None] = lambda share: None,
) -> Iterator[Row]:
    """Run one load after the other. A request that fails ends the run."""
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
    return Row(
        **served_by(server, recipe, gpu),
        input=load.input,
        output=load.output,
        concurrency=load.concurrency,
        prefix_hit=load.prefix_hit,
        requests=load.requests,
        system_tps=round(load.requests * load.output / seconds, 2),
        request_tps=round(float(np.median((load.output - 1) / (e2e - ttft))), 2),
        **percentiles("ttft", ttft, 50, 90, 99),
        **percentiles("e2e", e2e, 50, 90, 99),
        kv_tokens=kv_tokens,
    )


def served_by(server: Server, recipe: str, gpu: str) -> dict[str, Any]:
    """The columns of a row that say who answered, and where."""
    date = datetime.now(UTC).date().isoformat()
    who = {"engine": server.engine, "version": server.version, "model": server.model}
    return {**who, "recipe": recipe, "gpu": gpu, "date": date}


def percentiles(name: str, times: "np.ndarray[Any, Any]", *shares: float) -> dict[str, Any]:
    """As columns: of 99.9 percent, the name ends in `p999`."""
    return {f"{name}_p{share:g}".replace(".", ""): round(float(np.percentile(times, share)), 4) for share in shares}


async def drive(server: Server, load: Load, answered: Callable[[], None]) -> tuple[list[Answer], float, int | None]:
    """All answers of a load, the seconds from the first request to the last token, and the peak of `kv_tokens`."""
    rng = random.Random()  # no seed: the server's cache must hold no prefix of these prompts from an earlier load
    shared = rng.choices(TOKENS, k=load.input * load.prefix_hit // 100)

    def prompts(n: int) -> list[list[int]]:
        return [shared + rng.choices(TOKENS, k=load.input - len(shared)) for _ in range(n)]

    short = [rng.choices(TOKENS, k=min(load.input, WARM_UP_INPUT)) for _ in range(load.concurrency)]
    async with client_session() as session:
        ask = partial(request, session, server)
        await asyncio.gather(*(ask(prompt, WARM_UP_OUTPUT) for prompt in short))
        for prompt in prompts(WARM_UP):
            await ask(prompt, WARM_UP_OUTPUT)
        waiting, answers = prompts(load.requests), list[Answer]()

        async def user() -> None:
            while waiting:
                answers.append(await ask(waiting.pop(), load.output))
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
    """The peak of `kv_tokens` until cancelled."""
    peak = None
    with suppress(asyncio.CancelledError):
        while (now := await asyncio.to_thread(server.kv_tokens)) is not None:
            peak = max(peak or 0, now)
            await asyncio.sleep(POLL)
    return peak


async def request(session: aiohttp.ClientSession, server: Server, prompt: list[int], output: int) -> Answer:
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
    reason, moments = None, list[float]()
    start = time.perf_counter()
    async for event in _stream(session, server, body):
        if "error" in event:
            raise ServerError(f"{server.url} gave up on a request: {event['error']}")
        if event.get("choices"):
            moments.append(time.perf_counter() - start)
        for choice in event.get("choices", ()):
            reason = choice.get("finish_reason") or reason
        usage = event.get("usage") or usage
    e2e = time.perf_counter() - start
    if (sent := usage.get("prompt_tokens")) != len(prompt):
        raise ServerError(f"{server.url} read a prompt of {len(prompt)} tokens as {sent}")
    if (got := usage.get("completion_tokens")) != output or not moments:
        raise ServerError(
            f"{server.url} gave {got} tokens of {output} (it finished for {reason!r}): the server must know "
            "ignore_eos, and its context hold prompt and answer"
        )
    return Answer(moments[0], e2e, tuple(after - before for before, after in pairwise(moments)), output)


def client_session() -> aiohttp.ClientSession:
    """A client without time-outs. Every request opens a connection of its own."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        headers={"Accept-Encoding": "identity"},
        read_bufsize=2**24,  # bounds the length of a line
        timeout=aiohttp.ClientTimeout(),
    )


async def _stream(
    session: aiohttp.ClientSession, server: Server, body: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """The server-sent events that answer a request."""
    url = f"{server.url}/v1/completions"
    try:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                status = f"{response.status} {response.reason}".strip()
                raise ServerError(f"{url} refused a request: {status}: {(await response.text()).strip()}")
            async for line in response.content:
                event = line.strip()
                if event.startswith(b"data:") and event != b"data: [DONE]":
                    yield json.loads(event.removeprefix(b"data:"))
    except aiohttp.ClientConnectorError as error:
        raise ServerError(f"no server answers at {server.url}: {error.os_error}") from None
    except aiohttp.ClientError as error:
        raise ServerError(f"{url} broke off an answer: {error}") from None


def _get(url: str) -> str:
    with urlopen(url, timeout=WAIT) as answer:
        return answer.read().decode()


def _engine(url: str) -> tuple[str, str]:
    """The name and version of the engine, if it tells them."""
    for engine, path in (("vllm", "version"), ("sglang", "get_server_info")):
        with suppress(OSError, ValueError, KeyError, TypeError, HTTPException):
            return engine, str(json.loads(_get(f"{url}/{path}"))["version"])
    return "unknown", ""


def _values(text: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Labels and values of a metric in Prometheus' text format, one pair per set of labels."""
    found = []
    for line in text.splitlines():
        if line.startswith((name + "{", name + " ")):
            labels, _, value = line.removeprefix(name).rpartition(" ")
            pairs = (pair.partition("=") for pair in labels.strip("{} ").split('",') if pair)
            found.append(({key.strip(): value.strip('"') for key, _, value in pairs}, float(value)))
    return found
