"""CUDA graphs, and timing by them: calls run over more data than the L2 cache holds; what is compared takes turns."""

import math
import statistics
from collections.abc import Callable
from typing import TypeVar

import torch

CAPACITIES = 4  # the copies of a call's data together are that many times as large as the L2 cache
MAX_COPIES = 256
GRAPH_MS = 10  # a graph lasts about as long, so that its launch does not count
REPLAYS = 20
WARM_UP = 2  # calls before one is captured: they compile, and allocate what stays

Calls = list[Callable[[], object]]
T = TypeVar("T")


def copies(size: int, device: torch.device) -> int:
    """How many copies of `size` bytes calls should take turns on: two at least."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    return min(MAX_COPIES, max(2, math.ceil(CAPACITIES * cache / size)))


def times(runs: dict[str, Calls]) -> dict[str, float]:
    """Microseconds of a call of each run: the median over replays."""
    graphs = {name: _capture(calls) for name, calls in runs.items()}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPLAYS + 1):
        for name, (graph, calls) in graphs.items():
            taken[name].append(1000 * milliseconds(graph.replay) / calls)
    return {name: statistics.median(each[1:]) for name, each in taken.items()}  # the first is to warm up


def capture(begin: Callable[[], object], call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of a call, and what it returns, where every replay puts it. `begin` runs before the call each time and is
    not captured; it has to run before every replay but the first, if at all."""
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
    """A graph with all calls, over and over where they are short, and how many there are in it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:  # compiles
            call()
        once = milliseconds(lambda: [call() for call in calls])
    rounds = max(1, math.ceil(GRAPH_MS / once))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls * rounds:
            call()
    return graph, len(calls) * rounds


def milliseconds(run: Callable[[], object]) -> float:
    """Of what it puts on the current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
