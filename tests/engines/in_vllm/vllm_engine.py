"""Real vLLM on a CPU with the embedded model, in the process of the tests, so that they see its scheduler."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # before vLLM is imported

import torch
from torch import Tensor
from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from vllm.v1.attention import selector

from kvfold.models import embedded_folder

CACHE = 48 * 2**20  # bytes
BLOCK = 32  # tokens
CHUNK = 512  # tokens of a step at most, unless a test says otherwise


def answer(output: RequestOutput) -> tuple[list[int], list[float]]:
    """The tokens of a finished request and their log-probabilities."""
    each = output.outputs[0]
    return list(each.token_ids), [next(iter(token.values())).logprob for token in each.logprobs]


class Engine:
    """An LLM with its scheduler at hand."""

    def __init__(self, recipe: str | None, artifact: str | None = None, **options) -> None:
        selector._cached_get_attn_backend.cache_clear()  # it remembers the choice of the last engine
        given = {} if recipe is None else {"kvfold": {"recipe": recipe, "artifact": artifact}}
        settings = {
            "model": str(embedded_folder()),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "max_num_batched_tokens": CHUNK,
            "kv_cache_memory_bytes": CACHE,
            "block_size": BLOCK,
            "disable_log_stats": True,
            "max_logprobs": -1,
        }
        self.llm = LLM(additional_config=given, **settings | options)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool

    @property
    def blocks(self) -> int:
        return self.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks

    @property
    def builder(self):
        return self.core.model_executor.driver_worker.worker.model_runner.attn_groups[0][0].get_metadata_builder()

    @property
    def layers(self) -> list:
        return list(self.llm.llm_engine.vllm_config.compilation_config.static_forward_context.values())

    def run(self, prompts: list[list[int]], tokens: int = 8, chunk: int = CHUNK) -> list[tuple[list[int], list[float]]]:
        """The greedy continuation of each prompt and its log-probabilities."""
        self.scheduler.max_num_scheduled_tokens = chunk
        sampling = SamplingParams(temperature=0, max_tokens=tokens, logprobs=0, ignore_eos=True)
        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], sampling, use_tqdm=False
        )
        return [answer(output) for output in outputs]

    def alone(self, prompt: list[int], **options) -> tuple[list[int], list[float]]:
        """The same for one prompt. Tiny requests run beside it: matrix products of a single row are computed in another
        way than those of several, so that keys and values would not be the same."""
        return self.run([prompt, *([5 + i] for i in range(7))], **options)[0]

    def next_token(self, prompt: list[int]) -> Tensor:
        """Log-probabilities of all tokens after a prompt."""
        sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
        found = (
            self.llm.generate(TokensPrompt(prompt_token_ids=prompt), sampling, use_tqdm=False)[0].outputs[0].logprobs
        )
        return torch.tensor([found[0][token].logprob for token in range(len(found[0]))])

    def perplexity(self, prompts: list[list[int]]) -> float:
        """Of all tokens but the first of each prompt."""
        sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        given = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = self.llm.generate(given, sampling, use_tqdm=False)
        found = [
            each[token].logprob
            for output in outputs
            for token, each in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        ]
        return math.exp(-sum(found) / len(found))

    def forget(self) -> None:
        """Empty the prefix cache."""
        assert self.llm.reset_prefix_cache()

    @contextmanager
    def only(self, blocks: int) -> Iterator[None]:
        """With this many blocks to use."""
        held = self.pool.get_new_blocks(self.pool.get_num_free_blocks() - blocks)
        yield
        self.pool.free_blocks(held)

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
