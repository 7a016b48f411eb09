"""fold against its definition, in NumPy: which coordinates get which widths, their size, what a codec does."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from random_layers import FIRST, causal_weights, half_rope, random_layer
from scipy.linalg import block_diag, hadamard

from kvfold.fitted import Fitted
from kvfold.geometry import Geometry
from kvfold.quantizers import even
from kvfold.recipes import parse

WIDTHS = {  # bits per quarter: keys, values
    "fold4": ((8, 4, 4, 2), (4, 4, 4, 4)),
    "fold3": ((4, 4, 2, 2), (4, 4, 2, 2)),
    "fold2": ((4, 4, 1, 1), (2, 2, 2, 2)),
}
BYTES = {"fold4": (75, 65), "fold3": (50, 50), "fold2": (42, 33)}  # of a token, d = 128
BITS = {"fold4": 4.4, "fold3": 3.2, "fold2": 2.4}  # at 128k tokens, at most


def fit_of(name: str, d: int = 32, seed: int = 0, size: float = 1.0):
    """A layer and its fit, with keys and values `size` times as large."""
    layer = random_layer(d, 2, 3, seed=seed, rope=half_rope(d))
    statistics, means = layer.statistics, tuple(size * mean for mean in layer.means)
    for name_of_moments in ("read_k", "v"):
        moments = getattr(statistics, name_of_moments)
        larger = replace(moments, total=size * moments.total, outer=size**2 * moments.outer)
        statistics = replace(statistics, **{name_of_moments: larger})
    fit = parse(name).fit(statistics, layer.rope, means)
    named = zip(("key_mean", "value_mean", "key_first"), (*means, size * statistics.first), strict=True)
    means = {name: mean.float() for name, mean in named}
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


def moments_of(layer, head: int, d: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """E‖q_i‖² and E‖k_i‖² of the blocks of a KV head, and the second moment of its values, without first tokens.

    Each query and key counts as much as its errors cost the second half of 60 queries, which read all but the last 15
    tokens packed. Values count alike."""
    blocks = [(i, i + d // 2) for i in range(d // 2)]
    tokens = np.arange(60)
    packed = (tokens[:, None] >= 30) & (tokens <= tokens[:, None] - 15)
    squares = np.square(causal_weights(layer.q, layer.k, layer.scale) * packed)  # [q_heads, query, token]
    of_q, of_k, count = 0, 0, 0
    k, v = (x[:, head] - mean[head].numpy() for x, mean in zip((layer.k, layer.v), layer.means, strict=True))
    for query_head in range(3 * head, 3 * head + 3):
        distance = np.square(layer.v[:, head] - layer.out[:, query_head, None]).sum(-1)
        costs = squares[query_head] * distance * (tokens >= FIRST)
        of_q += costs.sum(1) @ np.square(layer.q[:, query_head])
        of_k += costs.sum(0) @ np.square(k)
        count += costs.sum()
    return of_q[blocks].sum(-1) / count, of_k[blocks].sum(-1) / count, v[FIRST:].T @ v[FIRST:] / len(v[FIRST:])


def damped(x: np.ndarray, share: float = 1e-3) -> np.ndarray:
    """A share of the mean is added to every direction."""
    return x + share * (x.mean() if x.ndim == 1 else np.diagonal(x).mean() * np.eye(len(x)))


@pytest.mark.parametrize("seed", [0, 1])
def test_keys_are_sorted_and_scaled_by_block(seed):
    """By E‖q_i‖²·E‖k_i‖². Scales are (E‖q_i‖²/E‖k_i‖²)^¼, but for a factor per segment."""
    d = 32
    layer, fit = fit_of("fold2", d, seed)
    for head in range(2):
        of_q, of_k, _ = moments_of(layer, head, d)
        ranked = np.argsort(-of_q * of_k, kind="stable")
        assert fit["key_order"][head].tolist() == [coordinate for i in ranked for coordinate in (i, i + d // 2)]
        expected = np.repeat((damped(of_q) / damped(of_k))[ranked] ** 0.25, 2)
        for half in (slice(16), slice(16, None)):  # the segments of fold2
            ratio = fit["key_scale"][head, half].numpy() / expected[half]
            np.testing.assert_allclose(ratio, ratio[0], rtol=1e-5)


@pytest.mark.parametrize("seed", [0, 1])
def test_directions_of_values_share_errors_fairly(seed):
    """In these directions, neither values nor the costs of errors are correlated, and both are equal: no other scale of
    a direction makes Σ variance · Σ cost less. The product falls from direction to direction."""
    layer, fit = fit_of("fold2", 32, seed)
    for head in range(2):
        _, _, moments = moments_of(layer, head, 32)
        basis = fit["value_basis"][head].double().numpy()
        variance = basis.T @ damped(moments, 1e-3 + 32 / (60 - FIRST)) @ basis  # of so few tokens
        inverse = np.linalg.inv(basis)
        cost = inverse @ damped(layer.statistics.output_costs[head].numpy()) @ inverse.T
        for matrix in (variance, cost):
            off = matrix - np.diag(np.diagonal(matrix))
            assert np.abs(off / np.sqrt(np.outer(np.diagonal(matrix), np.diagonal(matrix)))).max() < 0.2  # bfloat16
        ratio = np.diagonal(variance) / np.diagonal(cost)
        np.testing.assert_allclose(ratio, ratio.mean(), rtol=0.05)
        assert (np.diff(np.diagonal(variance) * np.diagonal(cost)) < 0.05 * np.diagonal(variance * cost)[:-1]).all()


@pytest.mark.parametrize("name", WIDTHS)
def test_a_hadamard_matrix_mixes_each_segment(name):
    """Entries of the whole map have 8 bits. It is inverted exactly."""
    d = 64
    _, fit = fit_of(name, d)
    x = torch.randn(5, 2, d, generator=torch.Generator().manual_seed(3))
    codecs = parse(name).codecs(d, d, fit)
    for side, codec, quarters in zip(("key", "value"), codecs, WIDTHS[name], strict=True):
        mixing = block_diag(*(hadamard(dims) * dims**-0.5 for dims, _ in segments(quarters, d)))
        centred = (x - fit[f"{side}_mean"]).double().numpy()
        for head in range(2):
            if side == "key":
                columns = np.eye(d)[:, fit["key_order"][head].long().numpy()] * fit["key_scale"][head].numpy()
            else:
                columns = fit["value_basis"][head].double().numpy()
            expected = centred[:, head] @ columns @ mixing
            size = np.abs(centred[:, head]) @ np.abs(columns @ mixing)
            assert (np.abs(codec.transform.forward(x)[:, head].numpy() - expected) <= 2**-8 * size).all()
        back = codec.transform.inverse(codec.transform.forward(x))
        np.testing.assert_allclose(back.numpy(), x.numpy(), atol=1e-4)


@pytest.mark.parametrize("name", WIDTHS)
def test_vectors_of_the_layer_lie_in_the_middle_of_the_range_of_scales(name):
    """In every segment, the median scale is from 1/16 to 16, and most are within a factor of 2^5 of 1. The range is
    2^-7 to 240."""
    layer, fit = fit_of(name)
    for codec, x in zip(parse(name).codecs(32, 32, fit), (layer.k, layer.v), strict=True):
        _, scales = codec.quantize(codec.transform.forward(torch.from_numpy(x).float()).unsqueeze(-2))
        exponents = scales.int() // 16 - 8
        assert ((exponents >= -5) & (exponents <= 5)).float().mean() > 0.9
        median = even.decode(scales).median(dim=0).values  # [kv_heads, 1, segments]
        assert ((median > 1 / 16) & (median < 16)).all()


def test_large_and_small_models_store_equally_well():
    """The maps take up the size of a model's numbers."""
    errors = []
    for size in (2.0**-8, 1.0, 2.0**8):
        layer, fit = fit_of("fold2", size=size)
        codec, _ = parse("fold2").codecs(32, 32, fit)
        x = torch.from_numpy(layer.k[FIRST:]).float() * size
        errors.append(float((codec.decode(codec.encode(x)) - x).norm() / size))
    assert errors == pytest.approx([errors[1]] * 3, rel=1e-2)
    with pytest.raises(ValueError, match="cannot store"):
        codec.encode(x * 2.0**20)


def test_widths_of_a_layer_come_from_its_fit():
    _, fit = fit_of("fold2")
    widths = {"key_widths": torch.tensor([[4] * 16 + [2] * 16]), "value_widths": torch.tensor([[4] * 8 + [2] * 24])}
    key, value = parse("fold").layouts(32, 32, widths)
    assert [(segment.dims, segment.bits) for segment in key.segments] == [(16, 4), (16, 2)]
    assert [(segment.dims, segment.bits) for segment in value.segments] == [(8, 4), (24, 2)]
    x = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(0))
    for codec in parse("fold").codecs(32, 32, {**fit, **widths}):
        np.testing.assert_allclose(codec.transform.inverse(codec.transform.forward(x)).numpy(), x.numpy(), atol=1e-4)
    with pytest.raises(ValueError, match="its widths are chosen per layer: run `kvfold tune"):
        parse("fold").layouts(32, 32, {})


def test_heads_of_other_sizes():
    """Quarters end at multiples of 8 coordinates."""
    key, _ = parse("fold4").layouts(80, 80, {})
    assert [(segment.dims, segment.bits) for segment in key.segments] == [(16, 8), (48, 4), (16, 2)]
    with pytest.raises(ValueError, match="heads of a multiple of 8 dims are needed, not 36"):
        parse("fold2").layouts(36, 36, {})
