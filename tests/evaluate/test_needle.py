"""The needle suite with models that are known to find, or to lose, what was hidden."""

import random
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold.evaluate.needle import TASKS, NeedleRow, hide, needle_suite, needles
from kvfold.evaluate.retrieval import PREFILL
from kvfold.kept_parts import Parts
from kvfold.text import default_text, tokenize

VOCABULARY = 256
TEXT = torch.full((20_000,), ord("~"))


class Characters:
    """A tokenizer with a token for each character, which may begin texts with BOS."""

    def __init__(self, bos: int | None = None) -> None:
        self.bos_token_id = bos

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        begin = [] if self.bos_token_id is None or not add_special_tokens else [self.bos_token_id]
        return {"input_ids": [*begin, *text.encode("latin-1")]}


class Tape:
    """A cache that is the text so far."""

    def __init__(self) -> None:
        self.text = ""

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.rows = repeats


class Reader:
    """A model that reads on: after the end of the text comes what followed the same sentence in what it `sees`."""

    device = torch.device("cpu")

    def __init__(self, sees: Callable[[str], str] = str, same: Callable[[str], str] = re.escape) -> None:
        self.sees, self.same, self.read = sees, same, [0]

    def __call__(self, ids: Tensor, past_key_values: Tape, logits_to_keep: int) -> SimpleNamespace:
        before, rows = past_key_values.text, [bytes(row).decode("latin-1") for row in ids.tolist()]
        logits = torch.zeros(len(rows), logits_to_keep, VOCABULARY)
        if len(rows) == 1:
            past_key_values.text += rows[0]
            self.read.append(len(rows[0]))
        else:  # questions
            assert len(rows) == past_key_values.rows
        for row, new in enumerate(rows if len(rows) > 1 else ()):
            for i in range(logits_to_keep):
                asked = new[: len(new) - logits_to_keep + 1 + i]
                found = re.search(self.same(asked) + "(.)", self.sees(before))
                logits[row, i, ord(found[1]) if found else 0] = 1
        return SimpleNamespace(logits=logits)


def scores(model: Reader, length: int = 3000, depths: tuple[float, ...] = (0.5,), trials: int = 2) -> dict:
    rows = needle_suite(model, Characters(), Tape, {"tildes": TEXT}, [length], depths, trials)
    assert {(row.text, row.length) for row in rows} == {("tildes", length)}
    return {
        (task, depth): fmean(row.score for row in rows if (row.task, row.depth) == (task, depth))
        for task in TASKS
        for depth in depths
    }


def test_who_reads_everything_finds_everything():
    depths = (0.0, 0.3, 1.0)
    made, shares = [], []
    make = lambda: made.append(Tape()) or made[-1]  # noqa: E731
    model = Reader()
    texts = {"tildes": TEXT, "dashes": torch.full((20_000,), ord("-"))}
    rows = needle_suite(model, Characters(), make, texts, [2000, 10_000], depths, 2, shares.append)
    cells = [(row.text, row.length, row.depth, row.trial, row.task) for row in rows]
    assert cells == list(product(texts, (2000, 10_000), depths, range(2), TASKS))
    assert {row.score for row in rows} == {1.0}
    once = [2000] * 6 + [10_000] * 6  # one reading each, without the questions
    assert [len(tape.text) for tape in made] == once * 2
    assert max(model.read) == PREFILL
    assert sum(shares) == pytest.approx(1)


def test_further_trials_go_on_where_earlier_ones_ended():
    model = Reader(sees=lambda text: re.sub(r"\d(\d{4})", r"1\1", text))  # some values are right
    one, two = (needle_suite(model, Characters(), Tape, {"": TEXT}, [3000], (0.5,), trials) for trials in (1, 3))
    assert 0 < fmean(row.score for row in two[len(one) :]) < 1
    assert needle_suite(model, Characters(), Tape, {"": TEXT}, [3000], (0.5,), 2, first=1) == two[len(one) :]


def test_an_interrupted_suite_goes_on_with_the_next_haystack(tmp_path):
    """Of four haystacks, three get a cache in the first run, and one in the second."""
    model = Reader(sees=lambda text: text[len(text) // 2 :])
    given = (model, Characters(), {"tildes": TEXT}, [2000], (0.25, 0.75), 2)

    def suite(caches: int) -> list[NeedleRow]:
        left = iter([Tape() for _ in range(caches)])
        parts = Parts.load(tmp_path / "parts", "source")
        return needle_suite(*given[:2], lambda: next(left), *given[2:], parts=parts)

    with pytest.raises(StopIteration):
        suite(caches=3)
    whole = needle_suite(*given[:2], Tape, *given[2:])
    assert suite(caches=1) == suite(caches=0) == whole
    assert {row.score for row in whole} >= {0, 1}


def test_who_reads_only_the_end_finds_what_is_there():
    found = scores(Reader(sees=lambda text: text[len(text) * 2 // 5 :]), depths=(0.25, 0.75))
    for task in ("single", "distractor", "multi", "m-key", "m-value"):
        assert (found[task, 0.25], found[task, 0.75]) == (0, 1)
    assert found["m-query", 0.25] == found["m-query", 0.75] == 0.5  # at 0, 25, 50 and 75 %


def test_who_ignores_keys_is_misled_within_a_task():
    """Such a model answers with the first sentence about a price, or a code, whatever it belongs to."""
    any_key = lambda asked: re.sub(r"of\\ the\\ \w+\\ \w+", r"of the \\w+ \\w+", re.escape(asked))  # noqa: E731
    found = scores(Reader(same=any_key), depths=(0.0, 0.5))
    assert (found["single", 0.5], found["m-value", 0.5]) == (1, 1)
    assert (found["distractor", 0.0], found["multi", 0.0]) == (1, 1)  # where the needle asked for comes first
    assert (found["distractor", 0.5], found["multi", 0.5]) == (0, 0)
    assert found["m-key", 0.5] == pytest.approx(1 / 3)
    assert found["m-query", 0.5] == pytest.approx(1 / 4)


def test_who_knows_one_value_of_three_gets_a_third():
    def forget(text: str) -> str:
        return re.sub(r"(numbers of the \w+ \w+ are \d+), \d+, \d+", r"\1, 0, 0", text)

    found = scores(Reader(sees=forget))
    assert found["m-value", 0.5] == pytest.approx(1 / 3)
    assert found["m-key", 0.5] == 1


def test_needles_of_two_tasks_share_no_word():
    for trial in range(5):
        keys = [
            re.fullmatch(r"\nThe (\w+) of the (\w+) (\w+) (?:is|are)", n.question)
            for n in needles(0, random.Random(trial))
        ]
        by_kind: dict[str, set[str]] = {}
        for kind, adjective, noun in (key.groups() for key in keys):
            by_kind.setdefault(kind, set()).update((adjective, noun))
        assert {kind: len(words) for kind, words in by_kind.items()} == {
            "password": 2, "weight": 5, "code": 8, "price": 6, "numbers": 2
        }  # fmt: skip
        assert len(set().union(*by_kind.values())) == 23


@pytest.mark.parametrize("depth", [0.0, 0.4, 1.0])
def test_needles_lie_at_their_depth(depth: float):
    tokens, hidden = hide(Characters(), TEXT, 4000, depth, trial=1)
    text = bytes(tokens.tolist()).decode("latin-1")
    assert len(text) == 4000
    for needle in hidden:
        sentence = "".join((needle.question, *needle.values, ".\n"))
        before, _ = text.split(sentence)
        assert before.count("~") == pytest.approx(needle.depth * text.count("~"), abs=1)
        assert needle.depth == depth or needle.tasks in ((), ("m-query",))


def test_haystacks_begin_as_the_tokenizer_begins_a_text():
    tokens, hidden = hide(Characters(bos=7), TEXT, 4000, 0.0, trial=1)
    assert (len(tokens), tokens[0], (tokens == 7).sum()) == (4000, 7, 1)
    plain, same = hide(Characters(), TEXT, 4000, 0.0, trial=1)
    assert hidden.keys() == same.keys()
    assert (plain == TEXT[0]).sum() == (tokens == TEXT[0]).sum() + 1


def test_haystacks_of_a_text_differ_in_needles_and_in_what_is_cut_out():
    """Needles are letters and digits; the text is not, so what is left is the part that was cut out."""
    text = torch.arange(20_000) % 64 + 128
    haystacks = {
        (depth, trial): hide(Characters(), text, 4000, depth, trial) for depth in (0.0, 0.5) for trial in (0, 1)
    }
    assert len({tuple(needle.values for needle in hidden) for _, hidden in haystacks.values()}) == 4
    places = [tokens[tokens >= 128] for tokens, _ in haystacks.values()]
    assert all((place[1:] - place[:-1]).remainder(64).eq(1).all() for place in places)
    again, _ = hide(Characters(), text, 4000, 0.5, 1)
    assert torch.equal(again, haystacks[0.5, 1][0])
    numbered = torch.arange(20_000) + 1000
    starts = {
        int(hide(Characters(), numbered, 4000, depth, trial)[0][-1]) for depth in (0.0, 0.5) for trial in range(8)
    }
    assert len(starts) > 12
    assert max(starts) - min(starts) > 8000


@pytest.mark.parametrize("length", [600, 30_000])
def test_lengths_that_do_not_work_are_refused(length: int):
    with pytest.raises(ValueError, match=rf"haystacks of {length} tokens .* text has 20000"):
        hide(Characters(), TEXT, length, 0.5, 0)


def test_a_real_model_finds_the_single_needle_in_packed_tokens(embedded):
    model, tokenizer = embedded
    text = tokenize(default_text("evaluation"), tokenizer, 1000)
    rows = needle_suite(
        model, tokenizer, partial(kvfold.cache, model, "int8:centre=false,block=16"), {"": text}, [600], [0.75], 1
    )
    assert next(row.score for row in rows if row.task == "single") == 1
