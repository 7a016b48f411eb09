"""A decode step in a CUDA graph: it is captured once and replayed while lengths grow, beside the definitions."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

if not torch.cuda.is_available():
    pytest.skip(f"CUDA graphs need a GPU, and torch {torch.__version__} sees none", allow_module_level=True)

from kvfold.bench.cuda_graphs import WARM_UP, capture
from kvfold.bench.expected_ops import naive_attend_error, on_cpu
from kvfold.bench.selftest import Case, Layer, Tokens

DEVICE = torch.device("cuda")
STEPS = 20
RECIPES = [
    "saw-int4",
    "saw-int4:block=16",
    "oscar-int2:group=128,block=8",
    "oscar-int2:block=64",
    "gtq-k3v3",
    "gtq-k3v3:block=16",
    "int8",
    "bf16",
]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("page", [16, 64])
@torch.no_grad()
def test_replays_with_growing_lengths_are_the_definitions(recipe, page):
    """Between replays tokens begin another page and another block. As in engines, what describes a step is written
    into tensors that stay in place."""
    room = (STEPS + WARM_UP,) * 3  # new tokens per sequence that the cache has pages for
    layer = Layer(Case(recipe, 128, 4, page, Tokens((55, 23, 3), room)), DEVICE)
    assert layer.ops.decode.implementation in ("gluon", "triton")
    pages = -(-(55 + STEPS + WARM_UP) // page)
    q, k, v = (torch.zeros(3, heads, 128, dtype=torch.bfloat16, device=DEVICE) for heads in (8, 2, 2))
    placed = {}

    def begin():
        layer.begin([1, 1, 1])
        now = {name: x for name, x in vars(layer.pages.step).items() if isinstance(x, Tensor)}
        now["table"] = pad(now["table"], (0, pages - now["table"].shape[1]))
        for name, x in now.items():
            placed.setdefault(name, x.clone()).copy_(x)
        for to, x in zip((q, k, v), (layer.queries(), layer.k, layer.v), strict=True):
            to.copy_(x)

    def attend():
        step = replace(layer.pages.step, **placed, host=None)
        return layer.ops.store_and_attend(layer.pages.during(step), q, k, v, layer.logits)

    graph, out = capture(begin, attend)
    for number in range(STEPS):
        if number:
            begin()
        graph.replay()
        assert layer.stored(layer.new).wrong == ""
        error, allowed = naive_attend_error(on_cpu(layer.pages), q.cpu(), layer.new, layer.logits, out)
        assert error <= allowed
