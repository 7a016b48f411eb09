"""The mode that other tests run models under."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from batch_invariance import FUNCTIONS, BatchInvariant
from scipy.special import expit
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention, silu

DEFINITIONS = {
    **{name: getattr(np, name) for name in ("cos", "exp", "log", "reciprocal", "sin", "square")},
    "rsqrt": lambda x: x**-0.5,
    "sigmoid": expit,
    "silu": lambda x: x * expit(x),
}


@pytest.fixture(autouse=True)
def _mode():
    with torch.no_grad(), BatchInvariant():
        yield


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers of very different sizes."""
    draw = np.random.default_rng(seed)
    return torch.from_numpy((draw.standard_normal(shape) * 16 ** draw.standard_normal(shape)).astype(np.float32))


def weight(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(random(*shape, seed=1))


def on_grid(numbers: list[float], bits: int) -> tuple[list[int], Fraction]:
    """Rounded to integers times a unit, a power of two with which the largest of them has `bits` bits."""
    unit, largest = Fraction(2) ** 100, max(abs(Fraction(x)) for x in numbers)
    while unit * 2**bits / 2 > largest:
        unit /= 2
    return [round(Fraction(x) / unit) for x in numbers], unit


def test_products_are_exact():
    """Those of rows and columns on their grids, rounded to float32 once; and close to what they stand for."""
    x, w = random(3, 300), weight(4, 300)
    found = linear(x, w)
    for i, j in np.ndindex(3, 4):
        (row, row_unit), (column, column_unit) = on_grid(x[i].tolist(), 24), on_grid(w[j].tolist(), 53 - 24 - 9)
        exact = sum(a * b for a, b in zip(row, column, strict=True)) * row_unit * column_unit
        assert found[i, j].item() == np.float32(float(exact))
    expected = x.numpy().astype(np.float64) @ w.numpy().T
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-4 * np.abs(expected).max())


def test_products_do_not_depend_on_the_other_rows():
    x, w, bias = random(64, 1536), weight(96, 1536), random(96)
    whole = linear(x, w, bias)
    for n in (1, 2, 3, 17, 63):
        assert torch.equal(linear(x[:n], w, bias), whole[:n])
        assert torch.equal(linear(x[None, -n:], w, bias), whole[None, -n:])
    order = torch.from_numpy(np.random.default_rng(0).permutation(1536))
    assert torch.equal(linear(x[:, order], torch.nn.Parameter(w[:, order]), bias), whole)


@pytest.mark.parametrize("name", sorted(FUNCTIONS - {"lerp", "logaddexp", "pow"}))
def test_functions_do_not_depend_on_the_place_of_a_number(name):
    x = random(3000).abs().clamp(1e-3, 50)
    function = silu if name == "silu" else getattr(torch, name)
    found = function(x)
    for shift in (1, 3, 8, 1000):
        assert torch.equal(function(x[shift:]), found[shift:])
    assert torch.equal(function(x.view(30, 100).T), found.view(30, 100).T)
    np.testing.assert_allclose(found.numpy(), DEFINITIONS[name](x.numpy().astype(np.float64)), rtol=1e-5, atol=1e-6)


def test_functions_of_several_numbers_and_in_place():
    a, b, share = random(30, 64), random(30, 64, seed=1), random(30, 1).abs().clamp_max(1)
    whole = a.clone().lerp_(b, share)
    assert torch.equal(a[7:9].clone().lerp_(b[7:9], share[7:9]), whole[7:9])
    np.testing.assert_allclose(whole.numpy(), (a + share * (b - a)).numpy(), atol=1e-5 * a.abs().max().item())
    assert torch.equal(torch.add(a, b, alpha=3)[5:6], torch.add(a[5:6], b[5:6], alpha=3))
    assert torch.equal((a**2)[5:6], a[5:6] ** 2)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.mean(-1, keepdim=True),
        lambda x: x.double().sum(-1),
        lambda x: x.log_softmax(-1),
        lambda x: x.unflatten(1, (4, -1)).sum(1),
    ],
)
def test_rows_do_not_depend_on_each_other(function):
    x = random(40, 576)
    assert torch.equal(function(x[7:8]), function(x)[7:8])


def test_reductions():
    x = random(40, 576)
    double = x.numpy().astype(np.float64)
    np.testing.assert_allclose(x.mean(-1).numpy(), double.mean(-1), atol=1e-5 * np.abs(double).max())
    np.testing.assert_allclose(x.sum(0, keepdim=True).numpy(), double.sum(0, keepdims=True), rtol=1e-2, atol=1e-2)
    expected = double - np.log(np.exp(double - double.max(-1, keepdims=True)).sum(-1, keepdims=True))
    np.testing.assert_allclose(x.log_softmax(-1), expected - double.max(-1, keepdims=True), rtol=1e-5, atol=1e-3)
    assert x.sum() == 0  # no row's
    assert not torch.isfinite((x / 0).sum())


def test_queries_do_not_depend_on_each_other():
    q, k, v = (random(2, heads, 40, 64, seed=heads).clamp(-2, 2) for heads in (6, 3, 3))
    v = v + 1
    whole = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for i in (0, 7, 39):
        alone = (q[1:, :, i : i + 1], k[1:, :, : i + 1], v[1:, :, : i + 1])
        assert torch.equal(scaled_dot_product_attention(*alone, enable_gqa=True), whole[1:, :, i : i + 1])
    seen = torch.from_numpy(np.tri(40, dtype=bool))
    assert torch.equal(scaled_dot_product_attention(q, k, v, seen.expand(2, 1, -1, -1), enable_gqa=True), whole)
    keys, values = (np.repeat(x.numpy().astype(np.float64), 2, axis=1) for x in (k, v))
    weights = np.exp(np.where(seen, q.numpy() @ keys.swapaxes(2, 3) / 8, -np.inf))
    np.testing.assert_allclose(whole, weights / weights.sum(-1, keepdims=True) @ values, atol=1e-5)


@pytest.mark.parametrize(
    "refused",
    [
        lambda x: x @ x.T,
        lambda x: gelu(x),
        lambda x: x.cumsum(0),
        lambda x: x.softmax(-1),
        lambda x: x.std(-1),
        lambda x: layer_norm(x, (8,)),
        lambda x: torch.addcmul(x, x, x),
        lambda x: torch.cdist(x, x),
    ],
)
def test_what_could_depend_on_the_batch_is_refused(refused):
    with pytest.raises(NotImplementedError, match=r"is not known to give a row the same bits|which is no weight"):
        refused(random(3, 8))


def test_integers_are_left_alone():
    x = torch.arange(8)
    assert (x @ x, x.cumsum(0)[-1], x.sum()) == (140, 28, 28)
