"""Many requests through real vLLM, in a cache that is too small for those that run at a time."""

import random
from unittest.mock import patch

import pytest
from transformers import AutoModelForCausalLM
from vllm import SamplingParams, TokensPrompt
from vllm_engine import Engine, answer

from kvfold.engines.shadow_table import ShadowTable
from kvfold.models import embedded_folder

LAYERS = 4
REQUESTS = 200
OUTPUT = range(3, 11)  # tokens
PAGES = 14  # of 16 tokens; 8 requests that run at a time would fill twice as many
CHUNK = 32  # tokens of a step: fewer than `recent`, so that every page has a 16-bit copy when it is filled


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """With the first layers of the embedded model."""
    folder = str(tmp_path_factory.mktemp("model"))
    AutoModelForCausalLM.from_pretrained(embedded_folder(), num_hidden_layers=LAYERS).save_pretrained(folder)
    engine = Engine(
        "int2:sink=8,recent=40,centre=false",
        model=folder,
        tokenizer=str(embedded_folder()),
        block_size=16,
        scheduler_reserve_full_isl=False,  # a request begins though its prompt may not fit beside the others
    )
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


def check_copies(shadows: ShadowTable) -> None:
    """A copy belongs to one page, which knows it: none is lost, and none is read for another page."""
    of, owner = shadows.of[:-1].tolist(), shadows.owner[:-1].tolist()
    pages = {shadow: page for shadow, page in enumerate(owner) if page >= 0}
    assert {page: shadow for page, shadow in enumerate(of) if shadow >= 0} == {p: s for s, p in pages.items()}
    assert len(set(pages.values())) == len(pages) == shadows.used


@pytest.mark.usefixtures("_float64")
def test_many_requests_in_a_small_cache_get_what_they_get_alone(engine, prompts):
    alone = []
    for prompt in prompts:
        engine.forget()
        alone.append(engine.alone(prompt, tokens=max(OUTPUT), chunk=CHUNK))
    engine.forget()

    draw, llm, preempt = random.Random(2), engine.llm.llm_engine, engine.scheduler._preempt_request

    def add(name: str, prompt: list[int], tokens: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, logprobs=0, ignore_eos=True)
        llm.add_request(name, TokensPrompt(prompt_token_ids=prompt), sampling)

    asked = {str(i): (draw.randrange(len(prompts)), draw.choice(OUTPUT)) for i in range(REQUESTS)}
    waiting, running, aborted, beside, found = list(asked), [], [], [], {}
    with engine.only(PAGES), patch.object(engine.scheduler, "_preempt_request", wraps=preempt) as preempted:
        while waiting or running:
            for name in waiting[: max(draw.randint(0, 3), 4 - len(running))]:
                prompt, tokens = asked[name]
                add(name, prompts[prompt], tokens)
                waiting.remove(name)
                running.append(name)
            if not waiting and not beside:  # so that no request is ever alone, see `Engine.alone`
                beside = ["one", "other"]
                for name in beside:
                    add(name, [5], 48)
            if draw.random() < 0.05:
                aborted.append(running.pop(draw.randrange(len(running))))
                llm.abort_request(aborted[-1:])
            for output in llm.step():
                assert output.request_id in running + beside
                if output.finished:
                    running.remove(output.request_id)
                    found[output.request_id] = answer(output)
            check_copies(engine.builder.shadows)
        llm.abort_request(beside)
        assert not llm.has_unfinished_requests()
        assert engine.pool.get_num_free_blocks() == PAGES
    assert preempted.call_count > 20
    assert len(aborted) > 10
    assert found.keys() == asked.keys() - set(aborted)
    for name, (tokens, logprobs) in found.items():
        prompt, count = asked[name]
        assert (tokens, logprobs) == (alone[prompt][0][:count], alone[prompt][1][:count]), name
    assert engine.pool.get_num_free_blocks() == engine.blocks - 1  # vLLM keeps one to itself
