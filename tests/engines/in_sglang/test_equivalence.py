"""What SGLang answers does not depend on prefix hits, chunks, neighbours or retractions, packed or not.

A matrix product of other sizes is rounded otherwise, and a number that is rounded otherwise may get another code. So
answers are the same to the bit only where all sizes are the same, and alike elsewhere.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from sglang_engine import Answer, ask, ask_alone, serve

from kvfold.artifact import Artifact
from kvfold.engines.transformers import cache
from kvfold.text import default_text, tokenize

RECIPES = ("saw-int4", "int2", "gtq-k3v3", "oscar-int2")
CHUNK = 48  # tokens, three pages
LONG = (3 * CHUNK + 6, 2 * CHUNK + 4, CHUNK + 5)  # a prefix hit leaves what the last chunk was without it
SHORT, MANY = 46, 54  # tokens of prompts and answers of which not all fit at once
SMALL = {"chunked_prefill_size": CHUNK, "max_total_tokens": 384, "schedule_conservativeness": 0.0}
LARGE = {"chunked_prefill_size": 512, "max_total_tokens": 2048}


class Small(NamedTuple):
    cold: list[Answer]
    warm: list[Answer]
    retracted: list[Answer]


class Large(NamedTuple):
    cold: list[Answer]
    together: list[Answer]
    many: list[Answer]


class Prompts(NamedTuple):
    long: list[list[int]]
    short: list[list[int]]

    def small(self, engine) -> Small:
        cold, warm = (ask_alone(engine, self.long, 8) for _ in range(2))
        engine.flush_cache()
        return Small(cold, warm, ask(engine, self.short, MANY))

    def large(self, engine) -> Large:
        cold = ask_alone(engine, self.long, 8)
        engine.flush_cache()
        together = ask(engine, [*self.long, *self.short], 8)
        engine.flush_cache()
        return Large(cold, together, ask(engine, self.short, MANY))


@pytest.fixture(scope="module")
def prompts(embedded) -> Prompts:
    tokens = tokenize(default_text("evaluation"), embedded[1], 4096)
    return Prompts(
        [tokens[300 * i :][:n].tolist() for i, n in enumerate(LONG)],
        [tokens[1000 + 200 * i :][:SHORT].tolist() for i in range(4)],
    )


def assert_alike(some: list[Answer], others: list[Answer], most: float, mean: float) -> None:
    """The same tokens, and log-probabilities this close."""
    assert [answer.tokens for answer in some] == [answer.tokens for answer in others]
    difference = np.abs(
        np.concatenate([np.subtract(a.logprobs, b.logprobs) for a, b in zip(some, others, strict=True)])
    )
    assert difference.max() <= most
    assert difference.mean() <= mean


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_answers_are_the_same(recipe, prompts, artifact, capfd):
    small = serve(prompts.small, recipe, artifact, **SMALL, log_level="warning")
    assert "Retract requests" in capfd.readouterr().err
    assert [answer.cached for answer in small.cold] == [0] * len(LONG)
    assert [answer.cached for answer in small.warm] == [n // CHUNK * CHUNK for n in LONG]
    assert [answer[:2] for answer in small.warm] == [answer[:2] for answer in small.cold]

    large = serve(prompts.large, recipe, artifact, **LARGE)
    allowed = (1e-4, 1e-5) if recipe is None else (0.3, 0.02)  # one code of another value changes all that follows
    assert_alike(large.cold, small.cold, *allowed)  # chunks
    assert_alike(large.together[: len(LONG)], large.cold, *allowed)  # alone or not
    assert_alike(large.many, small.retracted, *allowed)


@pytest.mark.parametrize("recipe", RECIPES)
def test_answers_are_those_of_transformers(recipe, prompts, artifact, embedded):
    model, prompt = embedded[0], prompts.long[-1]
    (answer,) = serve(partial(ask, prompts=[prompt], tokens=8), recipe, artifact, **LARGE)
    packed = cache(model, recipe, Artifact.load(artifact))
    out = model.generate(
        torch.tensor([prompt]),
        past_key_values=packed,
        max_new_tokens=8,
        min_new_tokens=8,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = out.sequences[0, len(prompt) :].tolist()
    logprobs = [float(row[0].log_softmax(-1)[token]) for row, token in zip(out.logits, tokens, strict=True)]
    assert_alike([answer], [Answer(tokens, logprobs, 0)], 0.3, 0.02)
