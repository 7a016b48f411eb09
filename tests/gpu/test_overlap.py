"""Kernels of a step that begin before those before them have ended: they read what they would if each waited."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip(f"kernels overlap on a GPU only, and torch {torch.__version__} sees none", allow_module_level=True)

from kvfold.bench.decoding import with_layers
from kvfold.bench.fits import random_artifact
from kvfold.bench.graphs import capture
from kvfold.bench.kernels import Case, fill
from kvfold.engines.serving import Config, Layer, Plan, steps_of
from kvfold.geometry import example_configs
from kvfold.recipes import parse

DEVICE = torch.device("cuda")
MODEL = with_layers(example_configs()["Qwen3-8B"], 1)

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
    ops, pages, q, k, *_ = fill(case, parse(recipe), DEVICE)
    new = [torch.randn(2, *k.shape, device=DEVICE).to(k.dtype) for _ in range(20)]
    given, outs = torch.empty(2, *k.shape, dtype=k.dtype, device=DEVICE), []

    def step():
        return ops.step(pages, q, *given, case.scale)

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
        torch.testing.assert_close(step(), expected, rtol=0, atol=2e-3)
        misplace(x)
        graph.replay()
        torch.testing.assert_close(replayed, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("recipe", RECIPES)
@torch.no_grad()
def test_a_query_reads_what_another_request_stores_in_the_same_step(recipe, tmp_path):
    """As where a prompt is the same as one that comes with it: all its pages but the last are those of the other."""
    recipe, pages, size = parse(recipe), 40, 64
    random_artifact(MODEL, [recipe]).save(tmp_path)
    plan = Plan.make(Config(recipe, str(tmp_path)), MODEL, size, torch.bfloat16, DEVICE)
    pool = plan.layouts[0].allocate(pages + 1, plan.kv_heads).to(DEVICE)
    layer = Layer(plan, 0, pool, plan.allocate_shadows(1), torch.zeros(1, dtype=torch.int32, device=DEVICE))
    starts, lengths = [pages * size, 0], [pages * size + 1, pages * size]
    table = torch.arange(pages + 1, device=DEVICE).repeat(2, 1)
    slots = torch.cat((torch.tensor([pages * size]), torch.arange(pages * size))).to(DEVICE)
    described = slots, *(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (starts, lengths))
    no_shadow = torch.full((pages + 1,), -1, device=DEVICE)
    steps = steps_of(starts, lengths, table, size, no_shadow, described, ragged=True)
    k, v, q = (torch.randn(len(slots), heads, 128, device=DEVICE).bfloat16() for heads in (8, 8, 32))
    for _ in range(20):
        outs = []
        pool.fill_(0xFF)  # NaN, where it is metadata; then all is there before it is stored again
        for _ in range(2):
            torch.cuda.synchronize()
            layer.attend(steps, q, k, v, 128**-0.5, out := torch.empty_like(q))
            outs.append(out)
        assert outs[1].isfinite().all()
        assert torch.equal(*outs)
