"""Speculative decoding by n-grams, in SGLang or vLLM: users who ask for passages of a text.

    python benchmarks/drafts.py sglang Qwen/Qwen3-8B --text book.txt --csv rows.csv                       # its own
    python benchmarks/drafts.py sglang Qwen/Qwen3-8B --text book.txt -r saw-int4 --artifact fits --csv rows.csv
    python benchmarks/drafts.py vllm Qwen/Qwen3-8B --text book.txt -r saw-int4 --artifact fits --users 64 --csv rows.csv
    python benchmarks/drafts.py vllm Qwen/Qwen3-8B --text book.txt --drafts 0 --csv rows.csv              # no drafts

It runs in an environment with the engine and kvfold. Model and tokenizer are real, since drafts have to be right. A
prompt is a long passage, and the wish to repeat it. vLLM drafts from the prompt and the answer so far. SGLang does not
draft from prompts; it reads the text at start as an external corpus. Every row is greedy and without a prefix cache.
Timing begins when all users have their first token. It ends when all have their last token: those with fewer right
drafts take longer.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from sglang_decode import served_by, so_far, stream, this_gpu
from transformers import AutoTokenizer

from kvfold.files import append_rows

WISH = "Repeat the text above, word for word, from its first word on. Write nothing else."
NGRAM = 4  # tokens that have to match, at most, in vLLM


@dataclass(frozen=True)
class Row:
    engine: str
    version: str
    model: str
    recipe: str  # or the type of the engine's own cache
    attention: str
    drafts: int  # tokens that a step checks beside its first, at most; 0: no speculative decoding
    users: int
    input: int  # tokens per passage
    output: int  # tokens per answer
    decode_tps: float  # tokens of all answers per second, from when all have one until all are done
    tokens_per_step: float  # of a user: 1 without drafts
    acceptance: float  # accepted drafts, of all that were checked
    acceptance_error: float | None  # its standard error, over users; None: of one user, or without drafts
    repeated: float  # tokens of answers that are those of the passage, from its start on
    kv_tokens: int  # that fit
    gpu: str
    torch: str
    date: str


class Answer(NamedTuple):
    counts: list[tuple[float, int]]  # times, with the number of tokens so far
    tokens: list[int]
    accepted: int  # drafts
    drafted: int

    @property
    def written(self) -> int:
        return len(self.tokens) - 1  # the prompt gives the first


class SGLang:
    def __init__(self, options: argparse.Namespace, users: int, longest: int, known: Path) -> None:
        import sglang

        drafting = {
            "speculative_algorithm": "NGRAM",
            "speculative_ngram_max_bfs_breadth": 1,
            "speculative_num_draft_tokens": 1 + options.drafts,
            "speculative_ngram_external_corpus_path": str(known),
            "speculative_ngram_external_sam_budget": options.drafts,
        }
        self.recipe, self.drafts = options.recipe, options.drafts
        self.arguments: dict[str, Any] = {
            "model_path": options.model,
            "disable_radix_cache": True,
            "context_length": longest,
            "cuda_graph_max_bs_decode": users,
            "max_running_requests": 1 + users,  # SGLang counts a prompt twice while it is read in chunks
            "grammar_backend": "none",
            **(drafting if options.drafts else {}),
            **options.engine,
        }
        self.engine = sglang.Engine(**self.arguments)
        self.loop = self.engine.loop
        self.kv_tokens = self.engine._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"]

    def served_by(self) -> dict[str, str]:
        """The columns of a row that say who served, and where."""
        return served_by(self.engine, self.recipe, self.arguments)

    async def answer(self, prompt: list[int], output: int) -> Answer:
        counts, last = [], {}
        async for at, last in stream(self.engine, prompt, output):
            counts.append((at, last["meta_info"]["completion_tokens"]))
        tokens, steps = last["output_ids"], last["meta_info"].get("spec_verify_ct", len(last["output_ids"]) - 1)
        return Answer(counts, tokens, len(tokens) - 1 - steps, steps * self.drafts)


class VLLM:
    def __init__(self, options: argparse.Namespace, users: int, longest: int, known: Path) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        ngrams = {"method": "ngram", "num_speculative_tokens": options.drafts, "prompt_lookup_max": NGRAM}
        drafting = {"speculative_config": ngrams, "per_request_spec_decode_metrics": "summary"}
        self.recipe = options.recipe
        arguments: dict[str, Any] = {
            "model": options.model,
            "enable_prefix_caching": False,
            "max_model_len": longest,
            "max_num_seqs": users,
            **({"block_size": 64} if options.recipe else {}),
            **(drafting if options.drafts else {}),
            **options.engine,
        }
        self.loop = asyncio.new_event_loop()
        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        config = self.engine.vllm_config
        self.kv_tokens = config.cache_config.num_gpu_blocks * config.cache_config.block_size
        self.asked = 0

    def served_by(self) -> dict[str, str]:
        import vllm

        return {
            "engine": "vLLM",
            "version": vllm.__version__,
            "recipe": self.recipe or str(self.engine.vllm_config.cache_config.cache_dtype),
            "attention": "kvfold" if self.recipe else "its own",
            **this_gpu(),
        }

    async def answer(self, prompt: list[int], output: int) -> Answer:
        from vllm import SamplingParams

        self.asked += 1
        wanted = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
        counts, last = [], None
        async for chunk in self.engine.generate({"prompt_token_ids": prompt}, wanted, str(self.asked)):
            last = chunk.outputs[0]
            counts.append((time.perf_counter(), len(last.token_ids)))
        assert last is not None
        checked = last.spec_decode_metrics.to_dict() if last.spec_decode_metrics else {}
        accepted, drafted = (checked.get(f"num_{name}_tokens", 0) for name in ("accepted_draft", "draft"))
        return Answer(counts, list(last.token_ids), accepted, drafted)


ENGINES = {"sglang": SGLang, "vllm": VLLM}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", choices=ENGINES)
    parser.add_argument("model", help="a folder or a Hub id")
    parser.add_argument("--text", type=Path, required=True, help="a long text")
    parser.add_argument("-r", "--recipe", help="default: the engine's own cache")
    parser.add_argument("--artifact", help="a folder, if the recipe needs one")
    parser.add_argument("--drafts", type=int, default=7, help="drafts per step")
    parser.add_argument("--users", type=int, action="append", help="default: 1 and 8")
    parser.add_argument("--input", type=int, default=8192, help="tokens of each passage")
    parser.add_argument("--output", type=int, default=512, help="tokens of each answer")
    parser.add_argument("--engine", type=json.loads, default={}, help="more arguments of the engine, as JSON")
    parser.add_argument("--csv", type=Path, required=True, help="rows are added to it")
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        for row in run(options, options.users or [1, 8], Path(scratch)):
            print(row, flush=True)
            append_rows(options.csv, [asdict(row)])


def run(options: argparse.Namespace, users: list[int], scratch: Path) -> Iterator[Row]:
    if options.recipe:
        os.environ |= {"KVFOLD_RECIPE": options.recipe, "KVFOLD_ARTIFACT": options.artifact or ""}
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text = tokenizer.encode(options.text.read_text(encoding="utf-8"), add_special_tokens=False)
    passages = [text[i * options.input : (i + 1) * options.input] for i in range(max(users))]
    if len(passages[-1]) < options.input:
        raise ValueError(f"{options.text} has {len(text)} tokens, too few for {max(users)} passages of {options.input}")
    known = scratch / "known.jsonl"
    known.write_text("".join(json.dumps(tokenizer.decode(passage)) + "\n" for passage in passages))
    server = ENGINES[options.server](options, max(users), options.input + options.output + 256, known)
    for number, count in enumerate([1, *users]):
        asked = passages[:count]
        prompts = [prompt_of(tokenizer, passage) for passage in asked]
        answers = server.loop.run_until_complete(ask(server, prompts, options.output))
        if number == 0:  # it compiles
            continue
        begin, end = (max(answer.counts[place][0] for answer in answers) for place in (0, -1))
        decoded = sum(options.output - so_far(answer.counts, begin) for answer in answers)
        written, accepted, drafted = (
            sum(getattr(answer, name) for answer in answers) for name in ("written", "accepted", "drafted")
        )
        yield Row(
            **server.served_by(),
            model=Path(options.model).name,
            drafts=options.drafts,
            users=count,
            input=options.input,
            output=options.output,
            decode_tps=round(decoded / (end - begin), 1),
            tokens_per_step=round(written / (written - accepted), 3),  # a step writes one token that is no draft
            acceptance=round(accepted / max(1, drafted), 4),
            acceptance_error=round(standard_error(answers), 4) if count > 1 and drafted else None,
            repeated=round(
                sum(repeated(answer.tokens, passage) for answer, passage in zip(answers, asked, strict=True))
                / sum(len(answer.tokens) for answer in answers),
                3,
            ),
            kv_tokens=server.kv_tokens,
        )
    server.engine.shutdown()


async def ask(server: SGLang | VLLM, prompts: list[list[int]], output: int) -> list[Answer]:
    """All at once."""
    return await asyncio.gather(*(server.answer(prompt, output) for prompt in prompts))


def standard_error(answers: list[Answer]) -> float:
    """Of the share of accepted drafts. Users with more drafts count more, as they do in the share."""
    users, drafted = len(answers), sum(answer.drafted for answer in answers)
    share = sum(answer.accepted for answer in answers) / drafted
    squares = sum((answer.accepted - share * answer.drafted) ** 2 for answer in answers)
    return (users / (users - 1) * squares) ** 0.5 / drafted


def prompt_of(tokenizer: Any, passage: list[int]) -> list[int]:
    asked = [{"role": "user", "content": f"{tokenizer.decode(passage)}\n\n{WISH}"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(prompt, add_special_tokens=False)


def repeated(answer: list[int], passage: list[int]) -> int:
    """How many tokens an answer begins with that are those of the passage."""
    return next((i for i, (own, asked) in enumerate(zip(answer, passage, strict=False)) if own != asked), len(answer))


if __name__ == "__main__":
    main()
