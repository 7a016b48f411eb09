"""A plugin of vLLM and SGLang, for `sweep.py`: a server starts, and waits at its gate for its turn.

GATE is a path. A server that has come so far writes `GATE.ready`, and goes on when there is `GATE.open`.
"""

import multiprocessing
import os
import time
from pathlib import Path


def vllm() -> None:
    """Before pages are allocated: weights are loaded then, and what is compiled is compiled."""
    if "GATE" not in os.environ:
        return
    import torch
    from vllm.v1.executor.abstract import Executor

    initialize = Executor.initialize_from_config

    def wait_first(self, configs):
        torch.cuda.empty_cache()
        wait()
        return initialize(self, configs)

    Executor.initialize_from_config = wait_first


def sglang() -> None:
    """In the process of the scheduler, before anything is on the device: how many tokens fit is found out by how much
    memory is free."""
    if "GATE" in os.environ and multiprocessing.parent_process() is not None:
        wait()


def wait() -> None:
    gate = os.environ["GATE"]
    Path(f"{gate}.ready").touch()
    while not Path(f"{gate}.open").exists():
        time.sleep(0.1)
