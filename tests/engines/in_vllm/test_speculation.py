"""Speculative decoding through real vLLM: drafts change how many tokens a step has, and no answer."""

from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from defined_attention import defined_attention
from eagle_model import save_eagle
from mtp_model import save_mimo
from vllm_engine import Engine

TOKENS = 36  # of an answer: it fills two blocks or three
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
EAGLE = {"method": "eagle", "num_speculative_tokens": 3}
MTP = {"method": "mtp", "num_speculative_tokens": 3}  # by one layer, which runs three times
FEW = 6  # tokens of a step at most: some requests sit it out, and some drafts are cut off


# tokens of the open block, and drafts: 15 are the most that its ring has room for
CASES = (("ngram", 0, 3), ("ngram", 16, 3), ("ngram", 16, 15), ("eagle", 16, 3), ("mtp", 32, 3))


@pytest.fixture(scope="module", params=CASES, ids="{0[0]}-block={0[1]}-drafts={0[2]}".format)
def engine(request, small, words, tmp_path_factory):
    method, block, count = request.param
    model, drafts, folder = small, NGRAM | {"num_speculative_tokens": count}, tmp_path_factory.mktemp(method)
    if method == "eagle":
        save_eagle(small, folder, "EagleLlamaForCausalLM")
        drafts = EAGLE | {"model": str(folder)}
    elif method == "mtp":
        save_mimo(small, folder, words[:2048])
        model, drafts = folder, MTP
    engine = Engine(
        *(model, f"int4:block={block},centre=false"),
        block_size=16 if method == "ngram" else 32,  # vLLM's own attention takes multiples of 32
        max_model_len=320,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        kv_cache_memory_bytes=2**23,
        tokenizer=str(small),
        speculative_config=drafts,
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
        self.schedule, self.block = engine.scheduler.schedule, engine.packed.served.plan.page_size

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
            next_start <= (length - 1) // self.block * self.block
            for spans in self.spans.values()
            for (_, length), (next_start, _) in pairwise(spans)
        )


def test_layers_that_draft_stay_in_16_bits(engine):
    """vLLM numbers them after the model's own."""
    drafted = engine.llm.llm_engine.vllm_config.speculative_config.method != "ngram"
    packed = [layer.kv_cache.dtype == torch.uint8 for layer in engine.layers]
    assert packed == [True, True] + [False] * drafted


@pytest.mark.usefixtures("_batch_invariant")
def test_answers_are_those_without_drafts(engine, prompts):
    """To the last bit. Drafts are accepted and rejected, also over the ends of pages."""
    with patch.object(engine.scheduler, "update_draft_token_ids", lambda *_: None):
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
    """Beside a long prompt, and in steps of few tokens."""
    engine.forget()
    with defined_attention() as found:
        engine.run([*prompts, 5 * words[:55]], tokens=TOKENS)
        engine.forget()
        engine.run(prompts, tokens=TOKENS, chunk=FEW)
    assert found.queries > 2 * 7 * TOKENS  # layers, answers
    assert found.error < 1e-5
