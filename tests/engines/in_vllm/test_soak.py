"""Many requests through real vLLM, in a cache that is too small for those that run at a time."""

import random
from pathlib import Path
from unittest.mock import patch

import pytest
from defined_attention import defined_attention
from host_offload import followed_to_cpu_memory, offloading_on_a_cpu, transfer_config
from vllm import SamplingParams, TokensPrompt
from vllm_engine import Engine, answer

from kvfold.engines.shadow_table import ShadowTable

OUTPUT = range(3, 11)  # tokens
RECENT = 40


def start(model: Path, **options) -> Engine:
    return Engine(
        model,
        f"int2:sink=8,recent={RECENT},centre=false",
        block_size=16,
        max_num_batched_tokens=64,  # for which few copies are needed
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


def shadow_table(engine: Engine) -> ShadowTable:
    (group,) = engine.packed.groups
    return group.served.shadow_table


def check_copies(shadows: ShadowTable) -> None:
    """A copy belongs to one page, which knows it: none is lost, and none is read for another page."""
    of, owner = shadows.of[:-1].tolist(), shadows.owner[:-1].tolist()
    pages = {shadow: page for shadow, page in enumerate(owner) if page >= 0}
    assert {page: shadow for page, shadow in enumerate(of) if shadow >= 0} == {p: s for s, p in pages.items()}
    assert len(set(pages.values())) == len(pages) == shadows.used


def add_request(engine: Engine, name: str, prompt: list[int], tokens: int) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=tokens, logprobs=0, ignore_eos=True)
    engine.llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), sampling)


def serve(
    engine: Engine, prompts: list[list[int]], requests: int, chunk: int
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
        check_copies(shadow_table(engine))
    assert not llm.has_unfinished_requests()
    assert len(aborted) > 5
    assert found.keys() == asked.keys() - set(aborted)
    return found


@pytest.mark.usefixtures("_batch_invariant")
def test_many_requests_in_a_small_cache_get_what_they_get_alone(engine, prompts):
    """Steps bring fewer tokens than the window has, and there are more copies than pages, so that none is ever lost."""
    chunk, pages, alone = RECENT - 8, 14, []
    for prompt in prompts:
        engine.forget()
        alone.append(engine.alone(prompt, tokens=max(OUTPUT), chunk=chunk))
    engine.forget()
    preempt = engine.scheduler._preempt_request
    with engine.only(pages), patch.object(engine.scheduler, "_preempt_request", wraps=preempt) as preempted:
        found = serve(engine, prompts, 100, chunk)
        assert engine.pool.get_num_free_blocks() == pages
    assert preempted.call_count > 10
    for prompt, count, tokens, logprobs in found.values():
        assert (tokens, logprobs) == (alone[prompt][0][:count], alone[prompt][1][:count])
    assert engine.pool.get_num_free_blocks() == engine.blocks - 1  # vLLM keeps one to itself


def test_requests_that_find_prefixes_without_copies_read_them_packed(engine, prompts):
    """Steps bring more tokens than the window has, and there are fewer copies than pages."""
    chunk, pages = 64, 100
    assert len(shadow_table(engine).owner) - 1 < pages
    engine.forget()
    with engine.only(pages), defined_attention() as found:
        serve(engine, prompts, 200, chunk)
    assert found.restored > 1000
    assert found.error < 1e-5


# Requests that run without being in a step

BUDGET = RECENT - 8  # tokens of a step


def missing_copies(engine: Engine) -> dict[str, list[int]]:
    """Pages of each running request that its next token reads in 16 bits and that have no copy."""
    windows, of, missing = shadow_table(engine).windows, shadow_table(engine).of, {}
    for request in engine.scheduler.running:
        length = request.num_computed_tokens
        (pages,) = engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        tokens = {*range(min(windows.sink, length)), *range(max(0, length + 1 - windows.recent), length)}
        missing[request.request_id] = [page for page in {pages[token // 16] for token in tokens} if of[page] < 0]
    return missing


def steps(engine: Engine, count: int) -> int:
    """So many, none of which may cost a running request a copy. How many requests sat steps out, all in all."""
    resting = 0
    for _ in range(count):
        engine.llm.llm_engine.step()
        assert not any(missing_copies(engine).values())
        resting += len(engine.packed.requests.resting)
    return resting


@pytest.fixture
def running(engine):
    """Nothing else, and nothing of it afterwards."""
    engine.forget()
    with patch.object(engine.scheduler, "max_num_scheduled_tokens", BUDGET):
        yield engine
        llm = engine.llm.llm_engine
        llm.abort_request([request.request_id for request in engine.scheduler.running], internal=True)
        while llm.has_unfinished_requests():
            llm.step()
    add_request(engine, "last", [5], 1)
    while llm.has_unfinished_requests():
        llm.step()
    assert len(engine.packed.requests.blocks) == 1
    assert not engine.packed.requests.resting


def test_requests_for_which_the_token_budget_does_not_suffice_keep_their_copies(running, words):
    """A long prompt comes first, as that of a request does that began before them."""
    for number in range(3):
        add_request(running, str(number), words[200 * number :][: 70 + 9 * number], 60)
    steps(running, 10)
    add_request(running, "long", words[1000:1900], 1)
    steps(running, 1)
    running.scheduler.running.insert(0, running.scheduler.running.pop())
    assert steps(running, 900 // BUDGET) >= 3 * (900 // BUDGET - 1)
    steps(running, 5)


def test_a_prompt_keeps_its_copies_between_two_chunks(running, words):
    """As vLLM defers them where other ranks of data parallelism are to read theirs at the same time."""
    for number in range(7):
        add_request(running, str(number), words[60 * number :][:45], 150)
    steps(running, 12)
    add_request(running, "prompt", words[500:600], 1)
    steps(running, 2)
    with patch.object(running.core, "_should_throttle_prefills", lambda: True):
        assert steps(running, 80) >= 79
    steps(running, 3)


# The last one: vLLM cannot go on when another engine of the process has ended


def test_pages_that_come_back_from_cpu_memory_are_read_packed(small, prompts):
    """Their blocks had other pages before, with 16-bit copies. All pages go to CPU memory, and requests find them there
    after others have taken their blocks."""
    with offloading_on_a_cpu():
        engine = start(small, kv_transfer_config=transfer_config())
        with engine.only(30), defined_attention() as found, followed_to_cpu_memory(found) as loaded:
            serve(engine, prompts, 200, 64)
        engine.close()
    assert len(loaded) > 50
    assert found.restored > 1000
    assert found.error < 1e-5
