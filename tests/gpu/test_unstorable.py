"""NaN and Inf of one sequence on a GPU: what a step of all others reads and writes stays the same to the bit."""

import pytest
import torch
from page_views import value_views

if not torch.cuda.is_available():
    pytest.skip(f"kernels for GPUs need one, and torch {torch.__version__} sees none", allow_module_level=True)

from kvfold.bench.cuda_graphs import capture
from kvfold.bench.kernel_cases import Case
from kvfold.bench.kernel_times import fill
from kvfold.recipes import parse

DEVICE = torch.device("cuda")
POISONED, HALF = 4, 6  # sequences: all of its step is NaN; a coordinate of a value is Inf
RECIPES = [
    "int4:centre=false",
    "int8",
    "saw-int4",
    "saw-int4:block=16",
    "oscar-int2:group=128",
    "oscar-int2:block=0",
    "gtq-k3v3",
    "gtq-k3v3:block=64",
    "bf16",
]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("op", "text"), [("decode", "9x700"), ("extend", "9x700+80"), ("extend", "9x2000+70")])
@torch.no_grad()
def test_nan_of_one_sequence_changes_no_other(recipe, op, text):
    """Decoded, eager and as a CUDA graph; prompts that are unpacked, or not."""
    case = Case.parse(op, text)
    ops, pages, *clean, _ = fill(case, parse(recipe), DEVICE)
    memory = pages.pool, pages.ring
    before = [x.clone() for x in memory]
    given = [x.clone() for x in clean]
    broken = [x.clone() for x in clean]
    last = [(row + 1) * case.new - 1 for row in range(case.batch)]  # its last token, per sequence
    for x in broken:
        x[last[POISONED]] = torch.nan
    broken[2][last[HALF], 3, 70] = torch.inf

    def step():
        return ops.store_and_attend(pages, *given, case.logits)

    def after(run, states):
        """The output of a step, and all that it has written."""
        for x, was in zip((*memory, *given), (*before, *states), strict=True):
            x.copy_(was)
        pages.faults.zero_()
        out = run()
        return [x.clone() for x in (out, *memory)], pages.faults.nonzero().flatten().tolist()

    expected, none = after(step, clean)
    assert none == []
    runs = [step]
    if op == "decode":
        graph, replayed = capture(lambda: None, step)
        runs.append(lambda: (graph.replay(), replayed)[1])
    locations = pages.step.locations[last]
    for run in runs:
        (out, pool, _), marked = after(run, broken)
        assert sorted(marked) == sorted(locations[[POISONED, HALF]].tolist())
        others = [row for row in range(case.batch) if row not in (POISONED, HALF)]
        own, clean_own = (x.unflatten(0, (case.batch, case.new)) for x in (out, expected[0]))
        assert torch.equal(own[others], clean_own[others])
        assert own[HALF].isfinite().all()
        tables = pages.step.table
        assert torch.equal(pool[tables[others]], expected[1][tables[others]])
        views = value_views(pages.layout, pool)
        for sequence, head in ((POISONED, 0), (HALF, 3)):
            page, offset = divmod(int(locations[sequence]), case.page)
            codes, meta = (x[page, head, offset] for x in views)
            assert (pages.value.dequantize(codes[None, None], meta[None, None]) == 0).all()
