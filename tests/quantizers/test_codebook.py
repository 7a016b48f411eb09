"""Norm and Lloyd–Max codes against their definition in float64."""

import numpy as np
import pytest
import torch
from lloyd_max_error import distortion

from kvfold.quantizers import codebook
from kvfold.quantizers.lloyd_max import levels


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def defined(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float64[n, d] -> codes, levels, and the norm ‖x‖/‖level‖."""
    length = np.linalg.norm(x, axis=-1, keepdims=True)
    codes = np.abs((x / length * x.shape[-1] ** 0.5)[..., None] - np.array(levels(bits))).argmin(-1)
    decoded = np.array(levels(bits))[codes]
    return codes, decoded, length / np.linalg.norm(decoded, axis=-1, keepdims=True)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("d", [2, 40, 64])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 3000.0])
def test_codes_and_norm_by_definition(bits, d, scale):
    x = scale * random(200, d)
    codes, norm = codebook.quantize(x, bits)
    assert norm.dtype == torch.float16
    assert norm.shape == (200, 1)
    assert codes.dtype == torch.uint8
    expected, decoded, exact = defined(x.double().numpy(), bits)
    got = codes.numpy()
    clear = (got == expected).all(-1)
    assert clear.mean() > 0.95, "but for float32 at the boundaries"
    assert np.abs(got.astype(int) - expected).max() <= 1
    np.testing.assert_allclose(norm.double().numpy()[clear], exact[clear], rtol=2**-11 * 1.01, atol=2**-25)
    back = codebook.dequantize(codes, bits, norm)
    assert back.dtype == torch.float32
    np.testing.assert_allclose(
        back.double().numpy()[clear], (decoded * norm.double().numpy())[clear], rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_length_is_kept_and_the_error_is_the_distortion(bits):
    x = random(2000, 128, seed=bits)
    codes, norm = codebook.quantize(x, bits)
    back = codebook.dequantize(codes, bits, norm).double()
    assert torch.allclose(back.norm(dim=-1), x.double().norm(dim=-1), rtol=2**-10)
    error = ((back - x).square().sum(-1) / x.square().sum(-1)).mean()
    # with the length restored, 2 − 2·√(1 − D) instead of D
    expected = 2 - 2 * (1 - distortion(bits)) ** 0.5
    assert error == pytest.approx(expected, rel=0.1)


def test_the_corrected_norm_is_that_of_the_vector_over_that_of_its_levels():
    x = torch.tensor([[3.0, -4.0]])
    codes, norm = codebook.quantize(x, 1)
    assert codes.tolist() == [[1, 0]]
    # both levels are √(2/π), so that their norm is 2/√π
    assert norm.item() == pytest.approx(5 / (2 / np.pi**0.5), rel=2**-11)


def test_zeros_and_tiny_vectors():
    for scale in (0.0, 1e-45, 1e-39, 1e-20):
        codes, norm = codebook.quantize(scale * random(5, 16), 3)
        back = codebook.dequantize(codes, 3, norm)
        assert back.isfinite().all()
        assert (back.abs() < 2**-24).all()
    x = random(5, 16)
    x[2] = 0
    codes, norm = codebook.quantize(x, 3)
    assert (codebook.dequantize(codes, 3, norm)[2] == 0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e7, 3e38])
def test_what_the_norm_cannot_hold_is_seen_there(bad):
    x = random(7, 32)
    x[3, 5] = bad
    _, norm = codebook.quantize(x, 3)
    assert norm.isfinite().flatten().tolist() == [row != 3 for row in range(7)]
