"""Decode steps in CUDA graphs: one is captured and replayed while lengths grow, beside eager steps and definitions."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip(f"CUDA graphs need a GPU, and torch {torch.__version__} sees none", allow_module_level=True)

from kvfold.bench.cuda_graphs import WARM_UP, capture
from kvfold.bench.expected_ops import naive_attend_error, on_cpu
from kvfold.bench.model_steps import Decoder, dense_error, packed_cache, packed_error, random_model
from kvfold.bench.selftest import Case, Layer, Tokens
from kvfold.ops.dispatch import choose
from kvfold.recipes import parse

DEVICE = torch.device("cuda")
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 512,
}
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
ALLOWED = 2**-7  # relative error of bfloat16 logits


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG, DEVICE)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("page", [16, 64])
@torch.no_grad()
def test_replays_with_growing_lengths_are_the_definitions(recipe, page):
    """Of one layer. Between replays tokens begin another page and another block."""
    steps, tokens = 20, Tokens((55, 23, 3), (1, 1, 1))
    layer = Layer(Case(recipe, 128, 4, page, tokens), DEVICE)
    layer.resume()
    layer.cache.reserve(max(tokens.history) + WARM_UP + steps)
    layer.expected = on_cpu(layer.pages)  # with more room
    q, k, v = (torch.zeros(3, heads, 128, dtype=torch.bfloat16, device=DEVICE) for heads in (8, 2, 2))

    def begin():
        layer.begin([1, 1, 1])
        for to, x in zip((q, k, v), (layer.queries(), layer.k, layer.v), strict=True):
            to.copy_(x)

    def attend():
        return layer.cache.attend(0, *(x.unsqueeze(1) for x in (q, k, v)), layer.logits).squeeze(1)

    graph, out = capture(begin, attend)
    for step in range(steps):
        if step:
            begin()
        graph.replay()
        assert layer.stored(layer.new).wrong == ""
        error, allowed = naive_attend_error(on_cpu(layer.pages), q.cpu(), layer.new, layer.logits, out)
        assert error <= allowed


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("page", [16, 64])
def test_replays_with_growing_lengths_are_eager_steps(model, recipe, page):
    assert packed_error(model, parse(recipe), page, batch=3, steps=40) <= ALLOWED


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_graph_does_what_its_lengths_say(model, recipe):
    """A replay without `begin` is the same step again; after `begin` it is another one, over one token more."""
    steps = Decoder(model, packed_cache(model, parse(recipe), 2, 20, 40, 16), 2)
    graph, logits = capture(steps.begin, steps.run)
    graph.replay()
    first = logits.clone()
    graph.replay()
    assert torch.equal(logits, first)
    ids = steps.ids.clone()
    steps.begin()
    steps.ids.copy_(ids)
    graph.replay()
    assert not torch.equal(logits, first)
    assert logits.isfinite().all()
    steps.cache.paged.check_faults()


def test_sequences_of_different_lengths(model):
    """Two prompts in one left-padded batch, then replays: each row as if it were alone."""
    recipe, lengths, steps, room = parse("saw-int4:block=16"), (21, 9), 30, 80
    tokens = torch.randint(0, 97, (2, max(lengths) + steps), generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def filled(rows, prompt, mask=None):
        cache = packed_cache(model, recipe, len(rows), 0, room, 16)
        run = Decoder(model, cache, len(rows))
        positions = None if mask is None else (mask.cumsum(1) - 1).clamp_min(0)
        if mask is not None:
            cache.begin(len(rows), prompt.shape[1], mask)
        with torch.no_grad():
            model.set_attn_implementation("kvfold")
            model(prompt, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
        return run

    longest = max(lengths)
    prompt, mask = tokens[:, :longest].clone(), torch.ones(2, longest, dtype=torch.int64, device=DEVICE)
    mask[1, : longest - lengths[1]] = 0
    together = filled((0, 1), prompt, mask)
    alone = [filled((row,), prompt[row : row + 1, longest - length :]) for row, length in enumerate(lengths)]
    done = [0, 0, 0]

    def begin(run, number):
        at = longest + done[number]
        run.cache.begin(len(run.ids), 1)
        run.ids.copy_(tokens[:, at : at + 1] if number == 0 else tokens[number - 1 : number, at : at + 1])
        run.positions.copy_(torch.tensor(run.cache.paged.lengths, device=DEVICE).unsqueeze(1) - 1)
        done[number] += 1

    graph, logits = capture(lambda: begin(together, 0), together.run)
    for step in range(steps - 2):
        if step:
            begin(together, 0)
        graph.replay()
        for row, run in enumerate(alone):
            while done[row + 1] < done[0]:
                begin(run, row + 1)
                expected = run.run()
            error = (logits[row] - expected[0]).float().norm() / expected.float().norm()
            assert error <= 2 * ALLOWED


def test_the_dense_cache_agrees_with_16_bit_pages(model):
    assert dense_error(model, 16, batch=3, steps=40) <= 2 * ALLOWED


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_captured_are_kernels(model, recipe):
    cache = packed_cache(model, parse(recipe), 1, 3, 10, 64)
    assert choose(cache.paged.layouts[-1], 4, DEVICE).decode.implementation in ("gluon", "triton")
