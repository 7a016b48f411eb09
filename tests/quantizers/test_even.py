"""Evenly spaced levels and 8-bit scales against their definition in float64."""

import numpy as np
import pytest
import scipy.optimize
import torch
from even_steps import chosen, nearest, tried

from kvfold.quantizers import even

WIDTHS = (1, 2, 4, 8)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def scale_of(byte: int) -> float:
    """Of a byte 16·e + m. Below 16, where 0 is meant, and above 255 the scale that its bits would stand for."""
    return (1 + byte % 16 / 16) * 2.0 ** (byte // 16 - 8)


def nearest_byte(scale: float) -> int:
    """By trying all; ties go to the even byte. 255: none holds it."""
    byte = min(range(-64, 300), key=lambda byte: (abs(scale_of(byte) - scale), byte % 2))
    return 0 if byte < 16 else min(byte, 255)


def nearest_bytes(x: np.ndarray, levels: np.ndarray) -> np.ndarray:
    scales = (x**2).sum(-1) / (x * levels).sum(-1)
    return np.array([nearest_byte(scale) for scale in scales])


def test_every_byte_stands_for_its_scale():
    got = even.decode(torch.arange(256, dtype=torch.uint8))
    assert got.dtype == torch.float32
    assert got.tolist() == [0.0 if byte < 16 else scale_of(byte) for byte in range(256)]
    assert scale_of(254) == 240


def test_the_nearest_scale_is_stored():
    """A vector of one coordinate and a bit has the level 1/2. So its scale is twice the coordinate."""
    between = [(scale_of(byte) + scale_of(byte + 1)) / 2 for byte in range(-32, 255)]
    drawn = (2.0 ** np.random.default_rng(0).uniform(-11, 9, 300)).tolist()
    scales = np.float32([*map(scale_of, range(-32, 260)), *between, *np.nextafter(between, 0), *drawn])
    codes, stored = even.quantize(torch.from_numpy(scales / 2).unsqueeze(1), 1)
    assert (codes == 1).all()
    assert stored.flatten().tolist() == [nearest_byte(float(scale)) for scale in scales]


# The step with the least mean squared error on N(0, 1), for any number of coordinates
LEAST = {1: 1.5957691216, 2: 0.9956866860, 4: 0.3352006122, 8: 0.0307623868}


@pytest.mark.parametrize("bits", WIDTHS)
def test_steps_have_the_least_error_on_a_normal_distribution(bits):
    x = np.linspace(-8, 8, 20001)
    density = np.exp(-(x**2) / 2) * (x[1] - x[0]) / np.sqrt(2 * np.pi)

    def error(step: float) -> float:
        return float(((x - step * nearest(x / step, bits)) ** 2 * density).sum())

    best = scipy.optimize.minimize_scalar(error, bounds=(LEAST[bits] / 2, LEAST[bits] * 2), method="bounded")
    assert error(LEAST[bits]) <= best.fun * (1 + 1e-5)
    assert LEAST[bits] == pytest.approx(best.x, rel=5e-3)
    assert LEAST[bits] in even.STEPS[bits] or bits >= 4


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize(("n", "size"), [(2, 32.0), (32, 1.0), (48, 2.0), (128, 2.0)])
def test_codes_and_scale_by_definition(bits, n, size):
    """Of the step with the largest cosine."""
    x = size * random(200, n)
    codes, stored = even.quantize(x, bits)
    assert (codes.dtype, stored.dtype, stored.shape) == (torch.uint8, torch.uint8, (200, 1))
    exact, got = x.double().numpy(), codes.numpy() - (2**bits - 1) / 2
    bytes = stored.flatten().tolist()
    decoded = np.array([[scale_of(byte)] for byte in bytes])
    agree = np.zeros(200, dtype=bool)
    if bits == 8:  # codes are computed again, with the scale as stored
        ((_, levels, _),) = tried(exact, bits)
        distance = np.abs(exact / decoded - got) - np.abs(exact / decoded - nearest(exact / decoded, bits))
        agree = (distance <= 1e-4).all(-1) & (bytes == nearest_bytes(exact, levels))
    else:
        for right in chosen(exact, got, bits, tie=1e-9):
            agree |= right & (bytes == nearest_bytes(exact, got))
    assert (~agree).sum() <= 1, "but for float32 between two scales"
    back = even.dequantize(codes, bits, stored)
    assert back.dtype == torch.float32
    assert np.array_equal(back.double().numpy(), decoded * got), "exact: neither codes nor scales have many bits"
    products = (exact * decoded * got).sum(-1) / (exact**2).sum(-1)
    # products with x itself keep their size but for the rounded scale, which 8-bit codes make up for
    assert (np.abs(products - 1) <= (2**-5 if bits < 8 else 0.1 * n**-0.5)).all()


# By how much choosing the step lowers the error of normal numbers, at least: per bits and coordinates
LOWER = {
    2: {16: 0.035, 32: 0.02, 64: 0.01, 128: 0.004},
    4: {16: 0.31, 32: 0.23, 64: 0.15, 128: 0.08},
    8: {16: 0.65, 32: 0.57, 64: 0.50, 128: 0.43},
}


@pytest.mark.parametrize(("bits", "n"), [(bits, n) for bits, sizes in LOWER.items() for n in sizes])
def test_the_chosen_step_has_less_error_than_one_for_all(bits, n):
    x = 64 * random(4000, n)
    codes, scale = even.scaled(x, bits)
    if bits == 8:
        codes, stored = even.quantize(x, bits)
        scale = even.decode(stored)
    exact = x.double().numpy()
    chosen = exact - scale.double().numpy() * (codes.numpy() - (2**bits - 1) / 2)
    step = LEAST[bits] * np.linalg.norm(exact, axis=-1, keepdims=True) / n**0.5
    levels = np.clip(np.floor(exact / step) + 0.5, -(2**bits - 1) / 2, (2**bits - 1) / 2)
    square, product = (exact**2).sum(-1), (exact * levels).sum(-1)
    before = exact - (square / product)[:, None] * levels
    assert (chosen**2).sum() < (1 - LOWER[bits][n]) * (before**2).sum()
    if bits == 2:  # this step is one of those that are tried
        assert ((chosen**2).sum(-1) <= (before**2).sum(-1) * (1 + 1e-5)).all()


@pytest.mark.parametrize("bits", WIDTHS)
def test_equal_magnitudes_are_kept(bits):
    """Every step is as good as any other."""
    x = 3 * random(20, 32).sign()
    codes, stored = even.quantize(x, bits)
    assert torch.equal(even.dequantize(codes, bits, stored).sign(), x.sign())
    torch.testing.assert_close(even.dequantize(codes, bits, stored), x, rtol=2**-5, atol=0)


@pytest.mark.parametrize("bits", WIDTHS)
def test_zeros_and_tiny_vectors(bits):
    for size in (0.0, 1e-45, 1e-39, 1e-20, 1e-4):
        codes, scale = even.quantize(size * random(5, 16), bits)
        assert (scale == 0).all()
        assert (even.dequantize(codes, bits, scale) == 0).all()
    x = random(5, 16)
    x[2] = 0
    codes, scale = even.quantize(x, bits)
    back = even.dequantize(codes, bits, scale)
    assert (back[2] == 0).all()
    assert (back[[0, 1, 3, 4]] != 0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e5, -3e38])
@pytest.mark.parametrize("bits", WIDTHS)
def test_what_no_scale_holds_is_seen_there(bits, bad):
    x = random(7, 32)
    x[3, 5] = bad
    _, scale = even.quantize(x, bits)
    assert (scale == even.UNSTORABLE).flatten().tolist() == [row == 3 for row in range(7)]
