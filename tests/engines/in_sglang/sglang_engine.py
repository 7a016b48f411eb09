"""SGLang engines for tests, each in a process of its own."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import sglang
import sglang.srt.entrypoints.engine
import sglang.srt.models.registry  # imports all models: here it does so once, and not in every engine
import torch
from batch_invariance import BatchInvariant, extend_always
from sglang.srt.distributed import parallel_state
from sglang.srt.managers import scheduler
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.model_executor.model_runner import ModelRunner

from kvfold.models import embedded_folder

T = TypeVar("T")
ARGUMENTS = {
    "device": "cpu",
    "dtype": "float32",
    "grammar_backend": "none",
    "skip_tokenizer_init": True,
    "log_level": "error",
    "random_seed": 0,
    "context_length": 1024,
    "max_running_requests": 8,
    "page_size": 16,
}


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    cached: int  # tokens of the prompt that were in the prefix cache
    checks: int  # steps that checked drafts


def serve(
    scenario: Callable[[sglang.Engine], T],
    recipe: str | None = None,
    artifact: str = "",
    budget: int | None = None,
    prepare: Sequence[Callable[[], None]] = (),
    **arguments: Any,
) -> T:
    """scenario(engine), with stock SGLang where there is no recipe; `budget` is what SGLang finds free for the cache.

    Engine and scheduler are forked from this process, which has imported SGLang: that takes longer than all else.
    `prepare` are changes of SGLang to make before that.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(_serve, scenario, recipe, artifact, budget, prepare, arguments).result()


def _serve(
    scenario: Callable[[sglang.Engine], T],
    recipe: str | None,
    artifact: str,
    budget: int | None,
    prepare: Sequence[Callable[[], None]],
    arguments: dict[str, Any],
) -> T:
    multiprocessing.set_start_method = lambda *_, **__: None  # SGLang would spawn
    parallel_state.is_shm_available = lambda *_: False  # of SGLang's kernels
    if recipe:
        os.environ.update(KVFOLD_RECIPE=recipe, KVFOLD_ARTIFACT=artifact)
    if budget:
        KVCacheConfigurator._profile_available_bytes = lambda *_: budget
    for change in prepare:
        change()
    engine = sglang.Engine(**{"model_path": str(embedded_folder()), **ARGUMENTS, **arguments})
    try:
        return scenario(engine)
    finally:
        engine.shutdown()


def be_batch_invariant() -> None:
    """Let what is computed for a request not depend on its batch: see batch_invariance.py."""
    mode = BatchInvariant()
    extend_always().start()

    def under_mode(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def wrapped(runner: ModelRunner, *arguments: Any, **options: Any) -> Any:
            with nullcontext() if runner.is_draft_worker else mode:  # answers do not depend on what is drafted
                return method(runner, *arguments, **options)

        return wrapped

    ModelRunner.forward, ModelRunner.sample = under_mode(ModelRunner.forward), under_mode(ModelRunner.sample)


def poison_fresh_memory() -> None:
    """Let weights that are not in the checkpoint be NaN: SGLang only warns, and computes with what lies in memory."""
    torch.use_deterministic_algorithms(True, warn_only=True)


def retract_often() -> None:
    """Let SGLang retract a request every other step where several are decoded, by its own switch for tests."""
    scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, 2


def tell_mixed_steps() -> None:
    """Let SGLang print a line for each step that reads prompts beside tokens that are decoded."""
    mix = ScheduleBatch.mix_with_running

    def told(batch: ScheduleBatch, running: ScheduleBatch) -> None:
        print("mixed step", file=sys.stderr, flush=True)
        mix(batch, running)

    ScheduleBatch.mix_with_running = told


def ask(engine: sglang.Engine, prompts: Sequence[list[int]], tokens: int, logprobs: bool = True) -> list[Answer]:
    """All at once."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answers = engine.generate(input_ids=list(prompts), sampling_params=sampling, return_logprob=logprobs)
    return [
        Answer(
            answer["output_ids"],
            [logprob for logprob, *_ in answer["meta_info"].get("output_token_logprobs", [])],
            answer["meta_info"]["cached_tokens"],
            answer["meta_info"].get("spec_verify_ct", 0),
        )
        for answer in answers
    ]


def ask_alone(engine: sglang.Engine, prompts: Sequence[list[int]], tokens: int) -> list[Answer]:
    """One after the other."""
    return [answer for prompt in prompts for answer in ask(engine, [prompt], tokens)]


def forget(engine: sglang.Engine) -> None:
    """Empty the prefix cache. SGLang refuses to while it still works on what it has answered already."""
    for _ in range(100):
        if engine.flush_cache().success:
            return
        time.sleep(0.1)
    raise TimeoutError("SGLang does not come to rest")


def tokens_that_fit(engine: sglang.Engine) -> int:
    return engine.get_server_info()["max_total_num_tokens"]
