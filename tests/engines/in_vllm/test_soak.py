"""Many requests through real vLLM, in a cache that is too small for those that run at a time."""

import random
from pathlib import Path
from unittest.mock import patch

import pytest
from defined_attention import defined_attention
from host_offload import followed_to_cpu_memory, offloading_on_a_cpu, transfer_config
from vllm import SamplingParams, TokensPrompt
from vllm_engine import Engine, answer

from kvfold.engines.vllm.rings import RingManager

OUTPUT = range(3, 11)  # tokens
CHUNK = 32  # tokens of a step


def start(model: Path, **options) -> Engine:
    return Engine(
        model,
        "int8:block=16,centre=false",
        block_size=32,
        max_num_batched_tokens=64,
        scheduler_reserve_full_isl=False,  # a request begins though its prompt may not fit beside the others
        **options,
    )


@pytest.fixture(scope="module")
def engine(small):
    engine = start(small)
    yield engine
    engine.close()


@pytest.fixture
def prompts(words) -> list[list[int]]:
    """25 of 5 to 120 tokens; each five begin in the same way."""
    draw, found = random.Random(1), []
    for start, shared in zip(range(0, 2500, 500), (5, 20, 40, 60, 75), strict=True):
        prefix = words[start : start + shared]
        tails = (words[start + 100 * i : start + 100 * i + draw.randint(1, 45)] for i in range(1, 5))
        found += [prefix, *(prefix + tail for tail in tails)]
    return found


def check_rings(engine: Engine) -> None:
    """Each running request holds a ring of its own. Those that have ended, were aborted or preempted hold none."""
    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    (rings,) = [manager.req_to_blocks for manager in managers if isinstance(manager, RingManager)]
    held = {name: [block.block_id for block in blocks] for name, blocks in rings.items() if blocks}
    assert held.keys() == {request.request_id for request in engine.scheduler.running}
    assert len({block for blocks in held.values() for block in blocks}) == engine.ring * len(held)


def add_request(engine: Engine, name: str, prompt: list[int], tokens: int) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=tokens, logprobs=0, ignore_eos=True)
    engine.llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), sampling)


def serve(
    engine: Engine, prompts: list[list[int]], requests: int, chunk: int, check: bool = True
) -> dict[str, tuple[int, int, list, list]]:
    """Requests that come and go, some of them aborted. Of the others by name: which prompt, how many tokens were asked
    for, the tokens and their log-probabilities."""
    engine.scheduler.max_num_scheduled_tokens = chunk
    draw, llm = random.Random(2), engine.llm.llm_engine
    asked = {str(i): (draw.randrange(len(prompts)), draw.choice(OUTPUT)) for i in range(requests)}
    waiting, running, aborted, found = list(asked), [], [], {}
    while waiting or running:
        for name in waiting[: max(draw.randint(0, 3), 4 - len(running))]:
            prompt, tokens = asked[name]
            add_request(engine, name, prompts[prompt], tokens)
            waiting.remove(name)
            running.append(name)
        if draw.random() < 0.05:
            aborted.append(running.pop(draw.randrange(len(running))))
            llm.abort_request(aborted[-1:])
        for output in llm.step():
            assert output.request_id in running
            if output.finished:
                running.remove(output.request_id)
                found[output.request_id] = (*asked[output.request_id], *answer(output))
        if check:  # requests that wait for pages hold rings too
            check_rings(engine)
    assert not llm.has_unfinished_requests()
    assert len(aborted) > 5
    assert found.keys() == asked.keys() - set(aborted)
    return found


@pytest.mark.usefixtures("_batch_invariant")
def test_many_requests_in_a_small_cache_get_what_they_get_alone(engine, prompts):
    """To the last bit. Every block comes back."""
    blocks, alone = 12, []
    for prompt in prompts:
        engine.forget()
        alone.append(engine.alone(prompt, tokens=max(OUTPUT), chunk=CHUNK))
    engine.forget()
    preempt = engine.scheduler._preempt_request
    with engine.only(blocks), patch.object(engine.scheduler, "_preempt_request", wraps=preempt) as preempted:
        found = serve(engine, prompts, 100, CHUNK)
        assert engine.pool.get_num_free_blocks() == blocks
    assert preempted.call_count > 10
    for prompt, count, tokens, logprobs in found.values():
        assert (tokens, logprobs) == (alone[prompt][0][:count], alone[prompt][1][:count])
    assert engine.pool.get_num_free_blocks() == engine.blocks - 1  # vLLM keeps one to itself


# Requests that run without being in a step


@pytest.fixture
def running(engine):
    """Nothing else."""
    engine.forget()
    with patch.object(engine.scheduler, "max_num_scheduled_tokens", CHUNK):
        yield engine


def answers(engine: Engine, found: dict, steps: int | None = None) -> int:
    """The answers that end within so many steps, by default all. How many requests sat steps out, all in all."""
    resting, llm = 0, engine.llm.llm_engine
    while llm.has_unfinished_requests() and steps != 0:
        before = {request.request_id: request.num_computed_tokens for request in engine.scheduler.running}
        found |= {output.request_id: answer(output) for output in llm.step() if output.finished}
        check_rings(engine)
        resting += sum(
            before.get(request.request_id) == request.num_computed_tokens for request in engine.scheduler.running
        )
        steps = None if steps is None else steps - 1
    return resting


@pytest.mark.usefixtures("_batch_invariant")
def test_requests_that_sit_steps_out_keep_their_rings(running, words):
    """A long prompt comes first, as that of a request does that began before them. Then a prompt waits between two
    chunks, as vLLM defers them where other ranks of data parallelism are to read theirs at the same time."""
    prompts = {str(number): words[200 * number :][: 50 + 9 * number] for number in range(3)}
    alone = {name: running.alone(prompt, tokens=20, chunk=CHUNK) for name, prompt in prompts.items()}
    running.forget()
    found = {}
    for name, prompt in prompts.items():
        add_request(running, name, prompt, 20)
    answers(running, found, 8)
    add_request(running, "long", words[1000:1300], 1)
    answers(running, found, 1)
    running.scheduler.running.insert(0, running.scheduler.running.pop())
    rested = answers(running, found, 300 // CHUNK)
    add_request(running, "prompt", words[500:600], 1)
    answers(running, found, 2)
    with patch.object(running.core, "_should_throttle_prefills", lambda: True):
        rested += answers(running, found, 5)
    answers(running, found)
    assert rested > 20
    assert {name: found[name] for name in prompts} == alone


# The last one: vLLM cannot go on when another engine of the process has ended


def test_raw_vectors_do_not_come_back_from_cpu_memory(small, prompts):
    """All pages go there, and requests find them there after others have taken their blocks. Whoever reads a token raw
    has computed it."""
    with offloading_on_a_cpu():
        engine = start(small, kv_transfer_config=transfer_config())
        with engine.only(30), defined_attention() as found, followed_to_cpu_memory(found) as loaded:
            serve(engine, prompts, 200, 64, check=False)
        engine.close()
    assert len(loaded) > 50
    assert found.error < 1e-5
