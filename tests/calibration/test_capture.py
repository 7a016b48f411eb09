"""Capture on tiny models of each class, against dense float64 attention and plain forward hooks."""

import math

import numpy as np
import pytest
import torch
from tiny_models import HYBRIDS
from transformers import DynamicCache

from kvfold.calibration.capture import SAMPLES, _spread, capture, collect
from kvfold.calibration.statistics import FIRST_TOKENS, PROMPT, QUERIES
from kvfold.geometry import UnsupportedModel
from kvfold.ops.pages import Logits


def attention(q, k, v, scale, cap=None, sinks=None):
    """Causal softmax attention in float64: [heads, n, d] -> [q_heads, n, d]. A sink has a weight, and no value."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.empty(*q.shape[:2], v.shape[2], dtype=torch.float64)
    for head in range(len(q)):
        logits = scale * q[head] @ k[head * len(k) // len(q)].T
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        later = torch.ones(logits.shape, dtype=torch.bool).triu(1)
        weights = logits.masked_fill(later, -math.inf).exp()
        total = weights.sum(1, keepdim=True) + (0 if sinks is None else sinks[head].double().exp())
        out[head] = weights / total @ v[head * len(v) // len(q)]
    return out


@torch.no_grad()
def output_projection_inputs(model, tokens):
    """What a plain forward pass hands to each layer's output projection, [q_heads, n, d] for each layer."""
    inputs = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: inputs.append(args[0][0]))
        for layer in model.model.layers
    ]
    model.model(tokens.unsqueeze(0))
    for hook in hooks:
        hook.remove()
    heads = model.config.num_attention_heads
    return [x.unflatten(1, (heads, -1)).transpose(0, 1) for x in inputs]


def second_moment(x, kv_heads):
    """[q_heads, n, d] -> float64[kv_heads, d, d]: mean of x xᵀ over the tokens after the first, and the query heads."""
    groups = x[:, FIRST_TOKENS:].double().chunk(kv_heads)
    return torch.stack([torch.einsum("gnd,gne->de", group, group) / group[..., 0].numel() for group in groups])


def equal(one, other):
    tensors = other.tensors()
    return all(torch.equal(tensor, tensors[name]) for name, tensor in one.tensors().items())


def test_each_class_of_models(tiny, architecture, text):
    name, layout, rotary_dim = architecture
    model, tokens = tiny(name), text(40)
    plain = output_projection_inputs(model, tokens)
    statistics = capture(model, tokens, context=40)
    assert model.config._attn_implementation == "sdpa"
    assert (statistics.rope.layout, statistics.rope.rotary_dim) == (layout, rotary_dim)
    assert len(statistics.layers) == model.config.num_hidden_layers == 2
    collected = collect(model, tokens).values()
    for layer, (q, k, v, logits), expected in zip(statistics.layers, collected, plain, strict=True):
        assert all(torch.equal(kept, part) for kept, part in zip(layer.prompt, (q[:, 20:], k, v), strict=True))
        assert layer.logits == logits
        assert torch.allclose(attention(q, k, v, logits.scale), expected.double(), atol=1e-4, rtol=1e-4)
        # C_S = (SV)ᵀ(SV) / N, and C_Q
        assert torch.allclose(layer.out.second(), second_moment(expected, len(v)), atol=1e-4, rtol=1e-4)
        assert torch.allclose(layer.q.second(), second_moment(q, len(k)))
        assert torch.allclose(layer.k.second(), second_moment(k, len(k)))
        assert torch.allclose(layer.v.mean, v[:, FIRST_TOKENS:].double().mean(1))
        assert torch.equal(layer.samples[0], k[:, FIRST_TOKENS:].transpose(0, 1))
        assert torch.equal(layer.samples[1], v[:, FIRST_TOKENS:].transpose(0, 1))


@pytest.mark.parametrize("name", HYBRIDS)
def test_packed_layers_of_hybrids(tiny, text, name):
    """Keys and values are those in transformers' own cache, outputs those of the definition."""
    model, tokens, packed = tiny(name), text(30), HYBRIDS[name][1]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens[None], past_key_values=cache)
    attentions = {m.layer_idx: m for m in model.modules() if hasattr(m, "q_proj")}
    statistics = capture(model, tokens, context=30)
    collected = collect(model, tokens)
    assert list(collected) == list(packed)
    for number, layer in zip(packed, statistics.layers, strict=True):
        q, k, v, _ = collected[number]
        assert all(torch.equal(kept, part) for kept, part in zip(layer.prompt, (q[:, 15:], k, v), strict=True))
        assert torch.allclose(k, cache.layers[number].keys[0], atol=1e-5)
        assert torch.allclose(v, cache.layers[number].values[0], atol=1e-5)
        scale, cap, sinks = layer.logits
        assert (scale, cap) == (attentions[number].scaling, 3.0 if name == "Gemma2" else None)
        assert sinks is None if name != "GptOss" else torch.equal(sinks, attentions[number].sinks)
        expected = second_moment(attention(q, k, v, *layer.logits), len(v))
        assert torch.allclose(layer.out.second(), expected, atol=1e-5, rtol=1e-4)


def test_passages_are_read_alone(tiny, text):
    model, tokens = tiny(), text(103)
    shares = []
    layer = capture(model, tokens, context=50, progress=shares.append).layers[1]
    assert sum(shares) == pytest.approx(1)
    parts = [collect(model, tokens[:50])[1], collect(model, tokens[50:100])[1]]  # the last 3 tokens are no passage
    keys = torch.cat([k[:, FIRST_TOKENS:] for _, k, _, _ in parts], dim=1).double()
    assert layer.k.count.tolist() == [92] * len(keys)
    assert torch.allclose(layer.k.mean, keys.mean(1))
    assert torch.equal(layer.samples[0], keys.transpose(0, 1).float())
    assert all(torch.equal(kept, part) for kept, part in zip(layer.prompt[1:], parts[0][1:3], strict=True))
    assert torch.equal(layer.prompt[0], parts[0][0][:, 25:])
    assert layer.logits == parts[0][3] == Logits(32**-0.5)


def keys_at_the_first_position(model, tokens):
    """float64[layers, tokens, kv_heads, d], of each token alone, from transformers' own cache."""
    found = []
    for token in tokens:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(token.view(1, 1), past_key_values=cache)
        found.append(np.stack([layer.keys[0, :, 0].double().numpy() for layer in cache.layers]))
    return np.stack(found, axis=1)


def median(x):
    """Of x [layers, n, …] over n, the lower one of two."""
    return np.sort(x, axis=1)[:, (x.shape[1] - 1) // 2]


def firsts(model, tokens, context):
    return np.stack([layer.first.numpy() for layer in capture(model, tokens, context=context).layers])


@pytest.mark.parametrize("n", [41, 40])
def test_first_keys_are_near_those_of_any_token_alone(tiny, text, n):
    model, tokens = tiny(), text(n)
    expected = median(keys_at_the_first_position(model, tokens))
    np.testing.assert_allclose(firsts(model, tokens, 20), expected, atol=1e-5)


def test_first_keys_are_those_of_bos_if_the_text_begins_with_it(tiny, text):
    model, tokens = tiny(bos_token_id=2), 3 + text(103) % 90
    tokens[0] = 2
    of_bos = keys_at_the_first_position(model, torch.tensor([2]))[:, 0]
    np.testing.assert_allclose(firsts(model, tokens, 20), of_bos, atol=1e-5)
    tokens[0] = 3
    assert np.abs(firsts(model, tokens, 20) - of_bos).max() > 0.1


def test_first_keys_of_a_long_text_are_those_of_a_few_tokens_from_all_over_it(tiny):
    """Three quarters of it are one token, the last quarter another: the first one's key is the median."""
    model = tiny(num_hidden_layers=1)
    tokens = torch.cat((torch.full((750,), 5), torch.full((250,), 6)))
    batches = []
    hook = model.model.register_forward_pre_hook(lambda _, args: batches.append(args[0]))
    found = firsts(model, tokens, 500)
    hook.remove()
    *_, seen = (batch[:, 0] for batch in batches if batch.shape[1] == 1)  # earlier ones measured RoPE
    assert 60 <= len(seen) <= 64
    assert 0.7 < (seen == 5).double().mean() < 0.8
    np.testing.assert_allclose(found, keys_at_the_first_position(model, torch.tensor([5]))[:, 0], atol=1e-5)


@pytest.mark.parametrize("name", ["Llama", "MiMoV2Flash"])  # the second has values of another dimension than keys
def test_costs_of_outputs_are_those_behind_their_projection(tiny, text, name):
    """Σ W·Wᵀ over the query heads of each KV head, where W [d, hidden] reads one head's output."""
    model = tiny(name)
    packed = HYBRIDS[name][1] if name in HYBRIDS else (0, 1)
    for number, layer in zip(packed, capture(model, text(20)).layers, strict=True):
        weight = model.model.layers[number].self_attn.o_proj.weight.detach().double().numpy()
        kv_heads, d = layer.output_costs.shape[:2]
        ratio = weight.shape[1] // (kv_heads * d)
        for head in range(kv_heads):
            expected = np.zeros((d, d))
            for query_head in range(head * ratio, (head + 1) * ratio):
                part = weight[:, query_head * d : (query_head + 1) * d].T
                expected += part @ part.T
            np.testing.assert_allclose(layer.output_costs[head].numpy(), expected, rtol=1e-9, atol=1e-12)


def test_without_a_plain_output_projection_all_directions_cost_the_same(tiny, text):
    model = tiny()
    model.model.layers[1].self_attn.o_proj = torch.nn.Sequential(model.model.layers[1].self_attn.o_proj)
    first, second = (layer.output_costs for layer in capture(model, text(20)).layers)
    assert (first - torch.eye(32)).abs().max() > 0.5
    assert torch.equal(second, torch.eye(32, dtype=torch.float64).expand(2, -1, -1))


def test_samples_are_spread_over_the_text():
    short, long = _spread(100, 20), _spread(100_000, 2048)
    assert short.tolist() == [i for i in range(100) if i % 20 >= FIRST_TOKENS]
    assert len(long) == SAMPLES
    assert (long % 2048).min() >= FIRST_TOKENS
    assert (long[1:] - long[:-1]).min() >= 24
    assert (long[1:] - long[:-1]).max() <= 25 + FIRST_TOKENS
    assert long[0] < 30
    assert long[-1] > 100_000 - 30


def test_size_does_not_grow_with_the_text(tiny, text):
    model = tiny(num_hidden_layers=1)
    sizes = {
        sum(tensor.nbytes for tensor in capture(model, text(n), context=1024).layers[0].tensors().values())
        for n in (5 * 1024, 8 * 1024)
    }
    heads, d = 2, 32
    moments = 7 * 8 * heads * (1 + d + d * d)
    assert sizes == {
        moments + 4 * d * (4 * QUERIES + 2 * 2 * PROMPT) + 2 * 4 * SAMPLES * heads * d + 8 * heads * d * (1 + d) + 8
    }


def test_broken_off_and_resumed_is_the_same(tiny, text, tmp_path):
    model, tokens, path = tiny(), text(200), tmp_path / "checkpoint"
    whole = capture(model, tokens, context=50)

    def fail_in_third_passage(share, calls=[]):  # noqa: B006, it counts
        calls.append(share)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(model, tokens, context=50, checkpoint=path, checkpoint_seconds=0, progress=fail_in_third_passage)
    assert path.exists()
    runs = []
    hook = model.model.register_forward_pre_hook(lambda *_: runs.append(1))
    shares = []
    resumed = capture(model, tokens, context=50, checkpoint=path, progress=shares.append)
    hook.remove()
    assert len(runs) == 2  # first keys, and the one passage that was left; RoPE is not measured again
    assert sum(shares) == pytest.approx(1)
    again = capture(model, tokens, context=50, checkpoint=path)  # it holds the whole run now
    assert all(equal(one, other) for one, other in zip(whole.layers, again.layers, strict=True))
    assert (resumed.rope, resumed.source, resumed.passages) == (whole.rope, whole.source, whole.passages)
    assert all(equal(one, other) for one, other in zip(whole.layers, resumed.layers, strict=True))


def test_checkpoints_are_saved_now_and_then(tiny, text, tmp_path, monkeypatch):
    saves = []
    monkeypatch.setattr("kvfold.calibration.statistics.Statistics.save", lambda self, path: saves.append(self.passages))
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr("kvfold.calibration.capture.time.monotonic", lambda: next(clock))
    capture(tiny(), text(60), context=10, checkpoint=tmp_path / "checkpoint")
    assert saves == [2, 4, 6, 6]  # at 40 s, then the clock is read once more at each save; and at the end


@pytest.mark.parametrize("other", ["text", "context", "model"])
def test_checkpoint_of_another_run_is_refused(tiny, text, tmp_path, other):
    path = tmp_path / "checkpoint"
    with pytest.raises(KeyboardInterrupt):
        capture(tiny(), text(100), context=50, checkpoint=path, checkpoint_seconds=0, progress=interrupt)
    with pytest.raises(ValueError, match="delete it"):
        capture(
            tiny(intermediate_size=48) if other == "model" else tiny(),
            text(100, seed=2 if other == "text" else 1),
            context=49 if other == "context" else 50,
            checkpoint=path,
        )


def interrupt(share):
    raise KeyboardInterrupt


def test_nan_is_reported_with_its_layer(tiny, text):
    model = tiny()
    model.model.layers[1].self_attn.v_proj.weight.data[0, 0] = math.nan
    with pytest.raises(ValueError, match="layer 1: v holds NaN"):
        capture(model, text(20))
    assert model.config._attn_implementation == "sdpa"


def test_previous_attention_is_restored(tiny, text):
    model = tiny()
    model.set_attn_implementation("eager")
    collect(model, text(10))
    assert model.config._attn_implementation == "eager"


def test_attention_that_cannot_be_replaced_is_refused(tiny, text, monkeypatch):
    model = tiny()
    monkeypatch.setattr(type(model.model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.raises(UnsupportedModel, match="does not let its attention be replaced"):
        capture(model, text(20))


def test_layer_without_attention_is_refused(tiny, text):
    model = tiny()
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(UnsupportedModel, match="layer 1 did not call"):
        capture(model, text(20))


def test_short_text_is_refused(tiny, text):
    with pytest.raises(ValueError, match="more than 4 tokens"):
        capture(tiny(), text(4))
