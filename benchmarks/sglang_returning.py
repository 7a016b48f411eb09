"""Conversations that come back to SGLang after others needed their pages: with its hierarchical cache (HiCache).

    python benchmarks/sglang_returning.py Qwen3-8B --engine '{"attention_backend": "fa3"}' --csv rows.csv    # its own
    python benchmarks/sglang_returning.py Qwen3-8B -r saw-int4 --csv rows.csv                                # packed
    python benchmarks/sglang_returning.py Qwen3-8B -r fold4 --tokens 32768 --conversations 4 --csv rows.csv

It runs in an environment with SGLang and kvfold. Weights are random, so times and memory are real, and answers are not.
The cache on the device holds little more than one conversation. All conversations are read first. Each is then asked
once more with new tokens behind it, while its pages are still on the device, and again after the others: then its pages
come from host memory. A row has medians over conversations. There is no row if SGLang did not find all pages.
"""

import argparse
import json
import os
import random
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from sweep import model_folder
from transformers import AutoConfig

from kvfold.bench.random_fits import random_artifact
from kvfold.bench.serving_times import TOKENS
from kvfold.engines.serving import Config, Plan
from kvfold.files import append_rows
from kvfold.recipes import parse

PAGE_SIZE = 64
OUTPUT = 8  # tokens of an answer


@dataclass(frozen=True)
class Row:
    engine: str
    version: str
    model: str
    recipe: str  # or the type of SGLang's own cache
    attention: str
    input: int  # tokens of a conversation
    new: int  # tokens behind it when it is asked once more
    read_ms: float  # until the first token of an answer: all tokens are read
    device_ms: float  # the same when its pages are on the device
    host_ms: float  # the same when its pages are in host memory
    host_bytes: float  # per token
    host_tokens_per_gb: int
    conversations: int
    gpu: str
    torch: str
    date: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an example as Qwen3-8B, or a folder with config.json")
    parser.add_argument("-r", "--recipe", help="default: SGLang's own cache")
    parser.add_argument("--tokens", type=int, default=32768, help="of a conversation")
    parser.add_argument("--new", type=int, default=128, help="tokens behind it when it is asked once more")
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--engine", type=json.loads, default={}, help="more arguments of sglang.Engine, as JSON")
    parser.add_argument("--csv", type=Path, required=True, help="rows are added to it")
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        row = run(options, Path(scratch))
    print(row, flush=True)
    append_rows(options.csv, [asdict(row)])


def run(options: argparse.Namespace, scratch: Path) -> Row:
    longest = options.tokens + 2 * (options.new + OUTPUT)
    folder = model_folder(options.model, scratch, longest)
    config = AutoConfig.from_pretrained(folder).to_dict()
    served = Config(parse("bf16"))
    if options.recipe:
        recipe = parse(options.recipe)
        random_artifact(config, [recipe]).save(scratch / "artifact")
        served = Config(recipe, str(scratch / "artifact"))
        os.environ |= {"KVFOLD_RECIPE": options.recipe, "KVFOLD_ARTIFACT": str(scratch / "artifact")}
    host_bytes = Plan.make(served, config, PAGE_SIZE, torch.bfloat16).token_bytes
    import sglang

    arguments: dict[str, Any] = {
        "model_path": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "context_length": longest + 64,
        "page_size": PAGE_SIZE,
        "json_model_override_args": json.dumps({"max_position_embeddings": longest + 64}),
        "max_total_tokens": (longest // PAGE_SIZE + 64) * PAGE_SIZE,
        "max_running_requests": 4,
        "cuda_graph_max_bs_decode": 4,
        "grammar_backend": "none",
        "enable_hierarchical_cache": True,
        "hicache_ratio": options.conversations + 2.0,
        **options.engine,
    }
    engine = sglang.Engine(**arguments)
    generator = random.Random(0)
    read, device, host = [], [], []
    warm_up, *conversations = ([*generator.choices(TOKENS, k=options.tokens)] for _ in range(options.conversations + 1))
    for place in range(2):  # the first conversation compiles
        for conversation in (warm_up, *conversations):
            new = generator.choices(TOKENS, k=options.new)
            if place == 0:
                read.append(first_token(engine, conversation, hit=False))
                device.append(first_token(engine, [*conversation, *new], hit=True))
            else:
                host.append(first_token(engine, [*conversation, *new], hit=True))
    row = Row(
        engine="SGLang",
        version=sglang.__version__,
        model=folder.name,
        recipe=options.recipe or arguments.get("kv_cache_dtype", "auto"),
        attention="kvfold" if options.recipe else engine.server_args.attention_backend,
        input=options.tokens,
        new=options.new,
        read_ms=round(1000 * median(read[1:]), 2),
        device_ms=round(1000 * median(device[1:]), 2),
        host_ms=round(1000 * median(host[1:]), 2),
        host_bytes=round(host_bytes, 1),
        host_tokens_per_gb=int(1e9 / host_bytes),
        conversations=options.conversations,
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        torch=torch.__version__,
        date=datetime.now(UTC).date().isoformat(),
    )
    engine.shutdown()
    return row


def first_token(engine: Any, prompt: list[int], hit: bool) -> float:
    """Seconds until the first token of an answer."""
    return engine.loop.run_until_complete(_first_token(engine, prompt, hit))


async def _first_token(engine: Any, prompt: list[int], hit: bool) -> float:
    wanted = {"max_new_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
    start = time.perf_counter()
    chunks = await engine.async_generate(input_ids=prompt, sampling_params=wanted, stream=True)
    times, cached = [], 0
    async for chunk in chunks:
        times.append(time.perf_counter() - start)
        cached = chunk["meta_info"]["cached_tokens"]
    if hit != (cached > len(prompt) // 2):
        raise ValueError(f"SGLang had {cached} of {len(prompt)} tokens in its caches: try a larger hicache_ratio")
    return times[0]


if __name__ == "__main__":
    main()
