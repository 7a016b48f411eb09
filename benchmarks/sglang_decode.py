"""Decoding inside SGLang: full batches, of a model with random weights.

    python benchmarks/sglang_decode.py Qwen3-8B --case 32x8192 --case 32x16384 --csv rows.csv                # its own
    python benchmarks/sglang_decode.py Qwen3-8B --case 32x8192 --engine '{"kv_cache_dtype": "fp8_e4m3"}' --csv rows.csv
    python benchmarks/sglang_decode.py Qwen3-8B -r saw-int4 --case 32x8192 --case 32x16384 --csv rows.csv    # packed
    python benchmarks/sglang_decode.py Gemma-3-12B --config '{"architectures": ["Gemma3ForCausalLM"]}' --case 8x32768 \\
        --csv rows.csv                                                               # the language model alone

It runs in an environment with SGLang and kvfold. Speed and memory are those of real weights, answers are not. Timing
begins when the last request of a case has its first token. It ends when the first request has its last token. A case
has no row if the scheduler did not decode all requests together.
"""

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from sweep import model_folder
from transformers import AutoConfig

from kvfold.bench.client import TOKENS
from kvfold.bench.random_fits import random_artifact
from kvfold.files import append_rows
from kvfold.recipes import parse


@dataclass(frozen=True)
class Row:
    engine: str
    version: str
    model: str
    recipe: str  # or the type of SGLang's own cache
    attention: str
    batch: int
    input: int  # tokens per prompt
    output: int  # tokens per answer
    prefill_tps: float  # tokens of all prompts per second, until the last request has its first token
    decode_tps: float  # tokens of all answers per second, while all requests are decoded
    step_ms: float
    kv_tokens: int  # that fit
    gpu: str
    torch: str
    date: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an example as Qwen3-8B, or a folder with config.json")
    parser.add_argument("-r", "--recipe", help="default: SGLang's own cache")
    parser.add_argument("--case", action="append", required=True, help="requests and tokens of each prompt: 32x8192")
    parser.add_argument("--output", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--engine", type=json.loads, default={}, help="more arguments of sglang.Engine, as JSON")
    parser.add_argument("--config", type=json.loads, default={}, help="changes of the model's configuration, as JSON")
    parser.add_argument("--csv", type=Path, required=True, help="rows are added to it")
    options = parser.parse_args()
    cases = [tuple(map(int, case.split("x"))) for case in options.case]
    with TemporaryDirectory() as scratch:
        for row in run(
            options.model, options.config, options.recipe, cases, options.output, options.engine, Path(scratch)
        ):
            print(row, flush=True)
            append_rows(options.csv, [asdict(row)])


def run(model, changes, recipe, cases, output, extra, scratch):
    longest = max(tokens for _, tokens in cases) + output
    folder = model_folder(model, scratch, longest, changes)
    if recipe:
        config = AutoConfig.from_pretrained(folder).to_dict()
        random_artifact(config, [parse(recipe)]).save(scratch / "artifact")
        os.environ |= {"KVFOLD_RECIPE": recipe, "KVFOLD_ARTIFACT": str(scratch / "artifact")}
    import sglang

    arguments: dict[str, Any] = {
        "model_path": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "context_length": longest + 64,
        "json_model_override_args": json.dumps({"max_position_embeddings": longest + 64}),
        "cuda_graph_max_bs_decode": max(batch for batch, _ in cases),
        # One more than a batch: SGLang counts a prompt twice while it is read in chunks. Without it the last prompt
        # would wait until the first answer has ended.
        "max_running_requests": 1 + max(batch for batch, _ in cases),
        "grammar_backend": "none",
        **extra,
    }
    engine = sglang.Engine(**arguments)
    info = engine._scheduler_init_result.scheduler_infos[0]
    generator = random.Random(0)
    for batch, tokens in [(1, 64), *cases]:  # the first compiles
        prompts = [generator.choices(TOKENS, k=tokens) for _ in range(batch)]
        prefill, seconds, decoded = engine.loop.run_until_complete(answer(engine, prompts, output))
        if (batch, tokens) == (1, 64):
            continue
        yield Row(
            **served_by(engine, recipe, arguments),
            model=folder.name + (f" {json.dumps(changes)}" if changes else ""),
            batch=batch,
            input=tokens,
            output=output,
            prefill_tps=round(batch * tokens / prefill, 1),
            decode_tps=round(decoded / seconds, 1),
            step_ms=round(1000 * seconds * batch / decoded, 3),
            kv_tokens=info["max_total_num_tokens"],
        )
    engine.shutdown()


def served_by(engine, recipe: str | None, arguments: dict[str, Any]) -> dict[str, str]:
    """The columns of a row that say who served, and where."""
    import sglang

    return {
        "engine": "SGLang",
        "version": sglang.__version__,
        "recipe": recipe or arguments.get("kv_cache_dtype", "auto"),
        "attention": "kvfold" if recipe else engine.server_args.attention_backend,
        **this_gpu(),
    }


def this_gpu() -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }


async def answer(engine, prompts: list[list[int]], output: int) -> tuple[float, float, int]:
    """Seconds until all requests have their first token, then the seconds and tokens of `together`."""
    start = time.perf_counter()
    counts = await asyncio.gather(*(count(engine, prompt, output) for prompt in prompts))
    begin, seconds, decoded = together(counts, output)
    return begin - start, seconds, decoded


def together(counts: list[list[tuple[float, int]]], output: int) -> tuple[float, float, int]:
    """The moment at which all requests have their first token, the seconds from then until one has its last token, and
    the number of tokens between.

    `counts` holds, per request, the times at which tokens came, each with the number of tokens so far.
    """
    begin = max(count[0][0] for count in counts)
    end = min(count[-1][0] for count in counts)
    decoded = [so_far(count, end) - so_far(count, begin) for count in counts]
    if end <= begin or min(decoded) < output / 2:
        early = max(so_far(count, begin) for count in counts)
        raise ValueError(
            f"the {len(counts)} requests were not decoded together: when the last one had its first token, another had "
            f"{early} of {output} tokens. Do all fit into the cache? If so, ask for longer answers with --output"
        )
    return begin, end - begin, sum(decoded)


async def count(engine, prompt: list[int], output: int) -> list[tuple[float, int]]:
    """The times at which tokens came, each with the number of tokens so far."""
    return [(at, chunk["meta_info"]["completion_tokens"]) async for at, chunk in stream(engine, prompt, output)]


async def stream(engine, prompt: list[int], output: int) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """What SGLang sends of a greedy answer, each with the time at which it came."""
    wanted = {"max_new_tokens": output, "temperature": 0, "ignore_eos": True}
    async for chunk in await engine.async_generate(input_ids=prompt, sampling_params=wanted, stream=True):
        yield time.perf_counter(), chunk


def so_far(count: list[tuple[float, int]], moment: float) -> int:
    return max((tokens for at, tokens in count if at <= moment), default=0)


if __name__ == "__main__":
    main()
