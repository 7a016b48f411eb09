"""Two abilities that a cache must keep: copying random tokens, and finding needles at several depths."""

import random
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from kvfold.text import opening

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
THINGS = ("red door", "old clock", "green boat", "stone tower", "silver box")  # one needle per depth
COPY_TOKENS = 256
COPY_TRIALS = 2
HAYSTACKS = 2
HAYSTACK_TOKENS = 1024

PREFILL = 8192  # tokens per call of the model; it bounds memory and changes no answer

Make = Callable[[], Cache]
NOTHING = torch.empty(0, dtype=torch.int64)


@torch.no_grad()
def copy_accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, make: Make, text: Tensor) -> float:
    """Feed shuffled tokens of `text` twice. The result is the share of the second half that the model predicts."""
    right, begin = 0, opening(tokenizer)
    for trial in range(COPY_TRIALS):
        generator = torch.Generator().manual_seed(trial)
        once = text[torch.randperm(len(text), generator=generator)[:COPY_TOKENS]]
        tokens = torch.cat((begin, once, once)).to(model.device)
        logits = model(tokens[None, :-1], past_key_values=make(), logits_to_keep=len(once) - 1).logits[0]
        right += int((logits.argmax(dim=-1) == tokens[-len(once) + 1 :]).sum())
    return right / (COPY_TRIALS * (len(once) - 1))


@torch.no_grad()
def needle_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, make: Make, text: Tensor
) -> dict[str, float]:
    """Hide a code per thing of `THINGS` in haystacks out of `text`. The result is the share found, by depth.

    A haystack is read once, then all questions are asked. An answer counts if greedy decoding gives every token of it.
    """
    begin = opening(tokenizer)
    length = min(HAYSTACK_TOKENS, len(text) // HAYSTACKS)
    found = dict.fromkeys(DEPTHS, 0)
    for trial in range(HAYSTACKS):
        rng = random.Random(trial)
        codes = [f" {rng.randrange(10_000, 100_000)}" for _ in THINGS]
        sentences = [f"\nThe code of the {thing} is{code}.\n" for thing, code in zip(THINGS, codes, strict=True)]
        needles = [encode(tokenizer, sentence) for sentence in sentences]
        hay = text[trial * length : (trial + 1) * length - sum(map(len, (begin, *needles)))]
        tokens = torch.cat((begin, bury(hay, list(zip(DEPTHS, needles, strict=True)))))
        cache = make()
        model(tokens[None].to(model.device), past_key_values=cache, logits_to_keep=1)
        asked = [
            (encode(tokenizer, f"\nThe code of the {thing} is"), encode(tokenizer, code))
            for thing, code in zip(THINGS, codes, strict=True)
        ]
        for depth, right in zip(DEPTHS, ask(model, cache, asked), strict=True):
            found[depth] += bool(right.all())
    return {f"{depth:.0%}": count / HAYSTACKS for depth, count in found.items()}


def seeded(text: Tensor, *numbers: float) -> random.Random:
    """Random numbers that depend on these numbers and on the first tokens of the text."""
    return random.Random(f"{text[:8].tolist()} {numbers}")


def haystack(
    tokenizer: PreTrainedTokenizerBase,
    text: Tensor,
    length: int,
    needles: list[tuple[float, Tensor]],
    rng: random.Random,
    begin: Tensor = NOTHING,
    end: Tensor = NOTHING,
) -> Tensor:
    """`length` tokens: a random part of `text` (1-D) with the needles at their depths, between `begin` and `end`."""
    begin = torch.cat((opening(tokenizer), begin))
    room = length - len(begin) - sum(len(needle) for _, needle in needles) - len(end)
    if not length // 2 <= room <= len(text):
        raise ValueError(
            f"haystacks of {length} tokens do not work: what is hidden and asked takes {length - room} tokens, at most "
            f"half of it, and the text has {len(text)}"
        )
    start = rng.randrange(len(text) - room + 1)
    return torch.cat((begin, bury(text[start : start + room], sorted(needles, key=lambda needle: needle[0])), end))


def bury(hay: Tensor, needles: list[tuple[float, Tensor]]) -> Tensor:
    """`hay` (1-D) with the tokens of each needle at its depth. Needles are sorted by depth."""
    parts, begin = [], 0
    for depth, needle in needles:
        end = int(depth * len(hay))
        parts += [hay[begin:end], needle]
        begin = end
    return torch.cat((*parts, hay[begin:]))


def read(model: PreTrainedModel, cache: Cache, tokens: Tensor) -> None:
    """Fill the cache with `tokens` (1-D)."""
    for chunk in tokens.to(model.device).split(PREFILL):
        model(chunk[None], past_key_values=cache, logits_to_keep=1)


def ask(model: PreTrainedModel, cache: Cache, asked: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """For each question and answer: which tokens of the answer greedy decoding gives after the question.

    The cache holds one sequence. It is copied for every question, since not every cache can take a question back.
    """
    width = max(len(question) + len(answer) - 1 for question, answer in asked)
    ids = torch.zeros(len(asked), width, dtype=torch.int64)  # padded on the right, which changes nothing before it
    for row, (question, answer) in zip(ids, asked, strict=True):
        row[: len(question) + len(answer) - 1] = torch.cat((question, answer[:-1]))
    cache.batch_repeat_interleave(len(asked))
    first = min(len(question) for question, _ in asked) - 1
    given = model(ids.to(model.device), past_key_values=cache, logits_to_keep=width - first).logits.argmax(dim=-1).cpu()
    return [
        row[len(question) - 1 - first :][: len(answer)] == answer
        for row, (question, answer) in zip(given, asked, strict=True)
    ]


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
