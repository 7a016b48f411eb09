"""A plugin of vLLM and SGLang for `sweep.py`: a server starts, then waits at its gate for its turn.

The environment variable GATE is a path. At its gate a server writes `GATE.ready`. It goes on when `GATE.open` exists.
"""

import multiprocessing
import os
import time
from pathlib import Path


def vllm() -> None:
    """Wait before pages are allocated. Weights are loaded and kernels compiled by then."""
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
    """Wait in the scheduler's process, before anything is on the device: free memory decides how many tokens fit."""
    if "GATE" in os.environ and multiprocessing.parent_process() is not None:
        wait()


def wait() -> None:
    gate = os.environ["GATE"]
    Path(f"{gate}.ready").touch()
    while not Path(f"{gate}.open").exists():
        time.sleep(0.1)
