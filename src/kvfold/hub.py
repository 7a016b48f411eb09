"""The Hugging Face Hub, which is asked only while it answers: its own client retries for half a minute."""

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
    """Calls of huggingface_hub and transformers: those of a Hub that is silent read the files on this machine alone."""
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
    """Once."""
    Console(stderr=True).print(line, soft_wrap=True, highlight=False)


def silent() -> bool:
    """Whether the Hub does not answer now. HF_HUB_OFFLINE in the environment, 0 or 1, spares the question."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or OFFLINE in os.environ:
        return False
    return not _answers(constants.ENDPOINT, int(time.monotonic() // 60))


def tell_engine(model: str) -> None:
    """Keep an engine that is started next, in this process or others, from asking a silent Hub for a model."""
    if not Path(model).exists() and silent():
        from huggingface_hub import constants

        os.environ[OFFLINE], constants.HF_HUB_OFFLINE = "1", True


def unreachable() -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT} does not answer; HF_HUB_ETAG_TIMEOUT=60 waits longer than {_patience():g} seconds"


def why(error: Exception) -> str:
    """What to tell the user where the Hub gave nothing."""
    return f"it is not in the local cache, and {unreachable()}" if silent() else " ".join(str(error).split())


def _patience() -> float:
    own = os.environ.get("HF_HUB_ETAG_TIMEOUT", "")
    return float(own) if own.isdecimal() and int(own) else PATIENCE


@lru_cache(maxsize=1)
def _answers(endpoint: str, minute: int) -> bool:
    """Whether anything answers there; asked once a minute at most."""
    from huggingface_hub import get_session

    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(get_session().head(endpoint, timeout=_patience()))
        except Exception:  # of whichever HTTP library the Hub's client uses
            return

    # in a thread, as looking up a name cannot be limited in time
    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_patience())
    return bool(answers)
