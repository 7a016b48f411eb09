"""A client of OpenAI endpoints: requests of fixed lengths, when their tokens came, what the server says of itself."""

import json
import platform
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPException
from itertools import pairwise
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import aiohttp
import numpy as np
import torch

TOKENS = range(1000, 30000)  # ids that every vocabulary has and that are not special
WAIT = 10.0  # the time-out of all requests but completions, in seconds


class ServerError(ValueError):
    """The server cannot be measured. The message says what to change."""


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


def this_machine() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


def served_by(server: Server, recipe: str, gpu: str) -> dict[str, Any]:
    """The columns of a row that say who answered, and where."""
    date = datetime.now(UTC).date().isoformat()
    who = {"engine": server.engine, "version": server.version, "model": server.model}
    return {**who, "recipe": recipe, "gpu": gpu, "date": date}


def percentiles(name: str, times: "np.ndarray[Any, Any]", *shares: float) -> dict[str, Any]:
    """As columns: of 99.9 percent, the name ends in `p999`."""
    return {f"{name}_p{share:g}".replace(".", ""): round(float(np.percentile(times, share)), 4) for share in shares}


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
