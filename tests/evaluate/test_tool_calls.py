"""Tool calls: the scorer against calls written by hand, and the task with models that are known to find or to lose."""

import json
import re
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import kvfold
from kvfold.evaluate.retrieval import encode, read
from kvfold.evaluate.tool_calls import CALLS, MOST_TOKENS, TOOLS, Record, answer, hide_records, score, tool_calls
from kvfold.kept_parts import Parts

EXPECTED = {"tool": "open_gate", "arguments": {"gate": "Lisbon", "gate_number": 48213}}
TOKENIZER = byte_tokenizer()
TEXT = torch.full((9000,), int(encode(TOKENIZER, "~")[0]))


@pytest.mark.parametrize(
    ("said", "valid", "exact"),
    [
        (json.dumps(EXPECTED), True, True),
        (' {"tool":"open_gate","arguments":{"gate_number":48213,"gate":"Lisbon"}}\n\nRequest: Pay', True, True),
        ('{"tool": "open_gate", "arguments": {"gate": "Lisbon", "gate_number": 48214}}', True, False),
        ('{"tool": "open_gate", "arguments": {"gate": "lisbon", "gate_number": 48213}}', True, False),
        ('{"tool": "open_gate", "arguments": {"gate": "Lisbon", "gate_number": "48213"}}', False, False),
        ('{"tool": "open_gate", "arguments": {"gate": "Lisbon", "gate_number": 48213.5}}', False, False),
        ('{"tool": "open_gate", "arguments": {"gate": "Lisbon", "gate_number": true}}', False, False),
        ('{"tool": "open_gate", "arguments": {"gate": null, "gate_number": 48213}}', False, False),
        ('{"tool": "open_gate", "arguments": {"gate": "Lisbon", "number": 48213}}', False, False),
        ('{"tool": "open_gate", "arguments": {"gate": "Lisbon"}}', False, False),
        ('{"tool": "open_gate", "arguments": {"gate": "Lisbon", "gate_number": 48213, "city": "Rome"}}', False, False),
        ('{"tool": "shut_gate", "arguments": {"gate": "Lisbon", "gate_number": 48213}}', False, False),
        ('{"name": "open_gate", "arguments": {"gate": "Lisbon", "gate_number": 48213}}', False, False),
        ('{"tool": "open_gate", "arguments": {"gate": "Lisbon", "gate_number": 48213}', False, False),
        ('{"tool": "open_gate", "arguments": {"gate": Lisbon, "gate_number": 48213}}', False, False),
        ('{"tool": "open_gate", "arguments": ["Lisbon", 48213]}', False, False),
        ('{"tool": "open_gate"}', False, False),
        ('The call is {"tool": "open_gate", "arguments": {"gate": "Lisbon", "gate_number": 48213}}', False, False),
        ("48213", False, False),
        ("", False, False),
    ],
)
def test_calls_are_valid_and_exact(said: str, valid: bool, exact: bool):
    assert score(said, EXPECTED) == (valid, exact)


class Tape:
    """A cache that is the text so far, of one sequence or of several."""

    def __init__(self) -> None:
        self.texts = [""]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.texts *= repeats


class Reader:
    """A model that writes what followed the same request before, in the part of the text that it `sees`."""

    device = torch.device("cpu")

    def __init__(self, sees: Callable[[str], str] = str) -> None:
        self.sees = sees

    def __call__(self, ids: Tensor, past_key_values: Tape, logits_to_keep: int) -> SimpleNamespace:
        assert logits_to_keep == 1
        tape, logits = past_key_values, torch.zeros(len(ids), 1, len(TOKENIZER))
        tape.texts = [before + new for before, new in zip(tape.texts, TOKENIZER.batch_decode(ids), strict=True)]
        for row, text in enumerate(tape.texts if len(tape.texts) > 1 else ()):
            before, request = text.rsplit("Request:", 1)
            found = re.search(f"Request:{re.escape(request)}(.)", self.sees(before), re.DOTALL)
            logits[row, 0, encode(TOKENIZER, found[1] if found else "?")[0]] = 1
        return SimpleNamespace(logits=logits)


def test_who_reads_everything_writes_every_call(monkeypatch, tmp_path):
    monkeypatch.setattr("kvfold.evaluate.tool_calls.MOST_TOKENS", 120)  # a token is a character here
    shares: list[float] = []
    parts, texts = Parts.load(tmp_path / "parts", "source"), {"one": TEXT, "other": TEXT}
    rows = tool_calls(Reader(), TOKENIZER, Tape, texts, [4000], 2, shares.append, parts=parts)
    keys = [(row.text, row.length, row.trial, row.call) for row in rows]
    assert keys == list(product(("one", "other"), [4000], range(2), range(CALLS)))
    assert all(row.valid and row.exact for row in rows)
    assert sum(shares) == pytest.approx(1)
    again = Parts.load(tmp_path / "parts", "source")
    assert tool_calls(None, TOKENIZER, None, texts, [4000], 2, parts=again) == rows, "nothing is read again"


def test_who_reads_only_the_end_writes_the_calls_of_records_that_stand_there(monkeypatch):
    monkeypatch.setattr("kvfold.evaluate.tool_calls.MOST_TOKENS", 120)
    model = Reader(sees=lambda text: text[len(text) // 2 :])
    rows = tool_calls(model, TOKENIZER, Tape, {"": TEXT}, [6000], 1)
    half = CALLS // 2
    assert [row.exact for row in rows] == [False] * half + [True] * half
    assert [row.valid for row in rows] == [False] * half + [True] * half


def test_further_trials_go_on_where_earlier_ones_ended(monkeypatch):
    monkeypatch.setattr("kvfold.evaluate.tool_calls.MOST_TOKENS", 120)
    model = Reader(sees=lambda text: re.sub(r"\b[1-5](\d{4})", r"9\1", text))  # some calls are right
    rows = tool_calls(model, TOKENIZER, Tape, {"": TEXT}, [4000], 3)
    assert {row.exact for row in rows[CALLS:]} == {True, False}
    assert tool_calls(model, TOKENIZER, Tape, {"": TEXT}, [4000], 2, first=1) == rows[CALLS:]


def test_wrong_facts_are_valid_and_not_exact(monkeypatch):
    monkeypatch.setattr("kvfold.evaluate.tool_calls.MOST_TOKENS", 120)
    model = Reader(sees=lambda text: re.sub(r"\d{5}", "12345", text))
    rows = tool_calls(model, TOKENIZER, Tape, {"": TEXT}, [4000], 1)
    assert all(row.valid and not row.exact for row in rows)


def test_answers_that_never_end_are_cut():
    said = answer(Reader(), TOKENIZER, Tape(), ["Request: Sing.", "Request: Dance the waltz."])
    assert said == ["?" * MOST_TOKENS] * 2


def test_records_lie_at_equal_distances_and_differ():
    tokens, records = hide_records(TOKENIZER, TEXT, 5000, trial=3)
    text = TOKENIZER.decode(tokens)
    assert len(tokens) == 5000
    assert text.startswith("Tools:\nopen_gate(gate: string, gate_number: integer)\n")
    for i, record in enumerate(records):
        before, _ = text.split(record.written)  # once
        assert before.count("~") == pytest.approx(i / (CALLS - 1) * text.count("~"), abs=1)
    assert len({record.tool for record in records}) == len({record.city for record in records}) == CALLS
    end = text[text.rindex("~") :]
    shown = re.search(r"\n(Request: .*\nCall:) (\{.*\}\})\n", end[end.index("again") :])
    assert json.loads(shown[2])["tool"] in TOOLS.keys() - {record.tool for record in records}
    others = [hide_records(TOKENIZER, TEXT, 5000, trial)[1] for trial in range(4)]
    assert len({tuple(record.number for record in records) for records in others}) == 4


def test_a_request_names_its_tool():
    record = Record("open_gate", "Lisbon", 48213)
    assert (record.request, record.call) == ("Request: Open the gate.\nCall:", EXPECTED)
    assert score(record.written.split("Call:")[1], EXPECTED) == (True, True)


@pytest.mark.parametrize("length", [2000, 20_000])
def test_lengths_that_do_not_work_are_refused(length: int):
    with pytest.raises(ValueError, match=f"haystacks of {length} tokens .* text has 9000"):
        hide_records(TOKENIZER, TEXT, length, 0)


def test_a_request_is_answered_in_a_batch_as_alone(monkeypatch):
    """Requests of different lengths, over a packed cache with an open block."""
    monkeypatch.setattr("kvfold.evaluate.tool_calls.MOST_TOKENS", 12)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENIZER), **sizes, **heads)).eval()
    context = torch.randint(0, len(TOKENIZER), (70,))
    requests = ["Request: Go.", "Request: Open the gate.", "Request: Visit the patient."]
    width = max(map(len, requests))

    def said(*requests: str) -> list[str]:
        cache = kvfold.cache(model, "int8:centre=false,block=8")
        with torch.no_grad():
            read(model, cache, context)
            return answer(model, TOKENIZER, cache, requests)

    assert said(*requests) == [said("\n" * (width - len(request)) + request)[0] for request in requests]
