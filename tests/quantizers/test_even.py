"""Evenly spaced levels and 8-bit scales against their definition in float64."""

import numpy as np
import pytest
import scipy.optimize
import torch

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


def test_every_byte_stands_for_its_scale():
    got = even.decode(torch.arange(256, dtype=torch.uint8))
    assert got.dtype == torch.float32
    assert got.tolist() == [0.0 if byte < 16 else scale_of(byte) for byte in range(256)]
    assert scale_of(254) == 240


@pytest.mark.parametrize("unit", [1.0, 2.0**-9, 2.0**7])
def test_the_nearest_scale_is_stored(unit):
    """A vector of one coordinate and a bit has the level 1/2. So its scale is twice the coordinate."""
    between = [(scale_of(byte) + scale_of(byte + 1)) / 2 for byte in range(-32, 255)]
    drawn = (2.0 ** np.random.default_rng(0).uniform(-11, 9, 300)).tolist()
    scales = np.float32([*map(scale_of, range(-32, 260)), *between, *np.nextafter(between, 0), *drawn])
    codes, stored = even.quantize(torch.from_numpy(scales / 2 * np.float32(unit)).unsqueeze(1), 1, unit)
    assert (codes == 1).all()
    assert stored.flatten().tolist() == [nearest_byte(float(scale)) for scale in scales]


@pytest.mark.parametrize("bits", WIDTHS)
def test_steps_have_the_least_error_on_a_normal_distribution(bits):
    x = np.linspace(-8, 8, 20001)
    density = np.exp(-(x**2) / 2) * (x[1] - x[0]) / np.sqrt(2 * np.pi)
    levels = np.arange(2**bits) - (2**bits - 1) / 2

    def error(step: float) -> float:
        nearest = np.clip(np.round(x / step + levels[-1]), 0, 2**bits - 1) - levels[-1]
        return float(((x - step * nearest) ** 2 * density).sum())

    best = scipy.optimize.minimize_scalar(error, bounds=(even.STEPS[bits] / 2, even.STEPS[bits] * 2), method="bounded")
    assert error(even.STEPS[bits]) <= best.fun * (1 + 1e-5)
    assert even.STEPS[bits] == pytest.approx(best.x, rel=5e-3)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize(
    ("n", "size", "unit"), [(2, 1.0, 2.0**-5), (32, 1e-3, 2.0**-10), (48, 1.0, 0.5), (128, 500.0, 256.0)]
)
def test_codes_and_scale_by_definition(bits, n, size, unit):
    x = size * random(200, n)
    codes, stored = even.quantize(x, bits, unit)
    assert (codes.dtype, stored.dtype, stored.shape) == (torch.uint8, torch.uint8, (200, 1))
    exact, middle = x.double().numpy(), (2**bits - 1) / 2
    step = even.STEPS[bits] * np.linalg.norm(exact, axis=-1, keepdims=True) / n**0.5
    levels = np.abs((exact / step)[..., None] - (np.arange(2**bits) - middle)).argmin(-1) - middle
    scale = (exact**2).sum(-1) / (exact * levels).sum(-1) / unit
    expected = np.array([nearest_byte(s) for s in scale])
    assert (stored.flatten().numpy() != expected).sum() <= 1, "but for float32 between two scales"
    got = codes.numpy().astype(np.int64)
    if bits == 8:  # with the scale as stored
        step = np.array([[unit * scale_of(byte)] for byte in stored.flatten().tolist()])
    distance = np.abs((exact / step)[..., None] - (np.arange(2**bits) - middle))
    chosen = np.take_along_axis(distance, got[..., None], -1)[..., 0]
    assert (chosen <= distance.min(-1) + 1e-4).all(), "the nearest level, but for float32 at the boundaries"
    back = even.dequantize(codes, bits, stored, unit)
    assert back.dtype == torch.float32
    decoded = np.array([[unit * scale_of(byte)] for byte in stored.flatten().tolist()]) * (got - middle)
    assert np.array_equal(back.double().numpy(), decoded), "exact: neither codes nor scales have many bits"
    products = (exact * decoded).sum(-1) / (exact**2).sum(-1)
    # products with x itself keep their size but for the rounded scale, which 8-bit codes make up for
    assert (np.abs(products - 1) <= (2**-5 if bits < 8 else 0.1 * n**-0.5)).all()


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


def test_rows_do_not_depend_on_their_batch():
    x = random(61, 3, 96)
    codes, scale = even.quantize(x, 2)
    for rows in (1, 7):
        parts = [even.quantize(part, 2) for part in x.split(rows)]
        assert torch.equal(torch.cat([part for part, _ in parts]), codes)
        assert torch.equal(torch.cat([part for _, part in parts]), scale)


@pytest.mark.parametrize("size", [1e-6, 1.0, 3e4])
def test_the_unit_puts_scales_near_the_middle(size):
    scales = size * random(1001).exp()
    unit = even.unit_of(torch.cat((torch.zeros(500), scales)))
    assert np.log2(unit) == round(np.log2(unit))
    assert 2**-0.6 < float(scales.median()) / unit < 2**0.6
    assert even.unit_of(torch.zeros(3)) == 1
