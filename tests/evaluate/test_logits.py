"""Scores against float64 sums over logits that plain forward calls give."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvfold
from kvfold.evaluate.logits import compare
from kvfold.evaluate.retrieval import DEPTHS, copy_accuracy, needle_accuracy
from kvfold.text import default_text, tokenize


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.4,
    )
    return LlamaForCausalLM(config).eval()


def test_compare_sums_what_it_says(model):
    """Passages that begin with an empty cache, every token but the last of a passage scored, KL from the reference."""
    tokens = torch.randint(0, 61, (1500,), generator=torch.Generator().manual_seed(1))
    make = partial(kvfold.cache, model, "int2:centre=false")
    shares = []
    own, scores = compare(model, tokens, 700, partial(DynamicCache, config=model.config), {"int2": make}, shares.append)
    nll, kls, far, agreed, count = [0.0, 0.0], [], [], 0, 0
    for begin, end in ((0, 700), (700, 1400), (1400, 1500)):
        passage = tokens[begin:end]
        with torch.no_grad():
            logits = [
                model(passage[None], past_key_values=c).logits[0, :-1]
                for c in (DynamicCache(config=model.config), make())
            ]
        p, q = (torch.log_softmax(x.double(), dim=-1) for x in logits)
        for i, log_probs in enumerate((p, q)):
            nll[i] -= log_probs[torch.arange(len(passage) - 1), passage[1:]].sum().item()
        kls += (p.exp() * (p - q)).sum(dim=-1).tolist()
        far += [position >= 600 for position in range(len(passage) - 1)]
        agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        count += len(passage) - 1
    assert own.tokens == scores["int2"].tokens == count
    assert own.perplexity == pytest.approx(math.exp(nll[0] / count), rel=1e-4)
    assert scores["int2"].perplexity == pytest.approx(math.exp(nll[1] / count), rel=1e-3)
    assert scores["int2"].kl == pytest.approx(np.mean(kls), rel=1e-2)
    assert scores["int2"].kl_99 == pytest.approx(np.percentile(kls, 99), rel=1e-2)
    assert scores["int2"].kl_tail == pytest.approx(np.percentile(kls, 99.9), rel=1e-2)
    beyond = scores["int2"].beyond(600)
    assert beyond.tokens == sum(far) == 2 * 99
    assert beyond.kl == pytest.approx(np.mean(np.array(kls)[far]), rel=1e-2)
    assert beyond.kl_tail == pytest.approx(np.percentile(np.array(kls)[far], 99.9), rel=1e-2)
    assert own.beyond(600).perplexity != own.perplexity
    assert own.beyond(699) is None
    assert scores["int2"].kl > 0.01  # two bits are not lossless
    assert scores["int2"].top1 == pytest.approx(agreed / count, abs=2e-3)
    assert (own.kl, own.kl_tail, own.top1) == (0, 0, 1)
    assert sum(shares) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(("chunk", "part"), [(64, 7), (300, 300)])
def test_chunks_change_no_score(model, monkeypatch, chunk: int, part: int):
    tokens = torch.randint(0, 61, (200,), generator=torch.Generator().manual_seed(2))
    reference, caches = partial(DynamicCache, config=model.config), {"": partial(kvfold.cache, model, "bf16")}
    whole, _ = compare(model, tokens, 200, reference, caches)
    monkeypatch.setattr("kvfold.evaluate.logits.CHUNK", chunk)
    monkeypatch.setattr("kvfold.evaluate.logits.SLICE", part)
    own, others = compare(model, tokens, 200, reference, caches)
    np.testing.assert_allclose(own.nll, whole.nll, atol=1e-4)
    assert own.positions.tolist() == others[""].positions.tolist() == list(range(199))


def test_nothing_to_score(model):
    with pytest.raises(ValueError, match="at least two tokens"):
        compare(model, torch.tensor([1]), 10, partial(DynamicCache, config=model.config), {})


def test_logits_that_are_not_finite_are_refused(model):
    broken = LlamaForCausalLM(model.config).eval()
    broken.lm_head.weight.data[0] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        compare(broken, torch.arange(20), 10, partial(DynamicCache, config=model.config), {})


def test_a_real_model_copies_and_finds(embedded):
    """The embedded model copies random tokens and finds needles from a 16-bit cache, and nothing from one that lost all
    but the last few tokens' meaning: two bits, neither rotated nor centred."""
    model, tokenizer = embedded
    text = tokenize(default_text("evaluation"), tokenizer, 600)
    wide, lost = partial(kvfold.cache, model, "bf16"), partial(kvfold.cache, model, "int2:centre=false")
    assert copy_accuracy(model, tokenizer, wide, text) > 0.8
    found = needle_accuracy(model, tokenizer, wide, text)
    assert list(found) == [f"{depth:.0%}" for depth in DEPTHS]
    assert sum(found.values()) / len(found) > sum(needle_accuracy(model, tokenizer, lost, text).values()) / len(found)
