"""Conversations that come back to SGLang after others needed their pages: with its hierarchical cache (HiCache).

    python benchmarks/sglang_returning.py Qwen3-8B --engine '{"attention_backend": "fa3"}' --csv rows.csv    # its own
    python benchmarks/sglang_returning.py Qwen3-8B -r saw-int4 --csv rows.csv                                # packed
    python benchmarks/sglang_returning.py Qwen3-8B -r fold4 --tokens 32768 --conversations 4 --csv rows.csv

It runs in an environment with SGLang and kvfold. Weights are random, so times and memory are real, and answers are not.
The cache on the device holds one and a half conversations. Each is read, and asked again with new tokens behind
it while its pages are on the device. After all others, it is asked the same again: then its pages come from host
memory. The new tokens fill no page, so they are read every time. A row has medians over conversations. There is no row
if SGLang did not find all pages.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from sglang_decode import served_by, stream
from sweep import model_folder
from transformers import AutoConfig

from kvfold.bench.client import TOKENS
from kvfold.bench.random_fits import random_artifact
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
    new: int  # tokens behind it when it is asked again
    read_ms: float  # until the first token of an answer: all tokens are read
    device_ms: float  # the same when its pages are on the device
    host_ms: float  # the same when its pages are in host memory
    same: int  # conversations with the same answer from both
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
    parser.add_argument("--new", type=int, default=32, help="tokens behind it when it is asked again")
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--engine", type=json.loads, default={}, help="more arguments of sglang.Engine, as JSON")
    parser.add_argument("--csv", type=Path, required=True, help="rows are added to it")
    options = parser.parse_args()
    if options.tokens % PAGE_SIZE or options.new + OUTPUT >= PAGE_SIZE:
        parser.error(
            f"a conversation has to fill its pages of {PAGE_SIZE} tokens, and new tokens with answers have not to"
        )
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
        "max_total_tokens": 3 * longest // 2 // PAGE_SIZE * PAGE_SIZE,
        "max_running_requests": 4,
        "cuda_graph_max_bs_decode": 4,
        "grammar_backend": "none",
        "enable_hierarchical_cache": True,
        "hicache_ratio": options.conversations + 2.0,
        **options.engine,
    }
    engine = sglang.Engine(**arguments)
    generator = random.Random(0)
    new = generator.choices(TOKENS, k=options.new)
    conversations = [generator.choices(TOKENS, k=options.tokens) for _ in range(1 + options.conversations)]
    read, device = zip(*((ask(engine, each), ask(engine, each + new)) for each in conversations), strict=True)
    host = [ask(engine, each + new) for each in conversations]
    for cached, answers in ((0, read), (options.tokens, device), (options.tokens, host)):
        if found := [answer.cached for answer in answers if answer.cached != cached]:
            raise ValueError(f"SGLang had {found[0]} tokens in its caches, not {cached}: try a larger hicache_ratio")
    row = Row(
        **served_by(engine, options.recipe, arguments),
        model=folder.name,
        input=options.tokens,
        new=options.new,
        read_ms=milliseconds(read),
        device_ms=milliseconds(device),
        host_ms=milliseconds(host),
        same=sum(one.tokens == other.tokens for one, other in zip(device[1:], host[1:], strict=True)),
        host_bytes=round(host_bytes, 1),
        host_tokens_per_gb=int(1e9 / host_bytes),
        conversations=options.conversations,
    )
    engine.shutdown()
    return row


class Answer(NamedTuple):
    seconds: float  # until the first token
    cached: int  # tokens of the prompt that were in a cache
    tokens: list[int]


def milliseconds(answers: Sequence[Answer]) -> float:
    """Until the first token. The first answer is left out: its kernels had to be compiled."""
    return round(1000 * median(answer.seconds for answer in answers[1:]), 2)


def ask(engine: Any, prompt: list[int]) -> Answer:
    return engine.loop.run_until_complete(answer(engine, prompt))


async def answer(engine: Any, prompt: list[int]) -> Answer:
    start = time.perf_counter()
    chunks = [came async for came in stream(engine, prompt, OUTPUT)]
    (first, _), (_, last) = chunks[0], chunks[-1]
    return Answer(first - start, last["meta_info"]["cached_tokens"], last["output_ids"])


if __name__ == "__main__":
    main()
