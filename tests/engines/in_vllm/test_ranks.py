"""Tensor parallelism through real vLLM: two ranks with a KV head each answer as one with both."""

from pathlib import Path

import numpy as np
import pytest
from tiny_models import random_tokens, tiny
from vllm import SamplingParams, TokensPrompt
from vllm_engine import Engine

from kvfold.calibration import calibrate
from kvfold.recipes import parse

RECIPE = "saw-int4:sink=4,recent=20"


@pytest.fixture
def model(tmp_path) -> Path:
    """A folder with a random model of two KV heads, and what the recipe needs of it."""
    model = tiny(head_dim=64)
    model.save_pretrained(tmp_path)
    calibrate(model, random_tokens(512), 256, [parse(RECIPE)]).save(tmp_path / "fits")
    return tmp_path


def logprobs(model: Path, ranks: int) -> np.ndarray:
    """Of two prompts and their answers."""
    engine = Engine(
        *(model, RECIPE, str(model / "fits")),
        skip_tokenizer_init=True,
        max_model_len=256,
        block_size=16,
        tensor_parallel_size=ranks,
        kv_cache_memory_bytes=2**24,
    )
    sampling = SamplingParams(temperature=0, max_tokens=24, prompt_logprobs=0, logprobs=0, detokenize=False)
    prompts = [TokensPrompt(prompt_token_ids=random_tokens(n, seed=n).tolist()) for n in (100, 37)]
    outputs = engine.llm.generate(prompts, sampling, use_tqdm=False)
    engine.close()
    tokens = [token for output in outputs for token in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs)]
    return np.array([next(iter(token.values())).logprob for token in tokens])


def test_two_ranks_answer_as_one(model, monkeypatch):
    """Sums of two ranks are rounded otherwise, which may give a number another code: noise of 1e-5 in the embeddings
    moves these log-probabilities by 0.0003. Means of the other head move them by 0.015."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    one, two = (logprobs(model, ranks) for ranks in (1, 2))
    assert np.abs(one - two).mean() < 0.003
