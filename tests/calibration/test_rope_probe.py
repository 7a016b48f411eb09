"""RoPE as measured on tiny models, beside what their configurations say."""

import math

import pytest
import torch
from pydantic import TypeAdapter

from kvfold.calibration import tap
from kvfold.calibration.rope_probe import probe
from kvfold.calibration.tap import Seen
from kvfold.geometry import UnsupportedModel
from kvfold.rope import Rope

HALF = Rope(4, ((0, 2), (1, 3)), (1.0, 0.01))
PARTIAL = Rope(6, ((0, 1), (2, 3)), (1.0, 0.01))


def powers(rotary_dim, theta):
    return torch.tensor([theta ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)], dtype=torch.float64)


def frequencies(rope):
    return torch.tensor(rope.frequencies, dtype=torch.float64)


def test_layout_and_frequencies_of_each_class(tiny, architecture):
    name, layout, rotary_dim = architecture
    model = tiny(name)
    rope = probe(model)
    assert (rope.layout, rope.rotary_dim) == (layout, rotary_dim)
    theta = model.config.rope_parameters["rope_theta"]
    assert torch.allclose(frequencies(rope), powers(rotary_dim, theta), rtol=1e-6, atol=1e-9)
    assert model.config._attn_implementation == "sdpa"


ROPES = {  # layout, rotary_dim and theta of the packed layers of hybrids
    "Gemma3": ("half", 32, 1e6),  # 10,000 in sliding layers
    "GptOss": ("half", 32, None),  # YaRN
    "Gemma4": ("other", 16, None),  # the fastest quarter of the pairs of 64 coordinates
    "Qwen3Next": ("half", 16, 1e4),
    "Lfm2": ("half", 32, 1e6),
    "Llama4": ("other", 0, None),  # full attention has no RoPE
}


@pytest.mark.parametrize("name", ROPES)
def test_packed_layers_of_hybrids(tiny, name):
    """With other layers before them: sliding ones, with sinks too, convolutions, linear attention."""
    layout, rotary_dim, theta = ROPES[name]
    rope = probe(tiny(name))
    assert (rope.layout, rope.rotary_dim) == (layout, rotary_dim)
    if theta is not None:
        assert torch.allclose(frequencies(rope), powers(rotary_dim, theta), rtol=1e-5, atol=1e-9)
    if name == "Gemma4":
        assert rope.pairs == tuple((i, i + 32) for i in range(8))
        assert torch.allclose(frequencies(rope), powers(64, 1e6)[:8], rtol=1e-5)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {
            "rope_type": "longrope",
            "short_factor": [1.5] * 16,
            "long_factor": [9.0] * 16,
            "original_max_position_embeddings": 128,
        },
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_scaled_frequencies(tiny, scaling):
    model = tiny(rope_parameters={"rope_theta": 10000.0, **scaling})
    rope = probe(model)
    assert rope.layout == "half"
    assert torch.allclose(frequencies(rope), model.model.rotary_emb.inv_freq.double(), rtol=1e-5, atol=1e-9)
    assert not torch.allclose(frequencies(rope), powers(32, 10000.0), rtol=1e-2)


def test_bfloat16_with_large_key_biases(tiny):
    options = {"hidden_size": 256, "head_dim": 64, "max_position_embeddings": 32768}
    model = tiny("Qwen2", **options, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    model.model.layers[0].self_attn.k_proj.bias.data[::5] += 300
    rotary = model.model.rotary_emb
    exact = rotary.inv_freq.clone()
    model.to(torch.bfloat16)
    rotary.inv_freq = exact  # as from_pretrained leaves it
    rope = probe(model)
    assert rope.layout == "half"
    assert torch.allclose(frequencies(rope), powers(64, 1e6), rtol=0.01, atol=1e-7)


def test_model_without_rope(tiny, monkeypatch):
    model = tiny()
    monkeypatch.setattr(model.model.rotary_emb, "inv_freq", torch.zeros(16))
    rope = probe(model)
    assert (rope.pairs, rope.frequencies, rope.layout) == ((), (), "other")
    assert rope.blocks() == [(i, i + 1) for i in range(0, 32, 2)]


def test_any_pairing_and_direction(tiny, monkeypatch):
    """Key coordinates in another order: the pairs follow it, and a pair whose order changed turns backwards."""
    order = torch.randperm(32, generator=torch.Generator().manual_seed(3))
    monkeypatch.setattr(tap, "Seen", lambda layer, q, k, *rest: Seen(layer, q, k[..., order], *rest))
    rope = probe(tiny())
    place = order.argsort().tolist()
    expected = {}
    for i, frequency in enumerate(powers(32, 10000.0).tolist()):
        a, b = place[i], place[i + 16]
        expected[min(a, b), max(a, b)] = frequency if a < b else -frequency
    assert rope.layout == "other"
    assert rope.pairs == tuple(sorted(expected))
    assert torch.allclose(frequencies(rope), torch.tensor([expected[p] for p in rope.pairs]).double(), rtol=1e-5)


def test_positions_added_to_the_input_are_refused(tiny, monkeypatch):
    model = tiny()
    table = torch.randn(512, 64, generator=torch.Generator().manual_seed(2))
    forward = type(model.model).forward

    def shifted(self, input_ids, position_ids=None, **kwargs):
        return forward(self, None, inputs_embeds=self.embed_tokens(input_ids) + table[position_ids], **kwargs)

    monkeypatch.setattr(type(model.model), "forward", shifted)
    with pytest.raises(UnsupportedModel, match="another way than by rotations of two"):
        probe(model)


def test_rotate_is_the_rotation_of_each_pair():
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turned = PARTIAL.rotate(x, torch.tensor([0, 1, 100000]))
    for row, position in zip(range(3), (0, 1, 100000), strict=True):
        for (i, j), frequency in zip(PARTIAL.pairs, PARTIAL.frequencies, strict=True):
            expected = complex(x[row, i], x[row, j]) * complex(
                math.cos(frequency * position), math.sin(frequency * position)
            )
            assert complex(turned[row, i], turned[row, j]) == pytest.approx(expected)
        assert torch.equal(turned[row, 4:], x[row, 4:])


def test_rotate_broadcasts_and_keeps_the_dtype():
    x = torch.randn(2, 1, 4, generator=torch.Generator().manual_seed(0))
    turned = HALF.rotate(x, torch.arange(5))
    assert turned.shape == (2, 5, 4)
    assert turned.dtype == torch.float32
    assert torch.equal(turned[:, :1], x)
    assert torch.allclose(HALF.rotate(turned[:, 4:], torch.tensor(-4)), x, atol=1e-6)
    assert torch.equal(Rope(4, (), ()).rotate(x, torch.tensor(7)), x)


def test_blocks_cover_the_head():
    assert PARTIAL.blocks() == [(0, 1), (2, 3), (4, 5)]
    assert HALF.blocks() == [(0, 2), (1, 3)]
    assert (HALF.layout, PARTIAL.layout, Rope(4, ((0, 3), (1, 2)), (1.0, 0.1)).layout) == (
        "half",
        "interleaved",
        "other",
    )


def test_json_and_back():
    adapter = TypeAdapter(Rope)
    assert adapter.validate_json(adapter.dump_json(PARTIAL)) == PARTIAL
