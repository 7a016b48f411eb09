"""`kvfold bench soak`: a server under mixed load for a long time. Any OpenAI endpoint will do.

Users send one request after the other. Lengths of prompts and answers differ. Half of the prompts begin with the
beginning of one of a few texts, which the server may find in its prefix cache. Some users leave before their answer is
complete. Every other answer must come, with as many tokens as were asked for.
"""

import asyncio
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
import numpy as np
import torch

from kvfold.bench.client import (
    TOKENS,
    Answer,
    Server,
    ServerError,
    client_session,
    percentiles,
    request,
    served_by,
)

SHARED_TEXTS = 8
SHORTEST = 8  # tokens of a prompt
MOST_LOST = 10  # answers; then the soak ends
SETTLED = 0.2  # of the time: until then a server may still take memory
FREED = 10.0  # seconds in which a server must free what it holds for users that left
POLL = 1.0  # seconds between two reads of memory


@dataclass(frozen=True)
class Soak:
    users: int
    seconds: float
    requests: int | None  # at most; None: as many as the time allows
    longest: int  # tokens of a prompt
    output: int  # tokens of an answer, at most
    leaving: int  # percent of the requests whose user leaves
    seed: int = 0


@dataclass
class Seen:
    """What has happened so far."""

    answers: list[Answer] = field(default_factory=list)
    left: int = 0
    lost: list[str] = field(default_factory=list)  # why
    memory: list[tuple[float, int]] = field(default_factory=list)  # seconds since the start, and bytes

    @property
    def requests(self) -> int:
        return len(self.answers) + self.left + len(self.lost)


@dataclass(frozen=True)
class Row:
    engine: str
    version: str
    model: str
    recipe: str
    users: int
    longest: int
    output: int
    seconds: float
    requests: int
    answered: int
    left: int
    lost: int
    system_tps: float  # tokens of whole answers per second
    ttft_p50: float  # seconds to the first token
    ttft_p99: float
    gap_p50: float  # seconds between two events of an answer, of which each has a token or more
    gap_p99: float
    gap_p999: float
    kv_tokens_left: int | None  # held after the last answer; None: the server does not say
    memory_begin_mib: int | None  # of the GPU, after a fifth of the time; None: this machine has no GPU
    memory_end_mib: int | None
    gpu: str
    date: str


def run(
    server: Server, soak: Soak, recipe: str, gpu: str, progress: Callable[[float], None] = lambda share: None
) -> tuple[Row, list[str]]:
    """What was measured, and why answers were lost. When many are, the run ends."""
    seen, seconds = asyncio.run(drive(server, soak, progress))
    if not seen.answers:
        why = seen.lost[0] if seen.lost else "all users left"
        raise ServerError(f"{server.url} answered none of {seen.requests} requests: {why}")
    ttft = np.array([answer.ttft for answer in seen.answers])
    gaps = np.array([gap for answer in seen.answers for gap in answer.gaps] or [math.nan])
    begin = next((size for at, size in seen.memory if at >= SETTLED * seconds), None)
    end = seen.memory[-1][1] if seen.memory else None
    row = Row(
        **served_by(server, recipe, gpu),
        users=soak.users,
        longest=soak.longest,
        output=soak.output,
        seconds=round(seconds, 1),
        requests=seen.requests,
        answered=len(seen.answers),
        left=seen.left,
        lost=len(seen.lost),
        system_tps=round(sum(answer.tokens for answer in seen.answers) / seconds, 1),
        **percentiles("ttft", ttft, 50, 99),
        **percentiles("gap", gaps, 50, 99, 99.9),
        kv_tokens_left=_freed(server),
        memory_begin_mib=None if begin is None else begin >> 20,
        memory_end_mib=None if end is None else end >> 20,
    )
    return row, seen.lost


async def drive(server: Server, soak: Soak, progress: Callable[[float], None]) -> tuple[Seen, float]:
    """All that happens until the last answer, and the seconds that it took."""
    draw, seen, start = random.Random(soak.seed), Seen(), time.perf_counter()
    texts = [draw.choices(TOKENS, k=soak.longest) for _ in range(SHARED_TEXTS)]
    begun = 0

    def ended() -> bool:
        late = time.perf_counter() - start >= soak.seconds
        return late or begun == soak.requests or len(seen.lost) >= MOST_LOST

    async def user(session: aiohttp.ClientSession) -> None:
        nonlocal begun
        while not ended():
            begun += 1
            prompt, tokens = _prompt(draw, texts, soak.longest), draw.randint(1, soak.output)
            longest = max((answer.e2e for answer in seen.answers), default=1.0)
            patience = draw.uniform(0, longest) if draw.random() < soak.leaving / 100 else None
            try:
                async with asyncio.timeout(patience):
                    seen.answers.append(await request(session, server, prompt, tokens))
            except TimeoutError:
                seen.left += 1
            except ServerError as error:
                seen.lost.append(str(error))

    async def watch() -> None:
        done = 0.0
        while True:
            seconds = time.perf_counter() - start
            if torch.cuda.is_available():
                free, total = torch.cuda.mem_get_info()
                seen.memory.append((seconds, total - free))
            share = min(1.0, max(seconds / soak.seconds, seen.requests / soak.requests if soak.requests else 0))
            progress(share - done)
            done = share
            await asyncio.sleep(POLL)

    async with client_session() as session:
        watching = asyncio.create_task(watch())
        try:
            await asyncio.gather(*(user(session) for _ in range(soak.users)))
        finally:
            watching.cancel()
    return seen, time.perf_counter() - start


def _prompt(draw: random.Random, texts: list[list[int]], longest: int) -> list[int]:
    """Short prompts are as many as long ones ten times their length."""
    length = round(math.exp(draw.uniform(math.log(min(SHORTEST, longest)), math.log(longest))))
    shared = draw.randint(0, length) if draw.random() < 0.5 else 0
    return draw.choice(texts)[:shared] + draw.choices(TOKENS, k=length - shared)


def _freed(server: Server) -> int | None:
    """Tokens that a server holds though nobody waits for an answer."""
    end = time.perf_counter() + FREED
    while (held := server.kv_tokens()) and time.perf_counter() < end:
        time.sleep(0.2)
    return held
