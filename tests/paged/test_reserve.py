"""A cache that has reserved its memory: steps stay where they are, so that CUDA graphs of them can be replayed."""

import pytest
import torch
from recorded_graphs import use_kernels
from test_cache import LAYERS, Setup, make_cache
from torch import Tensor

from kvfold.ops import naive
from kvfold.ops.pages import Step
from kvfold.paged import PagedCache

SETUPS = [
    Setup("saw-int4", 4),
    Setup("saw-int4:block=7", 4),
    Setup("int2:block=40", 16),
    Setup("int4:skip=1,block=1", 3),
    Setup("int4", 4),
    Setup("bf16", 8),
    Setup("kivi-2:group=8,block=5", 8),
]


def describe(setup: Setup) -> str:
    return f"{setup.recipe}-pages-of-{setup.page_size}"


pytestmark = pytest.mark.usefixtures("_poisoned_memory")


def tensors(step: Step) -> dict[str, Tensor]:
    return {name: value for name, value in vars(step).items() if isinstance(value, Tensor)}


def places(cache: PagedCache) -> list[int]:
    """Where everything lies that a kernel is given."""
    views = (
        view for layer in range(LAYERS) for _, *both in cache.pages(layer).views for arrays in both for view in arrays
    )
    held = (*cache.pools, *cache.rings, *views, cache.faults, *tensors(cache.step).values())
    return [tensor.data_ptr() for tensor in held]


def step(setup: Setup, caches: list[PagedCache], counts: list[int], seed: int) -> list[Tensor]:
    """Random tokens for all caches: outputs of the last layer."""
    generator, n = torch.Generator().manual_seed(seed), max(counts)
    heads = setup.kv_heads * setup.ratio
    for cache in caches:
        cache.extend(counts)
    for layer in range(LAYERS):
        k, v = torch.randn(2, len(counts), n, setup.kv_heads, setup.dims, generator=generator).to(setup.dtype)
        q = torch.randn(len(counts), n, heads, setup.dims, generator=generator).to(setup.dtype)
        outputs = [cache.attend(layer, q, k, v, setup.logits) for cache in caches]
    return outputs


def assert_described(cache: PagedCache) -> None:
    """The step of one token of each sequence is what the cache's bookkeeping says."""
    described, size = cache.step, cache.tables.page_size
    starts = [length - 1 for length in cache.lengths]
    assert described.known == (starts, cache.lengths)
    assert (described.starts.tolist(), described.lengths.tolist()) == (starts, cache.lengths)
    assert described.query_starts.tolist() == list(range(len(starts) + 1))
    held = cache.tables.pages
    assert [row[: len(pages)] for row, pages in zip(described.table.tolist(), held, strict=True)] == held
    assert described.locations.tolist() == [
        pages[start // size] * size + start % size for pages, start in zip(held, starts, strict=True)
    ]
    assert described.rings.tolist() == [[row] for row in range(len(starts))]


@pytest.mark.parametrize("setup", SETUPS, ids=describe)
def test_steps_move_no_memory(setup: Setup):
    cache = make_cache(setup, 3)
    cache.reserve(100)
    pools = [pool.data_ptr() for pool in cache.pools]
    step(setup, [cache], [9, 1, 20], seed=0)
    step(setup, [cache], [1, 1, 1], seed=1)
    before = places(cache)
    for seed in range(2, 81):
        step(setup, [cache], [1, 1, 1], seed)
        assert places(cache) == before
        assert_described(cache)
    assert cache.lengths == [89, 81, 100]
    assert [pool.data_ptr() for pool in cache.pools] == pools


@pytest.mark.parametrize("setup", SETUPS, ids=describe)
def test_attention_is_that_of_a_cache_that_grows(setup: Setup):
    """Also beyond what was reserved, where memory moves again."""
    caches = [make_cache(setup, 2) for _ in range(2)]
    caches[0].reserve(40)
    for seed, counts in enumerate([[15, 3], [1, 1], *[[1, 1]] * 20, [3, 3], [2, 3], *[[1, 1]] * 12]):
        reserved, grown = step(setup, caches, counts, seed)
        assert torch.equal(reserved, grown)
    assert max(caches[0].lengths) > 40


def test_the_definition():
    setup = Setup("saw-int4:block=7", 4)
    cache = make_cache(setup, 2)
    cache.reserve(40)
    for seed, counts in enumerate(([12, 5], *[[1, 1]] * 6)):
        step(setup, [cache], counts, seed)
    k, v, *queries = torch.randn(2 + setup.ratio, 2, setup.kv_heads, setup.dims).unbind()
    q = torch.cat(queries, dim=1)
    cache.extend([1, 1])
    out = cache.attend(0, *(x.unsqueeze(1) for x in (q, k, v)), setup.logits).squeeze(1)
    new = tuple(
        codec.transform.forward(x).to(setup.raw_dtype) for codec, x in zip(cache.codecs[0], (k, v), strict=True)
    )
    torch.testing.assert_close(out, naive.attend(cache.pages(0), q, new, setup.logits), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [[1], [2, 0], [0, 1, 2, 2]])
def test_another_number_of_sequences_describes_itself_anew(rows: list[int]):
    """One row must not be spread over the place of three."""
    setup = Setup("saw-int4:block=7", 4)
    caches = [make_cache(setup, 3) for _ in range(2)]
    caches[0].reserve(60)
    for counts in ([9, 1, 20], [1, 1, 1], [1, 1, 1]):
        step(setup, caches, counts, seed=len(counts))
    for cache in caches:
        assert cache.step.lengths.tolist() == cache.lengths
        cache.select(rows)
    for seed in range(9):
        reserved, grown = step(setup, caches, [1] * len(rows), seed)
        assert torch.equal(reserved, grown)
        assert caches[0].step.lengths.tolist() == caches[1].lengths


@pytest.mark.parametrize("recipe", ["saw-int4", "int2:block=5", "bf16"])
def test_kernels_read_the_same(monkeypatch: pytest.MonkeyPatch, recipe: str):
    """In Triton's interpreter: a wider table splits the work in another way, and that is all."""
    setup = Setup(recipe, 4, kv_heads=1, ratio=2, dtype=torch.bfloat16)
    use_kernels(monkeypatch)
    caches = [make_cache(setup, 2) for _ in range(2)]
    caches[0].reserve(40)
    for seed, counts in enumerate(([6, 2], *[[1, 1]] * 3)):
        reserved, grown = step(setup, caches, counts, seed)
        torch.testing.assert_close(reserved, grown, rtol=2**-8, atol=2**-8)
        if seed == 1:
            before = places(caches[0])
    assert places(caches[0]) == before
