"""Requests through real vLLM: what a request gets does not depend on how it is scheduled."""

import pytest
from vllm_engine import BLOCK, CACHE, Engine

from kvfold.ops.attend import blocked

LENGTHS = (62, 31, 95, 1, 64, 30)  # of prompts; most fill their last block within a few tokens
WINDOWS = "oscar-int2:sink=16,recent=40"
RECIPES = (None, "saw-int4", "int2", "gtq-k3v3:sink=0", WINDOWS)  # None: vLLM without kvfold


@pytest.fixture(scope="module", params=RECIPES, ids=lambda recipe: recipe or "vllm")
def engine(request, artifact):
    engine = Engine(request.param, artifact)
    engine.recipe = request.param
    yield engine
    engine.close()


@pytest.fixture
def prompts(words):
    return [words[200 * i : 200 * i + length] for i, length in enumerate(LENGTHS)]


@pytest.fixture
def _float64(monkeypatch):
    """Attention rounds the same way for any number of queries.

    In float32 its last bit depends on how many there are; where it decides how a later layer rounds, a code changes and
    with it what follows. With this, keys and values are the same where vLLM's own are, and so must be everything else.
    """
    flash = blocked._flash

    def doubled(q, k, v, mask, scale):
        out, weight = flash(q.double(), k.double(), v.double(), None if mask is None else mask.double(), scale)
        return out.float(), weight.float()

    monkeypatch.setattr(blocked, "_flash", doubled)


def test_as_many_more_blocks_fit_as_tokens_are_smaller(engine):
    sixteen_bits = CACHE // (2 * 30 * 3 * 64 * 2 * BLOCK)  # keys and values, layers, KV heads, dims, bytes, tokens
    least = {None: 0.45, "saw-int4": 3.5, "int2": 6.3, "gtq-k3v3:sink=0": 4.7, WINDOWS: 2.0}[engine.recipe]
    assert engine.blocks >= least * sixteen_bits


@pytest.mark.usefixtures("_float64")
def test_schedules_change_nothing(engine, prompts, monkeypatch):
    """Not a bit, whatever comes first: a prefix that is cached, chunks, a batch, preemption."""
    engine.forget()
    alone = [engine.alone(prompt) for prompt in prompts]
    assert [engine.alone(prompt) for prompt in prompts] == alone  # their blocks are cached now
    engine.forget()
    assert engine.run(prompts) == alone
    for chunk in (24, 50):
        engine.forget()
        assert engine.run(prompts, chunk=chunk) == alone
    preempted, preempt = [], engine.scheduler._preempt_request
    monkeypatch.setattr(
        engine.scheduler, "_preempt_request", lambda *given, **named: (preempted.append(1), preempt(*given, **named))[1]
    )
    engine.forget()
    with engine.only(blocks=sum(-(-length // BLOCK) for length in LENGTHS) + 1):
        assert engine.run(prompts) == alone
        assert preempted
    assert engine.pool.get_num_free_blocks() == engine.blocks - 1  # vLLM keeps one to itself


@pytest.mark.usefixtures("_float64")
def test_requests_share_pages(engine, prompts, words):
    """Of a prefix that was cached before, and of one that is computed in the same step."""
    shared, tails = words[1000:1070], (words[1500:1520], words[1600:1633], [])
    engine.forget()
    alone = []
    for tail in tails:
        engine.forget()
        alone.append(engine.alone(shared + tail))
    engine.forget()
    assert engine.run([shared + tail for tail in tails]) == alone
    assert engine.run([shared + tail for tail in tails]) == alone
