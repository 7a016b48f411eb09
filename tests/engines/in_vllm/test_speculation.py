"""Speculative decoding through real vLLM: drafts change how many tokens a step has, and no answer."""

from itertools import pairwise
from unittest.mock import patch

import pytest
from defined_attention import defined_attention
from vllm_engine import Engine

BLOCK = 16
TOKENS = 36  # of an answer: it fills two blocks or three
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
FEW = 6  # tokens of a step at most: some requests sit it out, and some drafts are cut off


@pytest.fixture(scope="module", params=(0, 3, 20, 256), ids="recent={}".format)
def engine(request, small):
    engine = Engine(
        *(small, f"int4:sink=4,recent={request.param},centre=false"),
        block_size=BLOCK,
        max_model_len=320,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        kv_cache_memory_bytes=2**23,
        speculative_config=NGRAM,
        disable_log_stats=False,
    )
    yield engine
    engine.close()


@pytest.fixture
def prompts(words) -> list[list[int]]:
    """Texts that repeat themselves, so that there are drafts, right ones and wrong ones."""
    return [(4 * words[200 * i : 200 * i + 12])[:length] for i, length in enumerate((30, 15, 44))]


def counted(engine: Engine, name: str) -> int:
    """What vLLM has counted of all requests so far."""
    return next(each.value for each in engine.llm.get_metrics() if each.name == f"vllm:spec_decode_num_{name}_tokens")


class Steps:
    """From how many tokens to how many each request went, step by step."""

    def __init__(self, engine: Engine) -> None:
        self.spans: dict[str, list[tuple[int, int]]] = {}
        self.schedule = engine.scheduler.schedule

    def __call__(self, *arguments, **options):
        step = self.schedule(*arguments, **options)
        cached = step.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, start in starts.items():
            self.spans.setdefault(name, []).append((start, start + step.num_scheduled_tokens[name]))
        return step

    @property
    def pages_taken_back(self) -> int:
        """How often a step wrote to a page of which nothing was left when the next step began."""
        return sum(
            next_start <= (length - 1) // BLOCK * BLOCK
            for spans in self.spans.values()
            for (_, length), (next_start, _) in pairwise(spans)
        )


@pytest.mark.usefixtures("_batch_invariant")
def test_answers_are_those_without_drafts(engine, prompts):
    """To the last bit. Drafts are accepted and rejected, also over the ends of pages."""
    with patch.object(engine.runner.drafter, "propose", lambda _, sampled, *others, **options: [[] for _ in sampled]):
        plain = engine.run(prompts, tokens=TOKENS)
    assert counted(engine, "draft") == 0
    engine.forget()
    steps = Steps(engine)
    with patch.object(engine.scheduler, "schedule", steps):
        assert engine.run(prompts, tokens=TOKENS) == plain
    accepted, drafted = counted(engine, "accepted"), counted(engine, "draft")
    assert 20 < accepted < drafted - 20
    assert steps.pages_taken_back > 0


def test_attention_is_what_its_definition_says(engine, prompts, words):
    """Beside a long prompt, and in steps of few tokens. No window of a query reads a page that has lost its 16-bit
    copy."""
    engine.forget()
    with defined_attention() as found:
        engine.run([*prompts, 5 * words[:55]], tokens=TOKENS)
        engine.forget()
        engine.run(prompts, tokens=TOKENS, chunk=FEW)
    assert found.queries > 2 * 7 * TOKENS  # layers, answers
    assert found.restored == 0
    assert found.error < 1e-5
