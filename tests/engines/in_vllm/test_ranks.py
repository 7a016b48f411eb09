"""Tensor and pipeline parallelism through real vLLM: two ranks answer as one does.

vLLM would spawn its workers. Here they are forked from this process, which has imported vLLM: that takes longer than
all else.
"""

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
from defined_attention import defined_attention
from tiny_models import random_tokens, tiny
from vllm import SamplingParams, TokensPrompt
from vllm.v1.executor import multiproc_executor
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_engine import Engine

from kvfold.calibration import calibrate
from kvfold.recipes import parse

RECIPE = "saw-int4:block=16"
LENGTHS = (100, 37, 64, 50)  # of prompts
TOKENS = 24  # of an answer
QUERIES = sum(LENGTHS) + len(LENGTHS) * (TOKENS - 1)  # the last token of an answer is not one


@pytest.fixture(autouse=True)
def _forked(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setattr(multiproc_executor, "get_mp_context", lambda: multiprocessing.get_context("fork"))
    # Ranks of a pipeline take their input in a tensor that vLLM makes in this run, and leaves out on a CPU if a model
    # is not compiled.
    monkeypatch.setattr(CPUWorker, "_should_warm_up_model", lambda _: True)
    monkeypatch.setattr(CPUModelRunner, "warming_up_model", CPUModelRunner.profile_run)
    with torch.compiler.set_stance("force_eager"):  # the compiler's threads would not outlive a fork
        yield


def logprobs(model: Path, **parallel: int) -> np.ndarray:
    """Of all prompts and their answers. A step takes part of them, so that a pipeline has several steps at a time."""
    engine = Engine(
        *(model, RECIPE, str(model / "fits")),
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=len(LENGTHS),
        max_num_batched_tokens=64,
        block_size=16,
        kv_cache_memory_bytes=2**24,
        **parallel,
    )
    asked = {"max_tokens": TOKENS, "prompt_logprobs": 0, "logprobs": 0, "ignore_eos": True}
    sampling = SamplingParams(temperature=0, detokenize=False, **asked)
    prompts = [TokensPrompt(prompt_token_ids=random_tokens(n, seed=n).tolist()) for n in LENGTHS]
    outputs = engine.llm.generate(prompts, sampling, use_tqdm=False)
    engine.close()
    tokens = [token for output in outputs for token in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs)]
    return np.array([next(iter(token.values())).logprob for token in tokens])


@pytest.mark.parametrize(
    ("name", "options", "kinds"),
    [
        ("Llama", {"head_dim": 64}, ("tensor", "pipeline")),
        ("Llama", {"head_dim": 64, "num_key_value_heads": 1}, ("tensor",)),
        ("Gemma3", {}, ("pipeline",)),
    ],
    ids=("two KV heads", "one KV head", "sliding layers"),
)
def test_two_ranks_answer_as_one(tmp_path, name, options, kinds):
    """Sums of two ranks are rounded otherwise, which may give a number another code: noise of 1e-5 in the embeddings
    moves these log-probabilities by 0.0003. Means of the other head move them by 0.015.

    A single KV head is on both ranks. Each rank of a pipeline has one of two packed layers.
    """
    model = tiny(name, **options)
    model.save_pretrained(tmp_path)
    calibrate(model, random_tokens(512), 256, [parse(RECIPE)]).save(tmp_path / "fits")
    one = logprobs(tmp_path)
    for kind in kinds:
        with defined_attention() as found:
            two = logprobs(tmp_path, **{f"{kind}_parallel_size": 2})
        assert np.abs(one - two).mean() < 0.003
        assert found.queries == QUERIES * {"tensor": 4, "pipeline": 2}[kind]  # packed layers of both ranks
        assert found.error < 1e-5
