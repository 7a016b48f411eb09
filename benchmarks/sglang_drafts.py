"""Speculative decoding in SGLang by NGRAM: users who ask for passages of a text that the server knows.

    python benchmarks/sglang_drafts.py Qwen/Qwen3-8B --text book.txt --engine '{"attention_backend": "fa3"}' \\
        --csv rows.csv                                                                                      # its own
    python benchmarks/sglang_drafts.py Qwen/Qwen3-8B --text book.txt -r saw-int4 --artifact fits --csv rows.csv # packed
    python benchmarks/sglang_drafts.py Qwen/Qwen3-8B --text book.txt -r saw-int4 --artifact fits --drafts 0 \\
        --csv rows.csv                                                                                    # no drafts

It runs in an environment with SGLang and kvfold. Model and tokenizer are real, since drafts have to be right. A prompt
is a long passage, and the wish to repeat it. Drafts come from the text, which SGLang reads at start as an external
corpus: it does not draft from prompts. Every row is greedy and without a prefix cache. Timing begins when all users
have their first token. It ends when all have their last token: those with fewer right drafts take longer.
"""

import argparse
import asyncio
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import stdev
from tempfile import TemporaryDirectory
from typing import Any

from sglang_decode import served_by, so_far
from transformers import AutoTokenizer

from kvfold.files import append_rows

WISH = "Repeat the text above, word for word, from its first word on. Write nothing else."


@dataclass(frozen=True)
class Row:
    engine: str
    version: str
    model: str
    recipe: str  # or the type of SGLang's own cache
    attention: str
    drafts: int  # tokens that a step checks beside its first, 0: no speculative decoding
    users: int
    input: int  # tokens per prompt
    output: int  # tokens per answer
    decode_tps: float  # tokens of all answers per second, from when all have one until all are done
    tokens_per_step: float  # of a user: 1 without drafts
    acceptance: float  # accepted drafts, of all that were checked
    acceptance_error: float | None  # its standard error, over users; None: of one user
    repeated: float  # tokens of answers that are those of the passage, from its start on
    kv_tokens: int  # that fit
    gpu: str
    torch: str
    date: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a Hub id")
    parser.add_argument("--text", type=Path, required=True, help="a long text")
    parser.add_argument("-r", "--recipe", help="default: SGLang's own cache")
    parser.add_argument("--artifact", help="a folder, if the recipe needs one")
    parser.add_argument("--drafts", type=int, default=7, help="drafts per step")
    parser.add_argument("--users", type=int, action="append", help="default: 1 and 8")
    parser.add_argument("--input", type=int, default=8192, help="tokens of each passage")
    parser.add_argument("--output", type=int, default=512, help="tokens of each answer")
    parser.add_argument("--engine", type=json.loads, default={}, help="more arguments of sglang.Engine, as JSON")
    parser.add_argument("--csv", type=Path, required=True, help="rows are added to it")
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        for row in run(options, options.users or [1, 8], Path(scratch)):
            print(row, flush=True)
            append_rows(options.csv, [asdict(row)])


def run(options, users: list[int], scratch: Path):
    if options.recipe:
        os.environ |= {"KVFOLD_RECIPE": options.recipe, "KVFOLD_ARTIFACT": options.artifact or ""}
    import sglang

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text = tokenizer.encode(options.text.read_text(encoding="utf-8"), add_special_tokens=False)
    passages = [text[i * options.input : (i + 1) * options.input] for i in range(max(users))]
    known = scratch / "known.jsonl"
    known.write_text("".join(json.dumps(tokenizer.decode(passage)) + "\n" for passage in passages))
    drafting = {
        "speculative_algorithm": "NGRAM",
        "speculative_ngram_max_bfs_breadth": 1,
        "speculative_num_draft_tokens": 1 + options.drafts,
        "speculative_ngram_external_corpus_path": str(known),
        "speculative_ngram_external_sam_budget": options.drafts,
    }
    arguments: dict[str, Any] = {
        "model_path": options.model,
        "disable_radix_cache": True,
        "context_length": options.input + options.output + 256,
        "cuda_graph_max_bs_decode": max(users),
        "max_running_requests": 1 + max(users),  # SGLang counts a prompt twice while it is read in chunks
        "grammar_backend": "none",
        **(drafting if options.drafts else {}),
        **options.engine,
    }
    engine = sglang.Engine(**arguments)
    info = engine._scheduler_init_result.scheduler_infos[0]
    for number, count in enumerate([1, *users]):
        asked = passages[:count]
        found = engine.loop.run_until_complete(answers(engine, tokenizer, asked, options.output))
        if number == 0:  # it compiles
            continue
        counts, tokens, checks = zip(*found, strict=True)
        begin, end = (max(count[place][0] for count in counts) for place in (0, -1))
        decoded = sum(options.output - so_far(count, begin) for count in counts)
        steps, written = sum(checks), sum(map(len, tokens)) - count  # prompts give the first tokens
        own = [accepted(len(some) - 1, few, options.drafts) for some, few in zip(tokens, checks, strict=True)]
        yield Row(
            **served_by(engine, options.recipe, arguments),
            model=Path(options.model).name,
            drafts=options.drafts,
            users=count,
            input=options.input,
            output=options.output,
            decode_tps=round(decoded / (end - begin), 1),
            tokens_per_step=round(written / steps, 3) if options.drafts else 1.0,
            acceptance=round(accepted(written, steps, options.drafts), 4),
            acceptance_error=round(stdev(own) / count**0.5, 4) if count > 1 else None,
            repeated=round(sum(map(repeated, tokens, asked)) / sum(map(len, tokens)), 3),
            kv_tokens=info["max_total_num_tokens"],
        )
    engine.shutdown()


async def answers(engine, tokenizer, passages: list[list[int]], output: int):
    """Per user: times with the numbers of tokens so far, the tokens, and how many steps checked drafts."""
    return await asyncio.gather(*(answer(engine, tokenizer, passage, output) for passage in passages))


async def answer(engine, tokenizer, passage: list[int], output: int):
    wanted = {"max_new_tokens": output, "temperature": 0, "ignore_eos": True}
    asked = [{"role": "user", "content": f"{tokenizer.decode(passage)}\n\n{WISH}"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    counts, last = [], {}
    async for chunk in await engine.async_generate(input_ids=ids, sampling_params=wanted, stream=True):
        counts.append((time.perf_counter(), chunk["meta_info"]["completion_tokens"]))
        last = chunk
    return counts, last["output_ids"], last["meta_info"].get("spec_verify_ct", 0)


def accepted(written: int, steps: int, drafts: int) -> float:
    """The share of accepted drafts, if `steps` steps wrote so many tokens. Each writes one that is no draft."""
    return (written - steps) / (steps * drafts) if drafts else 0.0


def repeated(answer: list[int], passage: list[int]) -> int:
    """How many tokens an answer begins with that are those of the passage."""
    return next((i for i, (own, asked) in enumerate(zip(answer, passage, strict=False)) if own != asked), len(answer))


if __name__ == "__main__":
    main()
