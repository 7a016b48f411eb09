"""A decode step of one layer on a GPU, kernel by kernel: when each begins, and how long it lasts.

    python benchmarks/timeline.py 8x700 1x100000 -r oscar-int2:group=128 -r saw-int4
    python benchmarks/timeline.py 8x700 --folded --csv rows.csv      # values without a rotation, as `kvfold fold` makes

Steps run as in an engine: captured in one CUDA graph, with page tables for the longest context that the server allows.
Kernels that are launched early overlap with those before them, and seem to last longer.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import pad
from torch.profiler import ProfilerActivity, profile

from kvfold.bench.cuda_graphs import capture
from kvfold.bench.kernel_cases import Case
from kvfold.bench.kernel_times import fill
from kvfold.files import append_rows
from kvfold.recipes import parse

STEPS, REPLAYS = 6, 5


@dataclass(frozen=True)
class Row:
    recipe: str
    batch: int
    context: int
    folded: bool
    kernel: str
    start_us: float
    us: float
    gpu: str
    torch: str
    date: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="+", help="sequences and tokens per sequence: 8x700")
    parser.add_argument("-r", "--recipe", action="append", help="default: oscar-int2:group=128")
    parser.add_argument("--folded", action="store_true", help="values are not rotated")
    parser.add_argument("--longest", type=int, default=131072, help="tokens that page tables have room for")
    parser.add_argument("--csv", type=Path, help="rows are added to it")
    options = parser.parse_args()
    for text in options.case:
        for name in options.recipe or ["oscar-int2:group=128"]:
            rows = run(text, name, options.folded, options.longest)
            print(f"{text} {name}")
            for row in rows:
                print(f"  {row.start_us:7.1f} + {row.us:6.1f} us  {row.kernel}")
            if options.csv:
                append_rows(options.csv, [asdict(row) for row in rows])


@torch.no_grad()
def run(text: str, name: str, folded: bool, longest: int) -> list[Row]:
    case = Case.parse("decode", text)
    ops, pages, q, k, v, _ = fill(case, parse(name), torch.device("cuda"))
    if folded:
        pages = replace(pages, value=replace(pages.value, transform=replace(pages.value.transform, rotation=None)))
    room = max(0, longest // case.page - pages.step.table.shape[1])
    step = replace(pages.step, table=pad(pages.step.table, (0, room)))
    layers = [replace(pages, step=step, pool=pages.pool.clone(), ring=pages.ring.clone()) for _ in range(STEPS)]
    out = torch.empty_like(q)

    def steps() -> None:
        for layer in layers:
            ops.store_and_attend(layer, q, k, v, case.logits, out)

    graph, _ = capture(lambda: None, steps)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    events = [
        (event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    facts = (torch.cuda.get_device_name(), torch.__version__, datetime.now(UTC).date().isoformat())
    return [Row(name, case.batch, case.context, folded, *kernel, *facts) for kernel in timeline(events)]


def timeline(events: Sequence[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """The median step of kernels (name, start, duration). Starts count from the beginning of the step.

    A step begins wherever the first kernel comes again.
    """
    events = sorted(events, key=lambda event: event[1])
    firsts = [i for i, (name, *_) in enumerate(events) if name == events[0][0]]
    steps = [events[i:j] for i, j in zip(firsts, [*firsts[1:], len(events)], strict=True)]
    usual = [step for step in steps if [name for name, *_ in step] == [name for name, *_ in steps[0]]]
    return [
        (
            kernel[0][0],
            round(median(event[1] - step[0][1] for event, step in zip(kernel, usual, strict=True)), 2),
            round(median(event[2] for event in kernel), 2),
        )
        for kernel in zip(*usual, strict=True)
    ]


if __name__ == "__main__":
    main()
