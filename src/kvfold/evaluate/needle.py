"""Six tasks of finding needles in a haystack, by length and depth (Block-GTQ, arXiv 2606.24033, appendix D.1.1).

Reading a haystack takes most of the time. So each haystack is read once and holds the needles of all tasks. Every task
has a sentence of its own, and no word of a key occurs in two tasks. So needles can be mistaken only within a task:

- single: one needle, the only one with its sentence.
- distractor: one needle, with lookalikes all over the haystack: the same sentence and adjective, another noun.
- multi: one of several needles all over the haystack.
- m-key: each of three needles that follow one another.
- m-value: the three values of one key, in one sentence.
- m-query: each of the needles of `multi`.

The needle asked for stands at the depth. Needles all over the haystack stand at equal distances, the first one at the
depth. Behind the end they go on at the beginning. The first three tasks score 0 or 1. The others score the share of
values found. A value is found if greedy decoding gives all its tokens, after the question and the values before it.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from kvfold.evaluate.retrieval import Make, ask, encode, haystack, read, seeded
from kvfold.kept_parts import NOTHING_KEPT, Parts

TASKS = ("single", "distractor", "multi", "m-key", "m-value", "m-query")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
TRIALS = 3  # haystacks per text, length and depth
SPREAD = 4  # needles of `distractor`, and of `multi`

ADJECTIVES = ("red", "old", "green", "silver", "small", "golden", "broken", "wooden", "yellow", "heavy")
NOUNS = ("door", "clock", "boat", "tower", "box", "lamp", "piano", "garden", "bridge", "well", "wagon", "harp", "bell")


@dataclass(frozen=True)
class NeedleRow:
    """The share of a task's answers that was found in one haystack."""

    text: str
    length: int
    depth: float
    trial: int
    task: str
    score: float

    @property
    def haystack(self) -> tuple[str, int, float, int]:
        return self.text, self.length, self.depth, self.trial


@dataclass(frozen=True)
class Needle:
    """A sentence that begins with `question` and holds `values`, and the tasks that ask for it."""

    question: str
    values: tuple[str, ...]
    depth: float
    tasks: tuple[str, ...]

    def encode(self, tokenizer: PreTrainedTokenizerBase) -> list[Tensor]:
        """The tokens of question, values and full stop. Pieces are encoded alone, so a question has the same tokens."""
        return [encode(tokenizer, piece) for piece in (self.question, *self.values, ".\n")]


@torch.no_grad()
def needle_suite(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    make: Make,
    texts: Mapping[str, Tensor],
    lengths: Sequence[int],
    depths: Sequence[float] = DEPTHS,
    trials: int = TRIALS,
    advance: Callable[[float], None] = lambda share: None,
    first: int = 0,
    parts: Parts = NOTHING_KEPT,  # a haystack each
) -> list[NeedleRow]:
    """All tasks, in haystacks of `lengths` tokens out of each text (1-D). Every cache gets the same haystacks. Trials
    are numbered from `first` on, and each number gives other haystacks."""
    rows = []
    for text, tokens in texts.items():
        for length in lengths:
            for depth in depths:
                for trial in range(first, first + trials):
                    measure = partial(_scores, model, tokenizer, make, tokens, length, depth, trial)
                    scores = parts((text, length, depth, trial), measure)
                    rows += [NeedleRow(text, length, depth, trial, task, scores[task]) for task in TASKS]
                    advance(length / (sum(lengths) * len(texts) * len(depths) * trials))
    return rows


def _scores(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    make: Make,
    text: Tensor,
    length: int,
    depth: float,
    trial: int,
) -> dict[str, float]:
    """What each task scores in one haystack."""
    hay, hidden = hide(tokenizer, text, length, depth, trial)
    found: dict[str, list[float]] = {task: [] for task in TASKS}
    for needle, score in _found(model, make(), hay, hidden).items():
        for task in needle.tasks:
            found[task].append(score)
    return {task: fmean(scores) for task, scores in found.items()}


def needles(depth: float, rng: random.Random) -> list[Needle]:
    """The needles of all tasks. Needles all over the haystack begin at `depth`. All others stand at `depth`."""
    adjectives, nouns = rng.sample(ADJECTIVES, len(ADJECTIVES)), rng.sample(NOUNS, len(NOUNS))
    single, target, *several, one = (f"{adjective} {noun}" for adjective, noun in zip(adjectives, nouns, strict=False))
    lookalikes = [f"{adjectives[1]} {noun}" for noun in nouns[len(adjectives) :]]
    elsewhere = [(depth + i / SPREAD) % 1 for i in range(1, SPREAD)]
    numbers = iter(rng.sample(range(10_000, 100_000), 15))

    def needle(what: str, key: str, depth: float, *tasks: str) -> Needle:
        return Needle(f"\nThe {what} of the {key} is", (f" {next(numbers)}",), depth, tasks)

    return [
        needle("password", single, depth, "single"),
        needle("weight", target, depth, "distractor"),
        *(needle("weight", key, at) for key, at in zip(lookalikes, elsewhere, strict=True)),
        needle("code", several[0], depth, "multi", "m-query"),
        *(needle("code", key, at, "m-query") for key, at in zip(several[1:SPREAD], elsewhere, strict=True)),
        *(needle("price", key, depth, "m-key") for key in several[SPREAD:]),
        Needle(
            f"\nThe numbers of the {one} are",
            (f" {next(numbers)}", f", {next(numbers)}", f", {next(numbers)}"),
            depth,
            ("m-value",),
        ),
    ]


def hide(
    tokenizer: PreTrainedTokenizerBase, text: Tensor, length: int, depth: float, trial: int
) -> tuple[Tensor, dict[Needle, list[Tensor]]]:
    """A haystack of `length` tokens with the needles in it, and their tokens. Equal arguments give equal haystacks."""
    rng = seeded(text, length, depth, trial)
    hidden = {needle: needle.encode(tokenizer) for needle in needles(depth, rng)}
    needles_at = [(needle.depth, torch.cat(pieces)) for needle, pieces in hidden.items()]
    return haystack(tokenizer, text, length, needles_at, rng), hidden


def _found(
    model: PreTrainedModel, cache: Cache, tokens: Tensor, hidden: dict[Needle, list[Tensor]]
) -> dict[Needle, float]:
    """Per needle that a task asks for, the share of its values that is found."""
    read(model, cache, tokens)
    asked = {needle: (question, values) for needle, (question, *values, _) in hidden.items() if needle.tasks}
    answers = ask(model, cache, [(question, torch.cat(values)) for question, values in asked.values()])
    return {
        needle: fmean(bool(value.all()) for value in right.split([len(value) for value in values]))
        for (needle, (_, values)), right in zip(asked.items(), answers, strict=True)
    }
