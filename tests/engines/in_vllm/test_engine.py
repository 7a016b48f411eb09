"""Requests through real vLLM: what a request gets does not depend on how it is scheduled."""

import math
from functools import partial
from unittest.mock import patch

import pytest
import torch
from defined_attention import defined_attention
from prometheus_client import REGISTRY
from transformers import DynamicCache
from vllm_engine import BLOCK, CACHE, Engine

import kvfold
from kvfold.evaluate.logits import compare

LENGTHS = (62, 31, 95, 1, 64, 30, 17, 100)  # of prompts; most fill their last block within a few tokens
POISON = 9  # a token that is in no prompt
PACKED, OPEN = "gtq-k3v3", "oscar-int2:block=32"
LEAST = {None: 0.45, "fold2:block=16": 6.3, PACKED: 4.7, OPEN: 5.2}  # blocks, against 16 bits


@pytest.fixture(scope="module", params=LEAST, ids=lambda recipe: recipe or "vllm")
def engine(request, small, small_artifact):
    engine = Engine(small, request.param, small_artifact)
    engine.recipe = request.param
    yield engine
    engine.close()


@pytest.fixture
def packed_engine(engine):
    if not engine.recipe:
        pytest.skip("vLLM without kvfold packs nothing")
    return engine


@pytest.fixture
def prompts(words):
    return [words[200 * i : 200 * i + length] for i, length in enumerate(LENGTHS)]


def preempting(engine):
    """(The blocks that the prompts fill, with rings, and one more; a mock of what preempts a request.)"""
    blocks = sum(-(-length // BLOCK) + engine.ring for length in LENGTHS) + 1
    preempt = engine.scheduler._preempt_request
    return engine.only(blocks), patch.object(engine.scheduler, "_preempt_request", wraps=preempt)


def test_as_many_more_blocks_fit_as_tokens_are_smaller(engine):
    sixteen_bits = CACHE // (2 * 2 * 3 * 64 * 2 * BLOCK)  # keys and values, layers, KV heads, dims, bytes, tokens
    assert engine.blocks >= LEAST[engine.recipe] * sixteen_bits


def test_pages_fill_the_memory(packed_engine):
    """Rings lie in them, and take no memory of their own."""
    pages = sum(layer.pages.pool.nbytes for layer in packed_engine.packed.layers.values())
    assert CACHE - pages // packed_engine.blocks < pages <= CACHE


@pytest.mark.usefixtures("_batch_invariant")
def test_schedules_change_nothing(engine, prompts):
    """Not a bit, whatever comes first: a prefix that is cached, chunks, a batch, preemption."""
    engine.forget()
    alone = []
    for prompt in prompts:
        alone.append(engine.alone(prompt))
        assert engine.alone(prompt) == alone[-1]  # its full blocks are cached now
    engine.forget()
    assert engine.run(prompts) == alone
    for chunk in (24, 50):
        engine.forget()
        assert engine.run(prompts, chunk=chunk) == alone
    engine.forget()
    few_blocks, preemption = preempting(engine)
    with few_blocks, preemption as preempted:
        assert engine.run(prompts) == alone
        assert preempted.called
    assert engine.pool.get_num_free_blocks() == engine.blocks - 1  # vLLM keeps one to itself


@pytest.mark.usefixtures("_batch_invariant")
def test_requests_share_pages(engine, words):
    """Of a prefix that was cached before, and of one that is computed in the same step."""
    shared, tails = words[1000:1070], (words[1500:1520], words[1600:1633], [])
    alone = []
    for tail in tails:
        engine.forget()
        alone.append(engine.alone(shared + tail))
    engine.forget()
    assert engine.run([shared + tail for tail in tails]) == alone
    assert engine.run([shared + tail for tail in tails]) == alone


@pytest.fixture
def _poison(engine):
    """The embedding of a token is NaN, and with it its key and value in every layer."""
    embedding = engine.runner.model.model.embed_tokens
    hook = embedding.register_forward_hook(
        lambda _, given, out: out.masked_fill((given[0] == POISON).unsqueeze(-1), torch.nan)
    )
    yield
    hook.remove()


@pytest.mark.usefixtures("_batch_invariant", "_poison")
def test_nan_of_one_request_changes_nothing_for_others(engine, prompts):
    """Not a bit, beside it and in the pages that it had. It is counted, and what comes after it is finite.

    vLLM's own cache on a CPU hands NaN on to who gets such a page next.
    """
    if engine.recipe not in (PACKED, OPEN):
        pytest.skip("one recipe with an open block and one without are enough")
    first, last, *others = prompts[:5]
    assert not any(POISON in prompt for prompt in prompts)
    broken = [*first[:20], POISON, *first[21:40], POISON, *first[41:]], [*last[:-1], POISON]

    def run(*poisoned: list[int]):
        engine.forget()
        return engine.run([*poisoned, *others], tokens=17)

    clean, counted = run(first, last), REGISTRY.get_sample_value("kvfold:non_finite_tokens")
    found = run(*broken)
    assert found[2:] == clean[2:]
    assert run(first, last) == clean
    logprobs = found[0][1] + found[1][1][1:]  # without that of the poisoned token itself
    assert all(map(math.isfinite, logprobs))
    engine.run([first], tokens=17)  # what is counted shows up to 32 steps later
    assert REGISTRY.get_sample_value("kvfold:non_finite_tokens") == counted + 3


def test_attention_is_what_its_definition_says(packed_engine, prompts):
    """By the kernels that serve, for every query of prompts in a batch, in chunks, with a cached prefix and after
    preemption."""
    engine = packed_engine
    few_blocks, preemption = preempting(engine)
    engine.forget()
    with defined_attention() as found:
        engine.run(prompts)
        engine.run(prompts)
        engine.forget()
        engine.run(prompts, chunk=24)
        engine.forget()
        with few_blocks, preemption as preempted:
            engine.run(prompts)
    assert preempted.called
    assert found.queries > 2 * 3 * sum(LENGTHS)  # layers, and times that all of a prompt was read
    assert found.error < 1e-5


def test_quality_is_that_of_the_transformers_engine(packed_engine, small_model, small_artifact, words):
    """What `kvfold eval` measures, over 2048 tokens. Keys and values of two implementations differ in their last bits,
    so that some codes do: each moves the log-probabilities of some tokens, and their mean by next to nothing."""
    engine, plain = packed_engine, partial(DynamicCache, config=small_model.config)
    packed = partial(kvfold.cache, small_model, engine.recipe, kvfold.Artifact.load(small_artifact))
    _, scores = compare(small_model, torch.tensor(words[:2048]), 512, plain, {"": packed})
    engine.forget()
    found = engine.perplexity([words[i : i + 512] for i in range(0, 2048, 512)])
    assert found == pytest.approx(scores[""].perplexity, rel=1e-4)
