import math

import numpy as np
import pytest
import torch
from lloyd_max_error import distortion, integrals

from kvfold.quantizers.lloyd_max import dequantize, levels, quantize

WIDTHS = range(1, 9)


def test_one_bit_is_the_mean_of_a_half_normal():
    assert levels(1) == pytest.approx((-math.sqrt(2 / math.pi), math.sqrt(2 / math.pi)), abs=1e-15)
    assert distortion(1) == pytest.approx(1 - 2 / math.pi, abs=1e-12)


def test_levels_of_max():
    assert levels(2)[2:] == pytest.approx((0.4528, 1.510), abs=5e-4)
    assert levels(3)[4:] == pytest.approx((0.2451, 0.7560, 1.344, 2.152), abs=5e-4)


@pytest.mark.parametrize(("bits", "published"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497), (5, 0.002499)])
def test_distortions_of_max(bits, published):
    assert distortion(bits) == pytest.approx(published, rel=3e-3)  # his last digits are off by 2e-3 at 5 bits


@pytest.mark.parametrize("bits", WIDTHS)
def test_levels_are_means_of_their_cells(bits):
    offsets = np.array(integrals(bits, lambda x, level: x - level)) / integrals(bits, lambda x, level: 1)
    assert np.abs(offsets).max() < 1e-10


@pytest.mark.parametrize("bits", WIDTHS)
def test_levels_ascend_and_are_symmetric(bits):
    table = np.array(levels(bits))
    assert len(table) == 2**bits
    assert (np.diff(table) > 0).all()
    assert (table == -table[::-1]).all()


def test_high_rate_limit():
    assert distortion(8) * 4**8 == pytest.approx(math.pi * math.sqrt(3) / 2, rel=0.01)  # Panter and Dite


@pytest.mark.parametrize("bits", [0, 9])
def test_other_widths_are_refused(bits):
    with pytest.raises(ValueError, match=f"1 to 8 bits, not {bits}"):
        levels(bits)


@pytest.mark.parametrize("bits", WIDTHS)
def test_codes_are_the_nearest_levels(bits):
    x = 2 * torch.randn(64, 3, 50, generator=torch.Generator().manual_seed(bits)).transpose(0, 1)
    codes = quantize(x, bits)
    decoded = dequantize(codes, bits)
    assert (codes.shape, codes.dtype, decoded.dtype) == (x.shape, torch.uint8, torch.float32)
    distances = (x.double()[..., None] - torch.tensor(levels(bits), dtype=torch.float64)).abs()
    chosen = distances.gather(-1, codes.long()[..., None]).squeeze(-1)
    assert torch.allclose(chosen, distances.amin(-1), atol=1e-6)  # boundaries are rounded to float32
    assert torch.allclose((x - decoded).abs().double(), chosen, atol=1e-6)
