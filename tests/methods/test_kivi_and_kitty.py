"""KIVI and Kitty against METHODS.md §8: what a page holds once it is full, and what is read before.

tests/paged/test_cache.py runs both through random histories.
"""

import numpy as np
import pytest
import torch
from page_views import key_views

from kvfold.ops import naive
from kvfold.paged import PagedCache
from kvfold.recipes import parse


def filled(text: str, d: int, tokens: int, page_size: int | None = None, heads: int = 2):
    """A cache of one layer with that many tokens, and their raw keys and values [tokens, kv_heads, d]."""
    recipe = parse(text)
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(-2, 2, (1, heads, d)))
    k, v = ((rng.standard_normal((tokens, heads, d)) * sizes).astype(np.float32) for _ in range(2))
    k, v = (torch.from_numpy(x).bfloat16() for x in (k, v))
    size = page_size or recipe.page_size
    cache = PagedCache([recipe.codecs(d, d, {})], heads, 1, block=recipe.block, page_size=size)
    cache.extend([tokens])
    new = naive.store(cache.pages(0), k, v)
    return cache, new, k.double().numpy(), v.double().numpy()


def rounded(low: np.ndarray, high: np.ndarray, levels: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
    """Scale and offset in 16 bits."""
    return tuple(x.astype(np.float16).astype(np.float64) for x in ((high - low) / levels, low))


@pytest.mark.parametrize("bits", [2, 4])
def test_kivi_keys_by_channel_and_values_by_token(bits):
    cache, new, k, v = filled(f"kivi-{bits}:block=0", 64, 70)
    read_k, read_v = (x.double().numpy() for x in naive.read(cache.pages(0), 0, 69, new))
    levels = 2**bits - 1
    for start in (0, 32):  # the two full pages of 32
        page = k[start : start + 32]
        scale, offset = rounded(page.min(0), page.max(0), levels)
        expected = np.clip(np.round((page - offset) / scale), 0, levels) * scale + offset
        np.testing.assert_allclose(read_k[start : start + 32], expected, atol=2e-6 * np.abs(page).max())
        groups = v[start : start + 32].reshape(32, 2, 2, 32)  # two groups of 32 channels
        scale, offset = rounded(groups.min(-1, keepdims=True), groups.max(-1, keepdims=True), levels)
        expected = np.clip(np.round((groups - offset) / scale), 0, levels) * scale + offset
        np.testing.assert_allclose(
            read_v[start : start + 32], expected.reshape(32, 2, 64), atol=2e-6 * np.abs(groups).max()
        )
    # the page that is not full is read as it is, keys and values
    assert np.array_equal(read_k[64:], k[64:])
    assert np.array_equal(read_v[64:], v[64:])


def test_kivi_open_block():
    assert parse("kivi-2").block == 128
    cache, new, k, _ = filled("kivi-2", 64, 200)
    read_k, _ = naive.read(cache.pages(0), 0, 199, new)
    same = (read_k.double().numpy() == k).all(axis=(1, 2))
    # token 199 lies in the block of 128 to 255, which has two full pages of 32
    assert same.tolist() == [False] * 128 + [True] * 72


@pytest.mark.parametrize(("boost", "boosted"), [(0.25, 16), (0.125, 8), (0, 0)])
def test_kitty_boosts_the_strongest_channels_of_each_page_and_head(boost, boosted):
    d = 64
    cache, new, k, v = filled(f"kitty-2:block=0,boost={boost}", d, 300)
    pages = cache.pages(0)
    read_k, read_v = (x.double().numpy() for x in naive.read(pages, 0, 299, new))
    codes, meta = key_views(pages.layout, pages.pool)
    assert codes.shape[-1] == 16 + boosted // 4
    assert meta.shape[-2:] == (1, 128 + boosted // 2)
    for number, start in enumerate((0, 128)):
        physical = cache.tables.pages[0][number]
        page = k[start : start + 128]
        strongest = np.sort(np.argsort(-np.abs(page).mean(0), axis=-1)[:, :boosted], axis=-1)  # [heads, boosted]
        stored = meta[physical, :, 0, 128:].contiguous().view(torch.uint8).numpy()
        assert np.array_equal(stored, strongest)
        levels = np.full((2, d), 3)
        np.put_along_axis(levels, strongest, 15, axis=-1)
        scale, offset = rounded(page.min(0), page.max(0), levels)
        expected_codes = np.clip(np.round((page - offset) / scale), 0, levels)
        np.testing.assert_allclose(
            read_k[start : start + 128], expected_codes * scale + offset, atol=2e-6 * np.abs(page).max()
        )
        # the low plane holds the two low bits of all channels; byte j those of channels j, j + 16, j + 32, j + 48
        low = codes[physical, :, :, :16].numpy()
        planes = np.concatenate([(low >> shift) & 3 for shift in (0, 2, 4, 6)], -1).transpose(1, 0, 2)
        assert (planes == expected_codes % 4).mean() > 0.999
        token = v[start : start + 128]
        scale, offset = rounded(token.min(-1, keepdims=True), token.max(-1, keepdims=True), 3)
        expected = np.clip(np.round((token - offset) / scale), 0, 3) * scale + offset
        np.testing.assert_allclose(read_v[start : start + 128], expected, atol=2e-6 * np.abs(token).max())
    assert np.array_equal(read_k[256:], k[256:])
