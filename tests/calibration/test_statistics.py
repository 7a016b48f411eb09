"""Moments against dense float64 formulas, and statistics in a file."""

import math
from dataclasses import replace

import pytest
import torch

from kvfold.calibration.statistics import FIRST_TOKENS, PROMPT, QUERIES, LayerStatistics, Moments, Statistics
from kvfold.calibration.tap import Seen
from kvfold.ops.pages import Logits
from kvfold.quantizers import even
from kvfold.rope import Rope


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + 2


def seen(tokens, seed=0, q_heads=4, kv_heads=2, d=8):
    q, out = random(2, tokens, q_heads, d, seed=seed)
    k, v = random(2, tokens, kv_heads, d, seed=seed + 1)
    return Seen(0, q, k, v, out, Logits(0.25))


def statistics():
    layers = []
    for seed, logits in ((0, Logits(0.25)), (5, Logits(0.3, 4.0, torch.tensor([1.0, -2.0, 0.5, 3.0])))):
        first = replace(seen(20, seed), logits=logits)
        layer = LayerStatistics.begin(first, 6, first.k[:1])
        layer.add(first, torch.tensor([4, 9, 19]), 0)
        layers.append(layer)
    return Statistics(layers, Rope(8, ((0, 4), (1, 5)), (1.0, 0.1)), "abc", 1)


def test_moments_average_over_tokens_and_query_heads():
    x = random(50, 6, 8)
    moments = Moments.zeros(2, 8)
    moments.add(x[:7])
    moments.add(x[7:])
    centre = random(2, 8, seed=1)
    for head in range(2):
        vectors = torch.stack(
            [x[token, query] for token in range(50) for query in range(3 * head, 3 * head + 3)]
        ).double()
        assert torch.allclose(moments.mean[head], vectors.mean(0))
        assert torch.allclose(moments.second()[head], vectors.T @ vectors / 150)
        assert torch.allclose(moments.second(moments.mean)[head], torch.cov(vectors.T, correction=0))
        shifted = vectors - centre[head]
        assert torch.allclose(moments.second(centre)[head], shifted.T @ shifted / 150)


def test_first_tokens_stay_out_of_moments_but_not_of_the_prompt():
    first, second = seen(PROMPT + 20), seen(10, seed=3)
    layer = LayerStatistics.begin(first, 5, first.k[:1])
    layer.add(first, torch.tensor([4, 300]), 0)
    layer.add(second, torch.tensor([5, 6, 9]), 2)
    kept = torch.cat([first.k[FIRST_TOKENS:], second.k[FIRST_TOKENS:]]).double()
    assert layer.k.count.tolist() == [len(kept)] * 2
    assert layer.q.count.tolist() == layer.out.count.tolist() == [2 * len(kept)] * 2
    assert torch.allclose(layer.k.mean, kept.mean(0))
    q, k, v = layer.prompt
    assert torch.equal(q, first.q[PROMPT // 2 : PROMPT : PROMPT // 2 // QUERIES].transpose(0, 1))
    assert torch.equal(k, first.k[:PROMPT].transpose(0, 1))
    assert torch.equal(v, first.v[:PROMPT].transpose(0, 1))
    assert torch.equal(layer.samples[0], torch.cat([first.k[[4, 300]], second.k[[5, 6, 9]]]))
    assert torch.equal(layer.samples[1], torch.cat([first.v[[4, 300]], second.v[[5, 6, 9]]]))


def test_file_and_back(tmp_path):
    before = statistics()
    before.save(tmp_path / "statistics")
    assert [path.name for path in tmp_path.iterdir()] == ["statistics"]
    after = Statistics.load(tmp_path / "statistics")
    assert (after.rope, after.source, after.passages) == (before.rope, "abc", 1)
    assert len(after.layers) == 2
    for one, other in zip(before.layers, after.layers, strict=True):
        assert one.logits[:2] == other.logits[:2]
        assert (one.logits.sinks is None) == (other.logits.sinks is None)
        assert one.q.count.tolist() == other.q.count.tolist() == [32, 32]
        assert one.far.tolist() == other.far.tolist()
        assert one.tensors().keys() == other.tensors().keys()
        assert all(torch.equal(tensor, other.tensors()[name]) for name, tensor in one.tensors().items())


def test_what_is_read_counts_as_much_as_its_errors_cost():
    """By the derivatives of outputs, one query at a time: after logits, a token costs their squared length; after its
    value, the square of the weight. Of 20 tokens, the last 5 before a query are not packed. Logits of the first 4 do
    not count."""
    for layer, seed in zip(statistics().layers, (0, 5), strict=True):
        q, k, v = (states.double() for states in (seen(20, seed).q, seen(20, seed).k, seen(20, seed).v))
        scale, cap, sinks = layer.logits
        of_keys, of_values = torch.zeros(2, 2, 20, dtype=torch.float64)
        by_query = torch.zeros(4, 20, dtype=torch.float64)
        for head in range(4):
            for t in range(10, 20):
                x = scale * (k[: t + 1, head // 2] @ q[t, head])
                x = cap * torch.tanh(x / cap) if cap else x
                x = x if sinks is None else torch.cat((x, sinks[head : head + 1].double()))

                def output(x, values, t=t):
                    return torch.softmax(x, dim=0)[: t + 1] @ values

                after_logits, after_values = torch.autograd.functional.jacobian(output, (x, v[: t + 1, head // 2]))
                for j in range(t - 4):
                    cost = after_logits[:, j].square().sum() if j >= 4 else 0
                    by_query[head, t] += cost
                    of_keys[head // 2, j] += cost
                    of_values[head // 2, j] += after_values[0, j, 0].square()
        for head in range(2):
            asked = q[:, 2 * head : 2 * head + 2].transpose(0, 1).flatten(0, 1)
            sides = (
                (layer.read_q, by_query[2 * head : 2 * head + 2].flatten(), asked),
                (layer.read_k, of_keys[head], k[:, head]),
                (layer.read_v, of_values[head], v[:, head]),
            )
            for moments, weights, states in sides:
                assert torch.allclose(moments.count[head], weights.sum(), rtol=1e-4)
                assert torch.allclose(moments.mean[head], weights @ states / weights.sum(), rtol=1e-3, atol=1e-5)
                second = states.T @ (weights[:, None] * states) / weights.sum()
                assert torch.allclose(moments.second()[head], second, rtol=1e-3, atol=1e-5)


def test_centres_lose_less_than_plain_means():
    """A first token that takes most of the attention, as in real models: its value is unlike all others."""
    first = seen(200)
    q, k, v = first.q, first.k.clone(), first.v.clone()
    k[0] += 2.5
    v[0] *= 0.1
    logits = 0.35 * q.transpose(0, 1) @ k.repeat_interleave(2, 1).permute(1, 2, 0)
    weights = torch.softmax(logits.masked_fill(~torch.ones(200, 200).tril().bool(), -math.inf), -1)
    assert 0.5 < weights[:, 100:, 0].mean() < 0.95
    state = Seen(0, q, k, v, first.out, Logits(0.35))
    layer = LayerStatistics.begin(state, 0, state.k[:1])
    layer.add(state, torch.tensor([], dtype=torch.int64), 0)

    def lost(centre):
        codes, scale = even.quantize(v - centre.float(), 2)
        error = even.dequantize(codes, 2, scale) + centre.float() - v
        return (weights @ error.repeat_interleave(2, 1).transpose(0, 1))[:, 100:].square().sum()

    assert lost(layer.read_v.mean) < 0.5 * lost(layer.v.mean)


@pytest.mark.parametrize("is_decoded", [False, True])
def test_weights_of_the_prompt(is_decoded):
    """One query and one token at a time, in float64. Of 20 tokens, the first 4 and the last 5 are never decoded."""
    for layer in statistics().layers:
        (q, k, _), (scale, cap, sinks) = layer.prompt, layer.logits
        decoded = random(2, 20, 8, seed=9) if is_decoded else k
        weights = layer.log_weights(decoded).exp() if is_decoded else layer.log_weights().exp()
        assert weights.shape == (2, 2, 10, 20 if sinks is None else 21)
        for head in range(4):
            for row, t in enumerate(range(10, 20)):
                far = [4 <= j <= t - 5 for j in range(20)]
                assert layer.far[row].tolist() == far
                keys = [(decoded if far[j] else k)[head // 2, j].double() for j in range(t + 1)]
                x = [scale * float(q[head, row].double() @ key) for key in keys]
                x = [cap * math.tanh(logit / cap) if cap else logit for logit in x]
                x += [] if sinks is None else [float(sinks[head])]
                total = sum(map(math.exp, x))
                own = weights[head // 2, head % 2, row]
                assert own[: t + 1].tolist() == pytest.approx([math.exp(each) / total for each in x[: t + 1]], rel=1e-4)
                assert not own[t + 1 : 20].any()
                assert own[20:].tolist() == pytest.approx([math.exp(each) / total for each in x[t + 1 :]], rel=1e-4)


def test_queries_are_spread_over_the_second_half_of_long_prompts():
    layer = LayerStatistics.begin(seen(700), 5, torch.zeros(1, *seen(700).k.shape[1:]))
    assert layer.prompt[0].shape == (4, 175, 8)
    assert layer.far.shape == (175, 700)
    assert layer.far[3].nonzero().squeeze(1).tolist() == list(range(4, 350 + 6 - 175 + 1))


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "unfinished.safetensors"
    path.write_bytes(b"not safetensors")
    with pytest.raises(ValueError, match=f"holds no calibration statistics: .* delete it to begin anew: `rm {path}`$"):
        Statistics.load(path)
