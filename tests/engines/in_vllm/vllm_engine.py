"""Real vLLM on a CPU with a small model, in the process of the tests, so that they see its scheduler."""

import gc
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # before vLLM is imported

import torch
from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from vllm import _custom_ops as ops
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from kvfold.engines.vllm import engine as in_process
from kvfold.engines.vllm.rings import RingLayer, RingSpec

CACHE = 4 * 2**20  # bytes
BLOCK = 32  # tokens
CHUNK = 512  # tokens of a step at most, unless a test says otherwise


# Let PyTorch see products and attention, so that `batch_invariant` does.
ops._supports_onednn = False
platform = type(current_platform)
platform.opaque_attention_op = classmethod(lambda _: False)
# What takes longer than all else when an engine starts: vLLM reads what a model class can do in a process of its own,
# and looks for kernels in all modules. It also collects garbage, five times per engine.
registry._run_in_subprocess = lambda read: read()
platform.register_triton_kernel_overrides = staticmethod(cache(platform.register_triton_kernel_overrides))
no_collection = patch.object(gc, "collect", lambda *_: 0)


def one_query_at_a_time(
    q, keys, values, out, query_starts, lengths, scale, causal, alibi, window, table, cap, schedule, *others
) -> None:
    """vLLM's own attention, by a call for each query."""
    assert causal
    sizes, isa = (q.shape[1], keys.shape[1], q.shape[2]), _get_attn_isa(q.dtype, keys.shape[2], q.shape[2])
    one = torch.tensor([0, 1], dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        first, end = query_starts[row : row + 2].tolist()
        for token in range(first, end):
            seen = torch.tensor([length - end + token + 1], dtype=torch.int32)
            schedule = ops.cpu_attn_get_scheduler_metadata(
                1, *sizes, seen, q.dtype, one, causal, window, isa, enable_kv_split=False
            )
            own, result = q[token : token + 1].clone(), torch.empty_like(q[:1])
            of_row = (one, seen, scale, causal, alibi, window, table[row : row + 1], cap, schedule, *others)
            torch.ops._C.cpu_attention_with_kv_cache(own, keys, values, result, *of_row)
            out[token] = result[0]


def answer(output: RequestOutput) -> tuple[list[int], list[float]]:
    """The tokens of a finished request and their log-probabilities."""
    each = output.outputs[0]
    return list(each.token_ids), [next(iter(token.values())).logprob for token in each.logprobs]


class Engine:
    """An LLM with its scheduler at hand."""

    def __init__(self, model: Path, recipe: str | None, artifact: str | None = None, **options) -> None:
        given = {} if recipe is None else {"kvfold": {"recipe": recipe, "artifact": artifact}}
        settings = {
            "model": str(model),
            "dtype": "float32",
            "enforce_eager": True,
            "compilation_config": {"custom_ops": ["none"]},  # see above
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "max_num_batched_tokens": CHUNK,
            "kv_cache_memory_bytes": CACHE,
            "block_size": BLOCK,
            "disable_log_stats": True,
            "max_logprobs": -1,
        }
        with no_collection:
            self.llm = LLM(additional_config=given, **settings | options)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool

    @property
    def blocks(self) -> int:
        return self.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks

    @property
    def ring(self) -> int:
        """Blocks that a running request holds beside its pages."""
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        return sum(group.kv_cache_spec.blocks for group in groups if isinstance(group.kv_cache_spec, RingSpec))

    @property
    def runner(self):
        return self.core.model_executor.driver_worker.worker.model_runner

    @property
    def packed(self) -> in_process.Engine:
        """What its packed layers share."""
        return in_process.Engine.current

    @property
    def layers(self) -> list:
        """Those that attend."""
        every = self.llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        return [layer for layer in every if not isinstance(layer, RingLayer)]

    def generate(self, prompts: list[list[int]], tokens: int = 8, chunk: int = CHUNK) -> list[RequestOutput]:
        """The greedy continuation of each prompt."""
        self.scheduler.max_num_scheduled_tokens = chunk
        sampling = SamplingParams(temperature=0, max_tokens=tokens, logprobs=0, ignore_eos=True)
        return self.llm.generate([TokensPrompt(prompt_token_ids=each) for each in prompts], sampling, use_tqdm=False)

    def run(self, prompts: list[list[int]], **options) -> list[tuple[list[int], list[float]]]:
        """Its tokens and their log-probabilities."""
        return [answer(output) for output in self.generate(prompts, **options)]

    def alone(self, prompt: list[int], **options) -> tuple[list[int], list[float]]:
        """The same for one prompt."""
        return self.run([prompt], **options)[0]

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
        with no_collection:
            self.llm.llm_engine.engine_core.shutdown()
