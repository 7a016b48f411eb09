"""What packed layers cost, against a packed cache that reads the same passages."""

from dataclasses import replace
from typing import Any

import pytest
import tiny_models
import torch
from byte_tokenizer import byte_tokenizer
from transformers import DynamicCache

import kvfold
from kvfold.engines.transformers import PackedCache
from kvfold.recipes import parse
from kvfold.tune import curves
from kvfold.tune.choices import EQUAL
from kvfold.tune.tuner import Tuner


def tuned(name: str, length: int = 96) -> Tuner:
    """A tiny model whose predictions depend on its cache, calibrated, and a pair of passages."""
    model = tiny_models.tiny(name)
    model.lm_head.weight.data *= 10
    tokens = tiny_models.random_tokens(400)
    artifact = kvfold.calibrate(model, tokens, 200, [parse(each) for each in EQUAL])
    pair = torch.stack((tokens[:length], tokens[: length // 2].repeat(2)))
    return Tuner(model, artifact, pair.unsqueeze(0), context=1024)


def kl(tuner: Tuner, codecs: dict[int, tuple]) -> list[float]:
    """The mean KL in both tests from logits with transformers' own cache to logits with packed pages. Layers and sides
    without codecs are stored in 16 bits. The open block has a quarter of the passage, at most 64 tokens."""
    model, geometry, length = tuner.model, tuner.geometry, tuner.pairs.shape[-1]
    read = parse(f"fold2:block={min(64, length // 4)}")
    raw = parse("bf16").codecs(geometry.key_dim, geometry.value_dim, {}, torch.float16)
    filled = {}
    for layer in geometry.packed:
        both = zip(codecs.get(layer, (None, None)), raw, strict=True)
        filled[layer] = tuple(replace(codec or sixteen, raw_dtype=torch.float16) for codec, sixteen in both)
    kvfold.cache(model, read, tuner.artifact)  # the attention that reads packed pages
    found = []
    for passage, scored in zip(tuner.pairs[0], (slice(length // 2, None), slice(length // 2, -1)), strict=True):
        cache = PackedCache(read, model.config, filled, torch.float16, model.device, 16)
        logits = [
            model(passage[None], past_key_values=each).logits[0, scored].double().log_softmax(dim=-1)
            for each in (DynamicCache(config=model.config), cache)
        ]
        found.append(
            torch.nn.functional.kl_div(logits[1], logits[0], log_target=True, reduction="sum") / len(logits[0])
        )
    return torch.stack(found).tolist()


def roots(kls: list[float]) -> list[float]:
    """KL grows with the square of errors. These add up: that of the open block is another here, which has bfloat16."""
    return [each**0.5 for each in kls]


def near(kls: list[float]) -> Any:
    return pytest.approx(roots(kls), rel=0.05, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "length"), [("Llama", 96), ("Llama", 300), ("Gemma2", 96), ("GptOss", 96), ("Gemma3n", 96)]
)
@torch.no_grad()
def test_all_layers_packed(name: str, length: int):
    tuner = tuned(name, length)
    for choice in EQUAL["fold2"], EQUAL["fold4"]:
        point = tuner.measure([("fold", (choice,) * len(tuner.geometry.packed))])[0]
        packed = {layer: tuner._codecs(layer, choice) for layer in tuner.geometry.packed}
        assert roots([point.kl, point.copy_kl]) == near(kl(tuner, packed))
        assert point.kl > 1e-6, "the test sees something"


@torch.no_grad()
def test_curves_are_of_one_side_of_one_layer():
    tuner = tuned("Llama")
    found = tuner.curves()
    assert {side: tuple(curve.shape) for side, curve in found.items()} == {"key": (2, 4, 2), "value": (2, 3, 2)}
    for layer in range(2):
        for choice in ((0, 0), (1, 1), (3, 2)):
            key, value = tuner._codecs(layer, choice)
            assert roots(found["key"][layer, choice[0]].tolist()) == near(kl(tuner, {layer: (key, None)}))
            assert roots(found["value"][layer, choice[1]].tolist()) == near(kl(tuner, {layer: (None, value)}))
    assert tuner.model.config._attn_implementation == "kvfold", "what it was before"


@torch.no_grad()
def test_skipped_layers_change_nothing(monkeypatch: pytest.MonkeyPatch):
    tuner = tuned("Qwen3")
    change = {1: tuner._codecs(1, (0, 0))}
    ran: list[int] = []
    for number, layer in enumerate(tuner.model.get_decoder().layers):
        layer.self_attn.register_forward_hook(lambda *seen, number=number: ran.append(number))
    short = curves.divergences(tuner.model, tuner.pairs, {"it": change})["it"]
    assert ran == [0, 1, 1], "once in 16 bits, then from the changed layer on"
    monkeypatch.setattr(curves, "_skipped", lambda *given: torch.no_grad())
    assert torch.equal(short, curves.divergences(tuner.model, tuner.pairs, {"it": change})["it"])
    assert ran == [0, 1, 1, 0, 1, 0, 1]


def test_passages():
    tokenizer = byte_tokenizer()
    text = torch.arange(250) % 90 + 5
    pairs = curves.passages(text, 100, tokenizer)
    assert pairs.shape == (2, 2, 100)
    assert torch.equal(pairs[:, 0].flatten(), text[:200])
    for own, copied in pairs:
        assert torch.equal(copied[:50], copied[50:])
        assert set(copied.tolist()) <= set(own.tolist())
    assert not torch.equal(*pairs[:, 1])
