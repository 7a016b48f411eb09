"""Which requests sit steps out, told step by step as vLLM's scheduler tells its workers."""

import pytest
import torch
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from kvfold.engines.vllm.requests import Requests


def step(new=(), cached=(), resumed=(), finished=(), preempted=(), drafts=()) -> SchedulerOutput:
    """Requests are (name, blocks of group 1 that are new, tokens before the step, tokens in it), drafts (name, tokens
    among these)."""
    told = CachedRequestData.make_empty()
    for name, pages, before, _ in cached:
        told.req_ids.append(name)
        told.new_block_ids.append(([7 * page for page in pages], pages) if pages else None)
        told.num_computed_tokens.append(before)
    told.resumed_req_ids.update(resumed)
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [
        NewRequestData(name, [], [], None, None, ([7 * page for page in pages], pages), before, None)
        for name, pages, before, _ in new
    ]
    output.scheduled_cached_reqs = told
    output.num_scheduled_tokens = {name: tokens for name, _, _, tokens in (*new, *cached)}
    output.scheduled_spec_decode_tokens = {name: [1] * tokens for name, tokens in drafts}
    output.finished_req_ids, output.preempted_req_ids = set(finished), set(preempted)
    return output


@pytest.fixture
def requests():
    """Two that have read their prompts, b from a cached page on."""
    requests = Requests()
    requests.follow(step(new=[("a", [1, 2], 0, 20), ("b", [3, 4], 16, 10)]))
    return requests


def bounds(requests: Requests) -> tuple[list[int], list[int], list[list[int]]]:
    least, most, table = requests.described(1, torch.device("cpu"))
    assert requests.described(0, torch.device("cpu"))[2].tolist() == (7 * table).tolist()
    return least.tolist(), most.tolist(), table.tolist()


def described(requests: Requests) -> tuple[list[int], list[list[int]]]:
    """Without drafts."""
    least, most, table = bounds(requests)
    assert least == most
    return most, table


def test_a_request_rests_with_all_its_tokens_until_it_is_in_a_step_again(requests):
    assert not requests.resting
    for before in (20, 21):
        requests.follow(step(cached=[("a", [], before, 1)]))
        assert described(requests) == ([26], [[3, 4]])
    requests.follow(step(cached=[("b", [9], 26, 7)]))
    assert described(requests) == ([22], [[1, 2]])
    requests.follow(step())
    assert described(requests) == ([22, 33], [[1, 2, 0], [3, 4, 9]])
    requests.follow(step(cached=[("a", [], 22, 1), ("b", [], 33, 1)]))
    assert not requests.resting


def test_a_request_may_rest_without_the_drafts_of_its_last_step(requests):
    """The step after tells how many were rejected, and a request that rests is not in it."""
    requests.follow(step(cached=[("a", [5], 20, 4), ("b", [], 26, 1)], drafts=[("a", 3)]))
    requests.follow(step(cached=[("b", [], 27, 1)]))
    assert bounds(requests) == ([21], [24], [[1, 2, 5]])
    requests.follow(step(cached=[("a", [], 22, 1), ("b", [], 28, 4)], drafts=[("b", 3)]))
    assert not requests.resting


def test_a_request_that_has_finished_or_was_preempted_does_not_rest(requests):
    requests.follow(step(cached=[("a", [], 20, 1)], preempted=["b"]))
    assert not requests.resting
    requests.follow(step(cached=[("b", [7], 0, 5)], resumed=["b"]))  # from its beginning, in other pages
    assert described(requests) == ([21], [[1, 2]])
    requests.follow(step(cached=[("b", [], 5, 1)], finished=["a"]))
    assert not requests.resting
    requests.follow(step(preempted=["b"]))
    requests.follow(step(new=[("b", [6], 0, 5)]))  # as the newer runner is told
    requests.follow(step())
    assert described(requests) == ([5], [[6]])


def test_steps_that_only_warm_up_are_of_no_request(requests):
    dummy = step()
    dummy.num_scheduled_tokens = {"_dummy_req_0": 4}
    requests.follow(dummy)
    requests.follow(step(cached=[("a", [], 20, 1), ("b", [], 26, 1)]))
    assert not requests.resting
