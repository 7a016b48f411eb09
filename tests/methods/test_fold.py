"""fold against its definition, in NumPy: which coordinates get which widths, what a codec does with them, the unit."""

import numpy as np
import pytest
import torch
from random_layers import FIRST, causal_weights, half_rope, random_layer
from scipy.linalg import block_diag, hadamard

from kvfold.fitted import Fitted
from kvfold.geometry import Geometry
from kvfold.recipes import RECIPES, parse

WIDTHS = {  # bits per quarter: keys, values
    "fold4": ((8, 4, 4, 2), (4, 4, 4, 4)),
    "fold3": ((4, 4, 2, 2), (4, 4, 2, 2)),
    "fold2": ((4, 4, 1, 1), (2, 2, 2, 2)),
}
BYTES = {"fold4": (75, 65), "fold3": (50, 50), "fold2": (42, 33)}  # of a token, d = 128
BITS = {"fold4": 4.4, "fold3": 3.2, "fold2": 2.4}  # at 128k tokens, at most


def fit_of(name: str, d: int = 32, seed: int = 0):
    layer = random_layer(d, 2, 3, seed=seed, rope=half_rope(d))
    fit = parse(name).fit(layer.statistics, layer.rope, layer.means)
    means = {"key_mean": layer.means[0].float(), "value_mean": layer.means[1].float()}
    return layer, {**means, **fit}


def segments(quarters: tuple[int, ...], d: int) -> list[tuple[int, int]]:
    """(dims, bits): quarters of equal width are one segment."""
    found: list[tuple[int, int]] = []
    for bits in quarters:
        dims = d // 4
        if found and found[-1][1] == bits:
            dims += found.pop()[0]
        found.append((dims, bits))
    return found


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_quarters_of_equal_width_are_a_segment(name, d):
    for slot, quarters in zip(parse(name).layouts(d, d, {}), WIDTHS[name], strict=True):
        assert [(segment.dims, segment.bits) for segment in slot.segments] == segments(quarters, d)


@pytest.mark.parametrize("name", WIDTHS)
def test_bytes_and_bits(name):
    key, value = parse(name).layouts(128, 128, {})
    assert (key.slot_bytes, value.slot_bytes) == BYTES[name]
    geometry = Geometry.uniform("any", layers=2, q_heads=8, kv_heads=2, head_dim=128)
    for page in (16, 64):
        assert Fitted(parse(name), geometry).bits_per_element(131072, page) <= BITS[name]


@pytest.mark.parametrize("seed", [0, 1])
def test_coordinates_are_sorted_by_importance(seed):
    """Keys by E‖q_i‖²·E‖k_i‖² of their RoPE block, values by variance, per KV head. Each counts as much as its errors
    cost the second half of 60 queries, which read all but the last 15 tokens packed. First tokens count by values."""
    d = 32
    layer, fit = fit_of("fold2", d, seed)
    blocks = [(i, i + d // 2) for i in range(d // 2)]
    tokens = np.arange(60)
    packed = (tokens[:, None] >= 30) & (tokens <= tokens[:, None] - 15)
    squares = np.square(causal_weights(layer.q, layer.k, layer.scale) * packed)  # [q_heads, query, token]
    for head in range(2):
        of_q, of_k, of_v = 0, 0, 0
        k, v = (x[:, head] - mean[head].numpy() for x, mean in zip((layer.k, layer.v), layer.means, strict=True))
        for query_head in range(3 * head, 3 * head + 3):
            distance = np.square(layer.v[:, head] - layer.out[:, query_head, None]).sum(-1)
            costs = squares[query_head] * distance * (tokens >= FIRST)
            of_q += costs.sum(1) @ np.square(layer.q[:, query_head])
            of_k += costs.sum(0) @ np.square(k)
            of_v += squares[query_head].sum(0) @ np.square(v)
        scores = of_q[blocks].sum(-1) * of_k[blocks].sum(-1)
        expected = [coordinate for i in np.argsort(-scores, kind="stable") for coordinate in blocks[i]]
        assert fit["key_order"][head].tolist() == expected
        assert fit["value_order"][head].tolist() == np.argsort(-of_v, kind="stable").tolist()


@pytest.mark.parametrize("name", WIDTHS)
def test_a_hadamard_matrix_mixes_each_segment(name):
    d = 64
    _, fit = fit_of(name, d)
    x = torch.randn(5, 2, d, generator=torch.Generator().manual_seed(3))
    codecs = parse(name).codecs(d, d, fit)
    for side, codec, quarters in zip(("key", "value"), codecs, WIDTHS[name], strict=True):
        mixing = block_diag(*(hadamard(dims) * dims**-0.5 for dims, _ in segments(quarters, d)))
        centred = (x - fit[f"{side}_mean"]).double().numpy()
        for head in range(2):
            expected = centred[:, head, fit[f"{side}_order"][head].long().numpy()] @ mixing
            np.testing.assert_allclose(codec.transform.forward(x)[:, head].numpy(), expected, atol=1e-5)
        np.testing.assert_allclose(codec.transform.inverse(codec.transform.forward(x)).numpy(), x.numpy(), atol=1e-5)


@pytest.mark.parametrize("name", WIDTHS)
def test_vectors_of_the_layer_lie_in_the_middle_of_the_range_of_scales(name):
    """The unit is a power of two. Usual scales are within a factor of 2^5 of it; the range is 2^-7 to 240."""
    layer, fit = fit_of(name)
    for codec, x in zip(parse(name).codecs(32, 32, fit), (layer.k, layer.v), strict=True):
        assert np.log2(codec.unit) == round(np.log2(codec.unit))
        _, scales = codec.quantize(codec.transform.forward(torch.from_numpy(x[FIRST:]).float()).unsqueeze(-2))
        exponents = scales.int() // 16 - 8
        assert ((exponents >= -5) & (exponents <= 5)).float().mean() > 0.95


def test_large_and_small_models_store_equally_well():
    """The unit takes up the size of a model's numbers."""
    layer, fit = fit_of("fold2")
    key, _ = parse("fold2").codecs(32, 32, fit)
    x = torch.from_numpy(layer.k[FIRST:]).float()
    errors = []
    for size in (2.0**-20, 1.0, 2.0**12):
        scaled = {**fit, "key_mean": fit["key_mean"] * size, "key_unit": fit["key_unit"] * size}
        codec, _ = parse("fold2").codecs(32, 32, scaled)
        errors.append(float((codec.decode(codec.encode(x * size)) - x * size).norm() / size))
    assert errors == pytest.approx([errors[1]] * 3, rel=1e-5)
    with pytest.raises(ValueError, match="cannot store"):
        key.encode(x * 2.0**16)


def test_there_are_three_options():
    for name in WIDTHS:
        assert sorted(RECIPES[name].options) == ["block", "skip"]
        assert str(parse(f"{name}:block=20,skip=0+3")) == f"{name}:block=20,skip=0+3"
        with pytest.raises(ValueError, match=f"{name} has no option 'centre'; it takes block, skip"):
            parse(f"{name}:centre=false")


def test_widths_of_a_layer_come_from_its_fit():
    _, fit = fit_of("fold2")
    widths = {"key_widths": torch.tensor([[4] * 16 + [2] * 16]), "value_widths": torch.tensor([[4] * 8 + [2] * 24])}
    key, value = parse("fold").layouts(32, 32, widths)
    assert [(segment.dims, segment.bits) for segment in key.segments] == [(16, 4), (16, 2)]
    assert [(segment.dims, segment.bits) for segment in value.segments] == [(8, 4), (24, 2)]
    x = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(0))
    for codec in parse("fold").codecs(32, 32, {**fit, **widths}):
        np.testing.assert_allclose(codec.transform.inverse(codec.transform.forward(x)).numpy(), x.numpy(), atol=1e-5)
    with pytest.raises(ValueError, match="its widths are chosen per layer: run `kvfold tune"):
        parse("fold").layouts(32, 32, {})


def test_heads_of_other_sizes():
    """Quarters end at multiples of 8 coordinates."""
    key, _ = parse("fold4").layouts(80, 80, {})
    assert [(segment.dims, segment.bits) for segment in key.segments] == [(16, 8), (48, 4), (16, 2)]
    with pytest.raises(ValueError, match="heads of a multiple of 8 dims are needed, not 36"):
        parse("fold2").layouts(36, 36, {})
