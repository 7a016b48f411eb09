"""Capturing CUDA graphs, and timing by their replays.

Calls run over more data than the L2 cache holds. Graphs that are compared are replayed in turns.
"""

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

CAPACITIES = 4  # all copies of a call's data together are this many times as large as the L2 cache
MAX_COPIES = 256
GRAPH_MS = 10  # a graph takes at least this long, so that its launch does not count
REPLAYS = 20
WARM_UP = 2  # calls before the captured one: they compile kernels, and allocate lasting memory

Calls = list[Callable[[], object]]
T = TypeVar("T")


def copies(size: int, device: torch.device) -> int:
    """How many copies of `size` bytes the calls should take turns on, at least 2."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    return min(MAX_COPIES, max(2, math.ceil(CAPACITIES * cache / size)))


def times(runs: dict[str, Calls]) -> dict[str, float]:
    """Microseconds per call of each run: the median over replays."""
    graphs = {name: _capture(calls) for name, calls in runs.items()}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPLAYS + 1):
        for name, (graph, calls) in graphs.items():
            taken[name].append(1000 * milliseconds(graph.replay) / calls)
    return {name: statistics.median(each[1:]) for name, each in taken.items()}  # the first replay warms up


def capture(begin: Callable[[], object], call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of one call, and the result of that call. Every replay writes its result to the same memory.

    `begin` runs before each call and is not captured. The caller runs it before every replay but the first.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            begin()
            call()
        begin()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = call()
    return graph, result


def _capture(calls: Calls) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of all calls, repeated if they are short, and the number of calls in it."""

    def run(rounds: int = 1) -> None:
        for call in calls * rounds:
            call()

    run()  # compiles
    rounds = max(1, math.ceil(GRAPH_MS / milliseconds(run)))
    return capture(lambda: None, partial(run, rounds))[0], len(calls) * rounds


def milliseconds(run: Callable[[], object]) -> float:
    """The time of the work that `run` puts on the current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
