"""Tool calls after a long context: what agents do, and what breaks when they break.

The context begins with the tools. Then comes real text, with records hidden in it at equal distances: earlier requests
with their calls. In the end one of the records is shown again, and each of the others is asked for:

    Request: Open the gate.
    Call: {"tool": "open_gate", "arguments": {"gate": "Lisbon", "gate_number": 48213}}

The model has to write the call again, as JSON, from the record. A call is valid if it can be run: it is JSON, and has
the right tool, the arguments of that tool and their types. It is exact if all arguments are right too. The context is
read once. Then all requests are answered as one batch, by greedy decoding.

Other prompts were tried on SmolLM2-135M with a 16-bit cache at 2,048 tokens, with 12 or 18 calls each. This one gave 17
exact calls of 18. Records that were sentences or arguments alone gave 0 to 42 %, argument names that all tools share 22
to 33 %, tools and three solved requests at the end 8 of 12: the model took the facts of the nearest record.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from kvfold.evaluate.retrieval import Make, encode, haystack, read, seeded
from kvfold.kept_parts import NOTHING_KEPT, Parts

TRIALS = 5  # haystacks per text and length
MOST_TOKENS = 64  # of an answer

TOOLS = {  # and what they act on, which gives the names of their arguments
    "open_gate": "gate",
    "pay_invoice": "invoice",
    "call_driver": "driver",
    "book_hotel": "hotel",
    "check_ticket": "ticket",
    "board_train": "train",
    "visit_patient": "patient",
    "repair_engine": "engine",
    "water_garden": "garden",
}
CALLS = 6  # requests of a haystack
CITIES = ("Lisbon", "Paris", "Tokyo", "Berlin", "Boston", "Madrid", "Cairo", "Dublin", "Oslo", "Vienna", "Rome")
AGAIN = "\n\nRequests that stand above come again. Write the same calls.\n\n"


@dataclass(frozen=True)
class ToolCallRow:
    """One call. `call` numbers the requests of a haystack, by the depth of their records."""

    text: str
    length: int
    trial: int
    call: int
    valid: bool
    exact: bool

    @property
    def haystack(self) -> tuple[str, int, int]:
        return self.text, self.length, self.trial


@dataclass(frozen=True)
class Record:
    """An earlier request and its call."""

    tool: str
    city: str
    number: int

    @property
    def request(self) -> str:
        return f"Request: {self.tool.replace('_', ' the ').capitalize()}.\nCall:"

    @property
    def call(self) -> dict[str, Any]:
        thing = TOOLS[self.tool]
        return {"tool": self.tool, "arguments": {thing: self.city, f"{thing}_number": self.number}}

    @property
    def written(self) -> str:
        return f"\n{self.request} {json.dumps(self.call)}\n"


@torch.no_grad()
def tool_calls(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    make: Make,
    texts: Mapping[str, Tensor],
    lengths: Sequence[int],
    trials: int = TRIALS,
    advance: Callable[[float], None] = lambda share: None,
    first: int = 0,
    parts: Parts = NOTHING_KEPT,  # a haystack each
) -> list[ToolCallRow]:
    """The calls in haystacks of `lengths` tokens out of each text (1-D). Every cache gets the same haystacks.
    Trials are numbered from `first` on, and each number gives another haystack."""
    rows = []
    for text, tokens in texts.items():
        for length in lengths:
            for trial in range(first, first + trials):
                measure = partial(_scores, model, tokenizer, make, tokens, length, trial)
                for i, (valid, exact) in enumerate(parts((text, length, trial), measure)):
                    rows.append(ToolCallRow(text, length, trial, i, valid, exact))
                advance(length / (sum(lengths) * len(texts) * trials))
    return rows


def _scores(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, make: Make, text: Tensor, length: int, trial: int
) -> list[tuple[bool, bool]]:
    """The `score` of each call in one haystack."""
    context, records = hide_records(tokenizer, text, length, trial)
    cache = make()
    read(model, cache, context)
    answers = answer(model, tokenizer, cache, [record.request for record in records])
    return [score(said, record.call) for said, record in zip(answers, records, strict=True)]


def hide_records(
    tokenizer: PreTrainedTokenizerBase, text: Tensor, length: int, trial: int
) -> tuple[Tensor, list[Record]]:
    """All that is read before a request, `length` tokens, and the records that are asked for, by depth."""
    rng = seeded(text, length, trial)
    facts = zip(rng.sample(list(TOOLS), 1 + CALLS), rng.sample(CITIES, 1 + CALLS), strict=True)
    shown, *asked = (Record(tool, city, rng.randrange(10_000, 100_000)) for tool, city in facts)
    begin, end = encode(tokenizer, signatures()), encode(tokenizer, AGAIN + shown.written.lstrip() + "\n")
    hidden = [(i / (CALLS - 1), encode(tokenizer, record.written)) for i, record in enumerate(asked)]
    hidden.append((0.5, encode(tokenizer, shown.written)))
    return haystack(tokenizer, text, length, hidden, rng, begin, end), asked


def signatures() -> str:
    lines = (f"{tool}({thing}: string, {thing}_number: integer)\n" for tool, thing in TOOLS.items())
    return f"Tools:\n{''.join(lines)}\n"


def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: Cache, requests: Sequence[str]
) -> list[str]:
    """What greedy decoding writes after each request, at least up to the end of the call or line.

    The cache holds one sequence, and is copied for every request. Requests get equally long by empty lines before them.
    """
    asked, filler = [encode(tokenizer, request) for request in requests], encode(tokenizer, "\n")[-1:]
    width = max(map(len, asked))
    new = torch.stack([torch.cat((filler.repeat(width - len(request)), request)) for request in asked]).to(model.device)
    cache.batch_repeat_interleave(len(requests))
    written = torch.empty(len(requests), 0, dtype=torch.int64)
    while True:
        new = model(new, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(dim=-1, keepdim=True)
        written = torch.cat((written, new.cpu()), dim=1)
        said = tokenizer.batch_decode(written)
        if written.shape[1] == MOST_TOKENS or all("}}" in text or "\n" in text.lstrip() for text in said):
            return said


def score(said: str, expected: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether what was said is valid, and whether it is the expected call. Text behind the JSON object is left out."""
    try:
        call, _ = json.JSONDecoder().raw_decode(said.lstrip())
    except ValueError:
        return False, False
    return _shape(call) == _shape(expected), call == expected


def _shape(call: Any) -> Any:
    """The call with types in place of the values of its arguments."""
    if not isinstance(call, dict) or not isinstance(call.get("arguments"), dict):
        return None
    return {**call, "arguments": {name: type(value) for name, value in call["arguments"].items()}}
