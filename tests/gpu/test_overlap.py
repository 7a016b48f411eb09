"""Kernels of a step that begin before those before them have ended: they read what they would if each waited, which is
what the definitions say."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from definitions import assert_defined

if not torch.cuda.is_available():
    pytest.skip(f"kernels overlap on a GPU only, and torch {torch.__version__} sees none", allow_module_level=True)

from triton.runtime.jit import JITFunction

from kvfold.bench.cuda_graphs import capture
from kvfold.bench.expected_ops import naive_attend_error, on_cpu
from kvfold.bench.kernel_cases import Case
from kvfold.bench.kernel_times import fill
from kvfold.bench.random_fits import random_artifact
from kvfold.engines.serving import Config, Plan
from kvfold.geometry import example_configs
from kvfold.ops import naive
from kvfold.ops.pages import HostLengths, LayerPages, Logits, Step
from kvfold.paged.layer import Layer
from kvfold.recipes import parse

DEVICE = torch.device("cuda")
MODEL = {**example_configs()["Qwen3-8B"], "num_hidden_layers": 1}
PAGE = 64

RECIPES = [
    "int4:centre=false",
    "int4:centre=false,block=64",
    "saw-int4",
    "saw-int4:block=1",
    "saw-int4:block=64",
    "oscar-int2:group=128,block=64",
    "oscar-int2:block=0",
    "oscar-int2:block=16",
    "gtq-k3v3",
    "gtq-k3v3:block=64",
]


@contextmanager
def waiting():
    """Let every kernel end before the next one is launched."""
    run = JITFunction.run

    def run_and_wait(*args, **options):
        run(*args, **options)
        torch.cuda.synchronize()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run_and_wait)
        yield


def a_layer(recipe, pages, requests, folder):
    recipe = parse(recipe)
    random_artifact(MODEL, [recipe]).save(folder)
    plan = Plan.make(Config(recipe, str(folder)), MODEL, PAGE, torch.bfloat16, DEVICE)
    pool = plan.layouts[0].allocate(pages, plan.kv_heads).to(DEVICE)
    faults = torch.zeros(pages * PAGE, dtype=torch.uint8, device=DEVICE)
    ring = plan.layouts[0].allocate_ring(requests, plan.ring_tokens, plan.kv_heads, plan.raw_dtype, DEVICE)
    pages = LayerPages.of(plan.codecs[0], plan.layouts[0], plan.block, pool, ring, faults)
    return Layer(pages, plan.ops[0])


def steps(starts, lengths, pages):
    """Of requests that have the same pages, which come in order: those that decode, then the others. Each has a ring
    of its own."""
    table = torch.arange(pages).repeat(len(starts), 1)
    rings = torch.arange(len(starts), device=DEVICE).view(-1, 1)
    step = Step.of(HostLengths(starts, lengths), table, rings, PAGE)
    return [(tokens, part) for _, tokens, part in step.split(count == 1 for count in step.known.counts)]


def drawn(tokens):
    """q, k and v."""
    return [torch.randn(tokens, heads, 128, device=DEVICE).bfloat16() for heads in (32, 8, 8)]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("text", ["1x1", "1x30000", "8x64", "64x700"])
@torch.no_grad()
def test_a_step_in_a_row_is_one_that_waits_after_every_kernel(recipe, text):
    """Other tokens lie where the step's own go, and every step has other queries: whoever reads before another has
    written gives another output, or packs other tokens."""
    case = Case.parse("decode", text)
    ops, pages, q, k, *_ = fill(case, parse(recipe), DEVICE)
    states = [[torch.randn(x.shape, device=DEVICE).to(k.dtype) for x in (q, k, k)] for _ in range(20)]
    source, given = ([torch.empty_like(x) for x in states[0]] for _ in range(2))

    def step():
        for to, x in zip(given, source, strict=True):
            to.copy_(x)  # as after somebody else's kernels
        return ops.store_and_attend(pages, *given, case.logits)

    def begin(queries, keys, values):
        ops.store.run(pages, 100 * keys, 100 * values)
        for to, x in zip(source, (queries, keys, values), strict=True):
            to.copy_(x)
        torch.cuda.synchronize()

    expected = []
    for each in states:
        begin(*each)
        before = on_cpu(pages)
        with waiting():
            expected.append((step().clone(), pages.pool.clone()))
        if len(expected) == 1 and case.context > 1:  # to a single token 16 bits add no error that would be allowed
            assert_defined(before, on_cpu(pages), *each, case.logits, expected[0][0])
    graph, replayed = capture(lambda: None, step)
    for each, (out, pool) in zip(states, expected, strict=True):
        begin(*each)
        assert torch.equal(step(), out)
        assert torch.equal(pages.pool, pool)
        begin(*each)
        graph.replay()
        assert torch.equal(replayed, out)
        assert torch.equal(pages.pool, pool)


@pytest.mark.parametrize("recipe", RECIPES)
@torch.no_grad()
def test_a_layer_that_only_reads_waits_for_its_queries(recipe):
    """They are copied just before it reads what another layer stored, which has read it too."""
    case = Case.parse("decode", "8x700")
    ops, pages, q, k, v, new = fill(case, parse(recipe), DEVICE)
    states = [torch.randn(q.shape, device=DEVICE).to(q.dtype) for _ in range(20)]
    given = torch.empty_like(q)

    def step(queries):
        ops.store.run(pages, k, v)
        ops.attend(pages, q, new, case.logits)
        given.copy_(queries)
        return ops.read(pages, given, new, case.logits)

    for queries in states:
        with waiting():
            expected = step(queries)
        if queries is states[0]:
            error, allowed = naive_attend_error(on_cpu(pages), queries.cpu(), cpu(new), case.logits, expected)
            assert error <= allowed
        given.fill_(torch.nan)
        torch.cuda.synchronize()
        assert torch.equal(step(queries), expected)


def cpu(new):
    return None if new is None else tuple(side.cpu() for side in new)


@pytest.mark.parametrize(
    "recipe",
    ["saw-int4", *(f"{name}:block={n}" for name in ("saw-int4", "oscar-int2", "gtq-k3v3") for n in (1, 2, 64))],
)
@torch.no_grad()
def test_requests_that_decode_share_a_page(recipe, tmp_path):
    """One stores the last token of a page that the other has too, whose own token begins the next one."""
    pages = 4
    layer = a_layer(recipe, pages + 1, 2, tmp_path)
    last = pages * PAGE - 1

    def attended(starts, lengths, states):
        out = torch.empty(states[0].shape, device=DEVICE)
        layer.attend(steps(starts, lengths, pages + 1), *states, Logits(128**-0.5), out)
        return out

    def both(states):
        return attended([last, last + 1], [last + 1, last + 2], states)

    def pages_now():
        ((_, step),) = steps([last, last + 1], [last + 1, last + 2], pages + 1)
        return on_cpu(replace(layer.pages, step=step))

    attended([0], [last], drawn(last))
    for _ in range(20):
        pair, other = drawn(2), drawn(2)
        before = pages_now()
        with waiting():
            expected = both(pair)
            assert_defined(before, pages_now(), *pair, Logits(128**-0.5), expected)
            assert not torch.equal(both(other), expected)
        assert torch.equal(both(pair), expected)


@pytest.mark.parametrize("recipe", RECIPES)
@torch.no_grad()
def test_a_query_reads_what_another_request_stores_in_the_same_step(recipe, tmp_path):
    """As where a prompt is the same as one that comes with it: all its pages but the last are those of the other."""
    pages = 40
    layer = a_layer(recipe, pages + 1, 2, tmp_path)
    both = steps([pages * PAGE, 0], [pages * PAGE + 1, pages * PAGE], pages + 1)
    q, k, v = drawn(pages * PAGE + 1)
    for _ in range(20):
        outs = []
        layer.pages.pool.fill_(0xFF)  # NaN, where it is metadata; then all is there before it is stored again
        layer.pages.ring.fill_(torch.nan)
        for _ in range(2):
            torch.cuda.synchronize()
            layer.attend(both, q, k, v, Logits(128**-0.5), out := torch.empty(q.shape, device=DEVICE))
            outs.append(out)
        assert outs[1].isfinite().all()
        assert torch.equal(*outs)
    layer.pages.pool.fill_(0xFF)
    layer.pages.ring.fill_(torch.nan)
    (one, decoded), (many, prompt) = both
    defined = on_cpu(replace(layer.pages, step=prompt))
    naive.store(defined, k[many].cpu(), v[many].cpu())
    defined = replace(defined, step=on_cpu(replace(layer.pages, step=decoded)).step)
    new = naive.store(defined, k[one].cpu(), v[one].cpu())
    error, allowed = naive_attend_error(defined, q[one].cpu(), new, Logits(128**-0.5), outs[0][one])
    assert error <= allowed
