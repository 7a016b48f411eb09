"""Kernels of a step that begin before those before them have ended: they read what they would if each waited."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip(f"kernels overlap on a GPU only, and torch {torch.__version__} sees none", allow_module_level=True)

from kvfold.bench.graphs import capture
from kvfold.bench.kernels import Case, fill
from kvfold.recipes import parse

RECIPES = [
    "int4:centre=false",
    "saw-int4",
    "saw-int4:sink=4",
    "oscar-int2:group=128",
    "oscar-int2:sink=0,recent=0",
    "oscar-int2:sink=4,recent=0",
    "gtq-k3v3",
]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("text", ["1x1", "1x30000", "8x64", "64x700"])
@torch.no_grad()
def test_a_step_in_a_row_is_one_that_waits_after_every_op(recipe, text):
    """Other tokens lie where the step's own go: whoever reads before `store` has written gives another output."""
    case = Case.parse("decode", text)
    ops, pages, q, k, *_ = fill(case, parse(recipe), torch.device("cuda"))
    new = [torch.randn(2, *k.shape, device="cuda").to(k.dtype) for _ in range(20)]
    given, outs = torch.empty(2, *k.shape, dtype=k.dtype, device="cuda"), []

    def step():
        return ops.decode.run(pages, q, ops.store.run(pages, *given), case.scale)

    def misplace(x):
        ops.store.run(pages, *(100 * x))
        torch.cuda.synchronize()
        given.copy_(x)

    for x in new:
        misplace(x)
        stored = ops.store.run(pages, *given)
        torch.cuda.synchronize()
        outs.append(ops.decode.run(pages, q, stored, case.scale).clone())
    graph, replayed = capture(lambda: None, step)
    for x, expected in zip(new, outs, strict=True):
        misplace(x)
        assert torch.equal(step(), expected)
        misplace(x)
        graph.replay()
        assert torch.equal(replayed, expected)
