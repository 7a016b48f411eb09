import json
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvfold
from kvfold.evaluate.gsm8k import STOP, Problem, Problems, final_number, gsm8k, prompt, read_problems
from kvfold.kept_parts import Parts

PROBLEMS = [
    Problem(f"How much is {i} and {i}?", f"{i}+{i}=<<{i}+{i}={2 * i}>>{2 * i}\n#### {2 * i}") for i in range(12)
]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 and 4 make 7.\n#### 7", "7"),
        ("#### $1,080\nNow 5 more", "1080"),
        ("It costs $1,234.50.", "1234.5"),
        ("So 12-5 = 7", "7"),
        ("between 5-10", "10"),
        ("It fell to -3 degrees", "-3"),
        ("18.00", "18"),
        (f"The answer is 4.{STOP}: What is 5 and 5?\nAnswer: 10\n#### 10", "4"),
        ("first 1, then 2", "2"),
    ],
)
def test_final_number(text: str, number: str):
    assert final_number(text) == Decimal(number)


def test_no_number_is_no_answer():
    assert final_number("I do not know.") is None


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "test.jsonl"
    path.write_text("\n".join(json.dumps(vars(problem)) for problem in PROBLEMS) + "\n")
    return path


def test_the_first_problems_are_asked_and_the_last_ones_shown(file: Path):
    read = read_problems(file, 7)
    assert (read.asked, read.shots) == (PROBLEMS[:7], PROBLEMS[7:])


@pytest.mark.parametrize("count", [0, 8])
def test_shots_are_never_asked(file: Path, count: int):
    with pytest.raises(ValueError, match=f"12 problems, 5 of them to show: cannot ask {count}"):
        read_problems(file, count)


@pytest.mark.parametrize("line", ["text", '{"question": "?"}', "[1]", '{"question": "?", "answer": "none"}'])
def test_other_files_are_refused(file: Path, line: str):
    file.write_text(file.read_text() + line)
    with pytest.raises(ValueError, match=r"no GSM8K file|no number in the answer to '\?'"):
        read_problems(file, 1)


def test_shots_come_before_the_question_in_a_chat_and_in_plain_text(embedded):
    _, tokenizer = embedded
    shown, question = PROBLEMS[-2:], PROBLEMS[0].question
    order = [text for shot in shown for text in (shot.question, shot.answer)] + [question]
    for template, end in ((tokenizer.chat_template, "<|im_start|>assistant\n"), (None, "\nAnswer:")):
        text = tokenizer.decode(prompt(Without(tokenizer, template), shown, question))
        places = [text.index(part) for part in order]
        assert places == sorted(places)
        assert text.endswith(f"{question}{end}" if template is None else end)


class Without:
    """A tokenizer with another chat template."""

    def __init__(self, tokenizer, chat_template: str | None) -> None:
        self.tokenizer, self.chat_template = tokenizer, chat_template

    def __getattr__(self, name: str):
        return getattr(self.tokenizer, name)

    def __call__(self, *arguments, **options):
        return self.tokenizer(*arguments, **options)


def test_what_is_right_counts_and_each_batch_has_its_own_cache(embedded, tmp_path):
    """A model that answers the questions with even numbers right, and those with odd ones with 1 too many."""
    _, tokenizer = embedded
    calls = []

    def generate(input_ids, attention_mask, past_key_values, **options):
        calls.append((len(input_ids), past_key_values, options["stop_strings"], options["do_sample"]))
        assert ((input_ids == options["pad_token_id"]) >= (attention_mask == 0)).all()
        answers = []
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            own = tokenizer.decode(ids[mask.bool()])
            assert own.count("How much") == 6
            i = int(own.split("How much is ")[-1].split()[0])
            answers.append(tokenizer(f" It is {i + i + i % 2}.")["input_ids"])
        width = max(map(len, answers))
        padded = [answer + [options["pad_token_id"]] * (width - len(answer)) for answer in answers]
        return torch.cat((input_ids, torch.tensor(padded)), dim=1)

    shares: list[float] = []
    caches = iter("abc")
    model = SimpleNamespace(generate=generate, device=torch.device("cpu"))
    problems = Problems(PROBLEMS[:7], PROBLEMS[7:])
    score = gsm8k(
        model,
        tokenizer,
        lambda: next(caches),
        problems,
        batch=3,
        advance=shares.append,
        parts=Parts.load(tmp_path / "parts", "source"),
    )
    assert (score.problems, score.correct, score.exact_match) == (7, 4, 4 / 7)
    assert calls == [(n, cache, [STOP], False) for n, cache in ((3, "a"), (3, "b"), (1, "c"))]
    assert sum(shares) == pytest.approx(1)
    again = Parts.load(tmp_path / "parts", "source")
    assert gsm8k(None, None, None, problems, batch=3, parts=again) == score, "no batch is asked again"


def test_a_packed_batch_writes_what_each_prompt_gives_alone(embedded):
    """Left padding and packing in 16 bits change no number that a model writes; here one with random weights, which
    knows digits only."""
    _, tokenizer = embedded
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.4,
    )
    model = LlamaForCausalLM(config).eval()
    digits = tokenizer("0123456789", add_special_tokens=False)["input_ids"]
    others = torch.ones(len(tokenizer), dtype=torch.bool).index_fill(0, torch.tensor(digits), False)
    model.lm_head.weight.data[others] = 0
    shots, questions = PROBLEMS[7:9], ["How much is 1?", "And how much is it if nobody knows how much it is?", "What?"]
    alone = []
    for question in questions:
        ids = torch.tensor([prompt(tokenizer, shots, question)])
        written = model.generate(
            ids, past_key_values=DynamicCache(config=config), max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        alone.append(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True))
    assert len(set(alone)) > 1
    problems = Problems([Problem(*pair) for pair in zip(questions, alone, strict=True)], shots)
    make = partial(kvfold.cache, model, "bf16")
    assert gsm8k(model, tokenizer, make, problems, batch=3, max_new_tokens=6).correct == 3
