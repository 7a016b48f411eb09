"""An evaluation measures what it is asked for, for every recipe, and refuses early what cannot be measured."""

from itertools import product

import pytest
import torch
from tiny_models import HYBRIDS, tiny
from transformers import LlamaConfig, LlamaForCausalLM

from kvfold.evaluate.logits import compare
from kvfold.evaluate.needle import DEPTHS, TASKS
from kvfold.evaluate.run import Haystacks, evaluate
from kvfold.evaluate.tool_calls import CALLS
from kvfold.recipes import parse
from kvfold.text import default_text, tokenize


@pytest.fixture(scope="module")
def small(embedded):
    """A model with random weights, and the tokenizer of the embedded one, with tokens."""
    _, tokenizer = embedded
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config).eval()
    # So that generation ends after a token.
    model.generation_config.eos_token_id = list(range(len(tokenizer)))
    return model, tokenizer, tokenize(default_text("evaluation"), tokenizer, 1200)


def test_the_suites_are_measured_for_every_recipe(small, monkeypatch):
    monkeypatch.setattr("kvfold.evaluate.tool_calls.MOST_TOKENS", 2)
    model, tokenizer, tokens = small
    shares: list[float] = []
    report = evaluate(
        model,
        tokenizer,
        [parse("int4:centre=false,block=16")],
        tokens[:64],
        64,
        haystacks=Haystacks({"one": tokens, "other": tokens.flip(0)}, [500], [1100], trials=1),
        advance=shares.append,
    )
    for row in report.rows:
        cells = [(cell.text, cell.length, cell.depth, cell.trial, cell.task) for cell in row.suite]
        assert cells == list(product(("one", "other"), [500], DEPTHS, range(1), TASKS))
        calls = [(call.text, call.length, call.trial, call.call) for call in row.tool_calls]
        assert calls == list(product(("one", "other"), [1100], range(1), range(CALLS)))
        assert not any(call.valid or call.exact for call in row.tool_calls)  # random weights
        assert row.kl_beyond_16k is None
        assert row.tasks is None
    assert sum(shares) == pytest.approx(1, abs=0.02)


def test_only_what_is_asked_for_is_measured(small):
    model, tokenizer, tokens = small
    (row,) = evaluate(model, tokenizer, [], tokens[:64], 64).rows
    assert (row.suite, row.tool_calls, row.tasks) == (None, None, None)


def test_every_cache_is_asked_about_the_text(small):
    """The model ends its answer after a token, which is the likeliest without any cache."""
    model, tokenizer, tokens = small
    report = evaluate(model, tokenizer, [parse("int8:centre=false")], tokens[:64], 64, answers=True)
    message = [{"role": "user", "content": f"{tokenizer.decode(tokens[:64])}\n\n{report.question}"}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        likeliest = model(prompt["input_ids"], use_cache=False).logits[0, -1].argmax()
    assert [row.answer for row in report.rows] == [tokenizer.decode(likeliest, skip_special_tokens=True).strip()] * 2
    assert evaluate(model, tokenizer, [], tokens[:64], 64).rows[0].answer is None


def test_positions_far_back_are_reported_apart(small, monkeypatch):
    monkeypatch.setattr("kvfold.evaluate.run.LONG", 40)
    model, tokenizer, tokens = small
    reference, row = evaluate(model, tokenizer, [parse("int2:centre=false")], tokens[:64], 64).rows
    assert reference.kl_beyond_16k == reference.kl_tail_beyond_16k == 0
    assert 0 < row.kl_beyond_16k <= row.kl_tail_beyond_16k <= row.kl_tail
    assert reference.perplexity_beyond_16k != reference.perplexity


def test_hybrids_are_measured_layer_by_packed_layer(embedded):
    """A sliding layer cannot take questions back, and linear attention has no keys."""
    _, tokenizer = embedded
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
    tokens = tokenize(default_text("evaluation"), tokenizer, 300)
    for name in ("Gemma3", "Qwen3Next"):
        report = evaluate(
            tiny(name, **sizes),
            tokenizer,
            [parse("int8:centre=false,block=4")],
            tokens,
            150,
            layers=True,
        )
        assert report.noise_floor < 1e-3
        assert report.rows[0].kl == 0
        assert report.rows[1].kl < 0.05
        for row in report.rows:
            assert [layer.layer for layer in row.layers] == list(HYBRIDS[name][1])
            assert row.tokens == 298


def test_scored_passages_begin_with_bos(small, monkeypatch):
    model, tokenizer, tokens = small
    seen: list[torch.Tensor] = []
    monkeypatch.setattr("kvfold.text.opening", lambda _: torch.tensor([9]))
    monkeypatch.setattr(
        "kvfold.evaluate.run.compare", lambda model, tokens, *rest: seen.append(tokens) or compare(model, tokens, *rest)
    )
    evaluate(model, tokenizer, [], tokens[:64], 32)
    assert seen[0].tolist() == [9, *tokens[1:32].tolist(), 9, *tokens[33:64].tolist()]


def test_haystacks_that_the_text_cannot_fill_are_refused_early(small):
    model, tokenizer, tokens = small
    with pytest.raises(ValueError, match="haystacks of 4096 tokens"):
        evaluate(
            model,
            tokenizer,
            [],
            tokens[:600],
            64,
            haystacks=Haystacks({"": tokens}, [4096]),
            advance=lambda _: pytest.fail("too late"),
        )
    with pytest.raises(ValueError, match="haystacks of 700 tokens"):
        evaluate(model, tokenizer, [], tokens[:600], 64, haystacks=Haystacks({"": tokens}, tool_calls=[700]))
