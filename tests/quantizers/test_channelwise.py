"""Channel-wise integers of whole pages, against float64 and the bytes as documented."""

import numpy as np
import pytest
import torch

from kvfold.quantizers import channelwise


def pages(n: int, tokens: int, heads: int, d: int, seed: int = 0) -> torch.Tensor:
    """[pages, tokens, kv_heads, 1, d] with channels of very different sizes and offsets, other ones in each page."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.uniform(-2, 2, (n, 1, heads, 1, d)))
    x = rng.standard_normal((n, tokens, heads, 1, d)) * sizes + rng.standard_normal((n, 1, heads, 1, d))
    return torch.from_numpy(x.astype(np.float32))


def unpacked(data: np.ndarray, bits: int) -> np.ndarray:
    """Codes of 1, 2, 4 or 8 bits, split: byte j has codes j, j + n/per, … from its low bits up."""
    return np.concatenate([(data >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], axis=-1)


@pytest.mark.parametrize(
    ("bits", "boosted"), [(1, 0), (2, 0), (4, 0), (8, 0), (2, 8), (2, 16), (2, 32), (4, 8), (1, 16)]
)
@pytest.mark.parametrize("tokens", [1, 5, 32])
def test_by_definition(bits, boosted, tokens):
    d = 32
    x = pages(3, tokens, 2, d, seed=bits + boosted)
    packed, meta = channelwise.quantize(x, bits, boosted)
    assert packed.shape == (3, tokens, 2, 1, (d + boosted) * bits // 8)
    assert meta.shape == (3, 1, 2, 1, 2 * d + boosted // 2)
    got = channelwise.dequantize(packed, meta, d, bits, boosted)
    assert got.shape == x.shape
    assert got.dtype == torch.float32

    exact, data, entries = x.double().numpy(), packed.numpy(), meta.numpy()
    # the channels with the largest mean |x| of each page and head
    strength = np.abs(exact).mean(axis=1)  # [pages, heads, 1, d]
    expected = np.sort(np.argsort(-strength, axis=-1)[..., :boosted], axis=-1)
    channels = np.ascontiguousarray(entries[:, 0, ..., 2 * d :]).view(np.uint8)
    assert np.array_equal(channels, expected)
    # two planes: low bits of all channels, high bits of the boosted ones
    codes = unpacked(data[..., : d * bits // 8], bits).astype(np.int64)
    high = unpacked(data[..., d * bits // 8 :], bits)
    for page, head in np.ndindex(3, 2):
        codes[page, :, head, 0, :][:, channels[page, head, 0]] += high[page, :, head, 0].astype(np.int64) << bits
    levels = np.full(strength.shape, 2**bits - 1)
    np.put_along_axis(levels, expected, 4**bits - 1, axis=-1)
    assert (codes <= levels[:, None]).all()
    # scale = (max − min)/levels and offset = min of each channel, rounded to 16 bits
    scale, offset = (entries[:, 0, ..., part].astype(np.float64) for part in (slice(d), slice(d, 2 * d)))
    low, high_end = exact.min(axis=1), exact.max(axis=1)
    np.testing.assert_allclose(scale, (high_end - low) / levels, rtol=2**-11 * 1.01, atol=2**-25)
    np.testing.assert_allclose(offset, low, rtol=2**-11 * 1.01, atol=2**-25)
    np.testing.assert_allclose(got.numpy(), scale[:, None] * codes + offset[:, None], rtol=1e-6, atol=1e-6)
    # and the codes are the nearest on that grid
    grid = np.clip(np.round((exact - offset[:, None]) / np.maximum(scale, 2**-24)[:, None]), 0, levels[:, None])
    error, best = np.abs(got.numpy() - exact), np.abs(scale[:, None] * grid + offset[:, None] - exact)
    assert (error <= best + 1e-5).all()


def test_constant_channels_decode_exactly():
    x = torch.full((2, 8, 1, 1, 16), 0.75)
    x[1, :, 0, 0, 3] = -2.5
    for boosted in (0, 8):
        packed, meta = channelwise.quantize(x, 2, boosted)
        assert torch.equal(channelwise.dequantize(packed, meta, 16, 2, boosted), x)


def test_ties_go_to_the_lowest_channels():
    """Whatever the shape of the batch; channels that are equally strong are common among 16-bit numbers."""
    x = torch.ones(3, 4, 2, 1, 16)
    x[:, ::2] = -1
    x[..., 12:] *= 2
    for part in (x, x[:1], x[:, :, :1].contiguous()):
        _, meta = channelwise.quantize(part, 2, 8)
        channels = meta[..., 32:].contiguous().view(torch.uint8).flatten(0, -2)
        assert (channels == torch.tensor([0, 1, 2, 3, 12, 13, 14, 15])).all()


def test_each_page_and_head_is_alone():
    x = pages(4, 8, 3, 16)
    packed, meta = channelwise.quantize(x, 2, 8)
    for page in range(4):
        alone = channelwise.quantize(x[page : page + 1], 2, 8)
        assert torch.equal(alone[0][0], packed[page])
        assert torch.equal(alone[1][0].view(torch.int16), meta[page].view(torch.int16))
    for head in range(3):
        alone = channelwise.quantize(x[:, :, head : head + 1].contiguous(), 2, 8)
        assert torch.equal(alone[0][:, :, 0], packed[:, :, head])


def test_no_pages():
    packed, meta = channelwise.quantize(torch.zeros(0, 8, 2, 1, 16), 2, 8)
    assert packed.shape == (0, 8, 2, 1, 6)
    assert meta.shape == (0, 1, 2, 1, 36)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, -1e5, 3e38])
def test_what_sixteen_bits_cannot_hold_is_seen_in_metadata(bad):
    x = pages(2, 8, 2, 16)
    x[1, 3, 1, 0, 7] = bad
    for boosted in (0, 8):
        _, meta = channelwise.quantize(x, 2, boosted)
        lost = ~meta[..., :32].isfinite().all(dim=-1).squeeze()  # [page, head]
        assert lost.tolist() == [[False, False], [False, True]]


@pytest.mark.parametrize("garbage", [0xFF, 0x7F, 0x3A])
def test_bytes_that_nobody_wrote_decode_to_something(garbage):
    """Numbers of channels that do not exist must not bring the process down: who reads such pages masks the result."""
    packed = torch.full((2, 4, 1, 1, 6), garbage, dtype=torch.uint8)
    meta = torch.full((2, 1, 1, 1, 72), garbage, dtype=torch.uint8).view(torch.float16)
    assert channelwise.dequantize(packed, meta, 16, 2, 8).shape == (2, 4, 1, 1, 16)
