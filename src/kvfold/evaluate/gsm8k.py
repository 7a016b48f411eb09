"""GSM8K: grade-school problems from a local jsonl file. The final number of an answer must match exactly."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.evaluate.retrieval import Make
from kvfold.kept_parts import NOTHING_KEPT, Parts

SHOTS = 5
STOP = "\n\nQuestion"  # without a chat template, a model goes on to a problem of its own here


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str  # reasoning, then "#### " and the number


@dataclass(frozen=True)
class Problems:
    """The problems that are asked, and the solved ones that stand before them in the prompt. No problem is both."""

    asked: list[Problem]
    shots: list[Problem]


@dataclass(frozen=True)
class Gsm8kScore:
    problems: int
    correct: int

    @property
    def exact_match(self) -> float:
        return self.correct / self.problems

    @property
    def standard_error(self) -> float:
        return math.sqrt(self.exact_match * (1 - self.exact_match) / self.problems)


def read_problems(path: Path, count: int) -> Problems:
    """Ask the first `count` problems of a jsonl file with `question` and `answer`. The last ones are the shots."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        problems = [Problem(line["question"], line["answer"]) for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f'{path} is no GSM8K file, which has lines {{"question": …, "answer": …}}: {error}') from error
    if unsolved := [problem for problem in problems if final_number(problem.answer) is None]:
        raise ValueError(f"{path}: no number in the answer to {unsolved[0].question!r}")
    if not 0 < count <= len(problems) - SHOTS:
        raise ValueError(f"{path} has {len(problems)} problems, {SHOTS} of them to show: cannot ask {count}")
    return Problems(problems[:count], problems[-SHOTS:])


@torch.no_grad()
def gsm8k(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    make: Make,
    problems: Problems,
    batch: int = 128,
    max_new_tokens: int = 512,
    advance: Callable[[float], None] = lambda share: None,
    parts: Parts = NOTHING_KEPT,  # a batch each
) -> Gsm8kScore:
    """Let the model answer greedily, `batch` problems at a time. Each batch gets a new cache."""
    correct, count = 0, len(problems.asked)
    for start in range(0, count, batch):
        some = replace(problems, asked=problems.asked[start : start + batch])
        correct += parts(start, partial(_correct, model, tokenizer, make, some, max_new_tokens))
        advance(len(some.asked) / count)
    return Gsm8kScore(count, correct)


def _correct(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, make: Make, problems: Problems, max_new_tokens: int
) -> int:
    """How many problems are solved, all in one batch."""
    prompts = [prompt(tokenizer, problems.shots, problem.question) for problem in problems.asked]
    ids, mask = left_padded(prompts, tokenizer.eos_token_id)
    written = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        past_key_values=make(),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
        stop_strings=[STOP],
        tokenizer=tokenizer,
    )
    texts = tokenizer.batch_decode(written[:, ids.shape[1] :], skip_special_tokens=True)
    pairs = zip(texts, problems.asked, strict=True)
    return sum(final_number(text) == final_number(problem.answer) for text, problem in pairs)


def prompt(tokenizer: PreTrainedTokenizerBase, shots: list[Problem], question: str) -> list[int]:
    """The tokens of shots and question: turns of a chat if the tokenizer has a chat template, else plain text."""
    if not tokenizer.chat_template:
        solved = "".join(f"Question: {shot.question}\nAnswer: {shot.answer}\n\n" for shot in shots)
        return tokenizer(f"{solved}Question: {question}\nAnswer:")["input_ids"]
    chat = []
    for shot in shots:
        chat += [{"role": "user", "content": shot.question}, {"role": "assistant", "content": shot.answer}]
    chat.append({"role": "user", "content": question})
    # The shots show how to reason. A model that thinks first would take thousands of tokens.
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, enable_thinking=False)
    return inputs["input_ids"]


def left_padded(prompts: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Tokens and attention mask [prompts, tokens of the longest]."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def final_number(text: str) -> Decimal | None:
    """The number after "####". Without one, the last number before the model goes on to another problem."""
    own = text.split(STOP)[0].replace(",", "").replace("$", "")
    number = r"(?<!\d)-?\d+(?:\.\d+)?"  # the minus in 5-3 is no sign
    marked = re.search(rf"####\s*({number})", own)
    numbers = [marked[1]] if marked else re.findall(number, own)
    return Decimal(numbers[-1]) if numbers else None
