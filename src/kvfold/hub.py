"""The Hugging Face Hub. It is asked only if it answers quickly, because its own client retries for half a minute."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from threading import Thread
from typing import Any

from rich.console import Console

PATIENCE = 3.0  # seconds to wait for a first answer, unless HF_HUB_ETAG_TIMEOUT says otherwise
OFFLINE = "HF_HUB_OFFLINE"


@contextmanager
def asked() -> Iterator[None]:
    """For calls of huggingface_hub and transformers. If the Hub is silent, they read only files on this machine."""
    from huggingface_hub import constants

    before, alone = constants.HF_HUB_OFFLINE, silent()
    constants.HF_HUB_OFFLINE = before or alone
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
    if alone:
        _say(f"{constants.ENDPOINT} does not answer: what was downloaded before is used")


@lru_cache(maxsize=1)
def _say(line: str) -> None:
    """Print a line, but not twice in a row."""
    Console(stderr=True).print(line, soft_wrap=True, highlight=False)


def silent() -> bool:
    """Whether the Hub was asked and did not answer. It is not asked if HF_HUB_OFFLINE is set, to 0 or to 1."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or OFFLINE in os.environ:
        return False
    return not _answers(constants.ENDPOINT, int(time.monotonic() // 60))


def tell_engine(model: str) -> None:
    """Called before an engine starts. If the Hub is silent, this process and its children do not ask it for a model."""
    if not Path(model).exists() and silent():
        from huggingface_hub import constants

        os.environ[OFFLINE], constants.HF_HUB_OFFLINE = "1", True


def unreachable() -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT} does not answer; HF_HUB_ETAG_TIMEOUT=60 waits longer than {_patience():g} seconds"


def why(error: Exception) -> str:
    """What to tell the user if the Hub gave nothing."""
    return f"it is not in the local cache, and {unreachable()}" if silent() else " ".join(str(error).split())


def _patience() -> float:
    own = os.environ.get("HF_HUB_ETAG_TIMEOUT", "")
    return float(own) if own.isdecimal() and int(own) else PATIENCE


@lru_cache(maxsize=1)
def _answers(endpoint: str, minute: int) -> bool:
    """Whether anything answers at `endpoint`. As `minute` is part of the cache key, it asks once a minute at most."""
    from huggingface_hub import get_session

    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(get_session().head(endpoint, timeout=_patience()))
        except Exception:  # its type depends on the HTTP library of the Hub's client
            return

    # in a thread, because a DNS lookup has no timeout
    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_patience())
    return bool(answers)
