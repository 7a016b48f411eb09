"""What SGLang answers does not depend on prefix hits, chunks, neighbours or retractions, packed or not."""

import re
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
from defined_attention import defined_attention
from draft_models import draft_plainly, eagle
from known_drafts import draft_from
from plain_attention import attend_plainly
from sglang.srt.layers.dp_attention import DpPaddingMode
from sglang.srt.model_executor import model_runner
from sglang_engine import (
    Answer,
    ask,
    ask_alone,
    be_batch_invariant,
    forget,
    retract_often,
    serve,
    tell_mixed_steps,
    tokens_that_fit,
)
from tiny_models import random_tokens, tiny
from typer.testing import CliRunner

from kvfold.calibration import calibrate
from kvfold.cli import app

BLOCKS = "oscar-int2:block=16"
RECIPES = ("saw-int4:block=8", "fold2:block=0", BLOCKS)
CHUNK = 48  # tokens, three pages
LONG = (3 * CHUNK + 6, 2 * CHUNK + 4, CHUNK + 5)
SHORT = (46, 17, 31)
CACHED = [144, 96, 48, 32, 16, 16]  # of these tokens, in whole pages of 16
TOKENS = 12  # of an answer
SMALL = {"chunked_prefill_size": CHUNK, "max_total_tokens": 768}
LARGE = {"chunked_prefill_size": 512, "max_total_tokens": 2048}
BUDGET = 2**21  # bytes
NGRAM = {
    "speculative_algorithm": "NGRAM",
    "speculative_ngram_max_bfs_breadth": 1,
    "speculative_num_draft_tokens": 6,
}


class Small(NamedTuple):
    cold: list[Answer]
    warm: list[Answer]
    retracted: list[Answer]


class Large(NamedTuple):
    cold: list[Answer]
    together: list[Answer]


class Prompts(NamedTuple):
    long: list[list[int]]
    short: list[list[int]]

    @property
    def all(self) -> list[list[int]]:
        return [*self.long, *self.short]

    def twice(self, engine) -> list[list[Answer]]:
        return [ask_alone(engine, self.all, TOKENS) for _ in range(2)]

    def small(self, engine) -> Small:
        cold, warm = self.twice(engine)
        forget(engine)
        return Small(cold, warm, ask(engine, self.all, TOKENS))

    def mixed(self, engine) -> Small:
        """Then without log-probabilities, which keep SGLang from reading prompts beside tokens that are decoded."""
        answers = self.small(engine)
        forget(engine)
        ask(engine, self.all, TOKENS, logprobs=False)
        return answers

    def together(self, engine) -> tuple[list[Answer], int]:
        """Also how many tokens fit."""
        return ask(engine, self.all, TOKENS), tokens_that_fit(engine)

    def large(self, engine) -> Large:
        cold = ask_alone(engine, self.all, TOKENS)
        forget(engine)
        return Large(cold, ask(engine, self.all, TOKENS))


@pytest.fixture(scope="module")
def prompts(words) -> Prompts:
    lengths = (*LONG, *SHORT)
    found = [words[300 * i : 300 * i + length] for i, length in enumerate(lengths)]
    return Prompts(found[: len(LONG)], found[len(LONG) :])


@pytest.fixture(scope="module")
def served(small, small_artifact):
    return partial(serve, model_path=str(small), artifact=small_artifact)


def same(answers: list[Answer]) -> list[tuple[list[int], list[float]]]:
    return [(answer.tokens, answer.logprobs) for answer in answers]


@pytest.mark.parametrize("recipe", [None, RECIPES[0], BLOCKS])
def test_schedules_change_nothing(recipe, prompts, served, small, tmp_path, capfd):
    """Not a bit: prefix hits, retraction, other chunks, other requests beside one, drafts."""
    prepare = (be_batch_invariant, retract_often)
    answers = served(prompts.small, recipe, prepare=prepare, **SMALL, log_level="warning")
    retracted = re.findall(r"Testing retraction. #retracted_reqs: (\d+)", capfd.readouterr().err)
    assert sum(map(int, retracted)) >= 3
    assert [answer.cached for answer in answers.cold] == [0] * 6
    assert [answer.cached for answer in answers.warm] == CACHED
    assert same(answers.warm) == same(answers.cold)
    assert same(answers.retracted) == same(answers.cold)
    large = served(prompts.large, recipe, prepare=prepare[:1], **LARGE)
    assert same(large.cold) == same(answers.cold)
    assert [answer.cached for answer in large.together] == [0] * 6
    assert same(large.together) == same(answers.cold)
    texts = [prompt + answer.tokens for prompt, answer in zip(prompts.all, answers.cold, strict=True)]
    drafts = {
        RECIPES[0]: ((attend_plainly, draft_plainly), eagle(small, tmp_path) | {"budget": BUDGET}),
        BLOCKS: ((partial(draft_from, texts),), NGRAM | LARGE),
    }
    if recipe in drafts:
        changes, arguments = drafts[recipe]
        drafted, tokens = served(prompts.together, recipe, prepare=(*prepare[:1], *changes), **arguments)
        assert same(drafted) == same(answers.cold)
        if recipe == RECIPES[0]:  # 2 layers, 3 KV heads, 64 numbers; the layer of the draft model is in float32
            left = BUDGET - (1 + 8) * (8 + 16) * (2 * 3 * 2 * 64 * 2)  # rings of padding and 8 requests
            assert tokens == left // (2 * 3 * 2 * (64 * 4 // 8 + 4) + 3 * 2 * 64 * 4) // 16 * 16
        assert all(3 < answer.checks < TOKENS - 1 for answer in drafted)  # 3 steps, if each draft were right


@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_attention_is_what_its_definition_says(recipe, prompts, served, capfd):
    """For every query of prompts in chunks, with cached prefixes, together, after retraction, and beside tokens that
    are decoded."""
    with defined_attention() as found:
        served(prompts.mixed, recipe, prepare=[retract_often, tell_mixed_steps], **SMALL, enable_mixed_chunk=True)
    assert capfd.readouterr().err.count("mixed step") >= 3
    # layers; all of a prompt cold and after the cache was flushed; tokens of answers, of which the first is a prompt's
    assert found.queries >= 2 * (3 * sum(LONG + SHORT) + 4 * 6 * (TOKENS - 1))
    assert found.error < 1e-5


def test_answers_of_three_ranks_are_those_of_one(prompts, served, monkeypatch):
    """Ranks add up their parts in another order than one rank does. Codes of 8 bits make little of it."""

    def answers(ranks: int) -> list[Answer]:
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "|".join("0" * ranks))
        return served(partial(ask, prompts=prompts.long[-1:], tokens=TOKENS), "int8", tp_size=ranks, **LARGE)

    (alone,) = answers(1)
    with defined_attention() as found:
        (shared,) = answers(3)
    assert found.queries >= 3 * 2 * (LONG[-1] + TOKENS - 1)
    assert found.error < 1e-5
    assert shared.tokens == alone.tokens
    assert np.abs(np.subtract(shared.logprobs, alone.logprobs)).max() < 0.02


def share_heads() -> None:
    """Let ranks share a KV head, as on GPUs. On a CPU, SGLang adds KV heads of zeros until each rank has its own."""
    model_runner.adjust_config_with_unaligned_cpu_tp = lambda config, *_: config


def pad_to_the_longest() -> None:
    """Let ranks of data-parallel attention pad all steps to that of the busiest rank, as SGLang does for its prefill
    graphs: then an idle rank reads a prompt of padding, and a token that is decoded beside prompts is one, too."""
    DpPaddingMode.get_dp_padding_mode = classmethod(lambda cls, *_: cls.MAX_LEN)


def ask_one_later(engine, prompts: list[list[int]], tokens: int) -> list[Answer]:
    """All but the last together, and then the last alone."""
    return [*ask(engine, prompts[:-1], tokens), *ask(engine, prompts[-1:], tokens)]


DATA_PARALLEL = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}


def test_answers_of_two_ranks_are_those_of_one(tmp_path, monkeypatch):
    """Of tensor parallelism with the only KV head on both, of a pipeline with a layer on each, and of data-parallel
    attention with requests of its own on each. The embedded model shares weights between its first and last layer,
    which SGLang's pipelines do not."""
    model, lengths, tokens = tiny("Qwen3", head_dim=64, num_key_value_heads=1), (100, 37, 64, 50), 24
    model.save_pretrained(tmp_path)
    calibrate(model, random_tokens(512), 256).save(tmp_path / "fits")
    prompts = [random_tokens(n, seed=n).tolist() for n in lengths]
    steps = {"chunked_prefill_size": 64, "context_length": 256, "max_running_requests": 4, "max_total_tokens": 2048}
    changes = {"prepare": (share_heads, pad_to_the_longest)}
    given = {"artifact": str(tmp_path / "fits"), "model_path": str(tmp_path), **changes, **steps}

    def answers(ranks: dict[str, int]) -> list[Answer]:
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "|".join("0" * max(ranks.values(), default=1)))
        asked = partial(ask_one_later, prompts=prompts, tokens=tokens)
        return serve(asked, "saw-int4:block=16", **given, **ranks)

    alone = answers({})
    for ranks, layers in (({"tp_size": 2}, 4), ({"pp_size": 2}, 2), (DATA_PARALLEL, 2)):  # layers that see a token
        with defined_attention() as found:
            shared = answers(ranks)
        assert found.queries == layers * (sum(lengths) + len(lengths) * (tokens - 1))
        assert found.error < 1e-5
        for one, two in zip(alone, shared, strict=True):
            assert two.tokens == one.tokens
            assert np.abs(np.subtract(two.logprobs, one.logprobs)).max() < 0.003


def test_answers_of_a_folded_model_are_those_of_the_original(prompts, served, small, small_artifact, tmp_path):
    recipe, folded = "oscar-int2:block=16", str(tmp_path / "folded")
    fold = CliRunner().invoke(app, ["fold", str(small), "-r", recipe, "--artifact", small_artifact, "--out", folded])
    assert fold.exit_code == 0, fold.output
    asked = partial(ask, prompts=prompts.long[:1], tokens=TOKENS)
    (original,) = served(asked, recipe, **LARGE)
    (answer,) = serve(asked, recipe, f"{folded}/kvfold", model_path=folded, **LARGE)
    assert answer.tokens == original.tokens
    assert np.abs(np.subtract(answer.logprobs, original.logprobs)).mean() < 0.02
