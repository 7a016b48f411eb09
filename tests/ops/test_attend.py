"""The Triton kernel of `attend` against its definition, on pages that the definition of `store` wrote.

Without a GPU the kernel runs in Triton's interpreter (see tests/conftest.py).
"""

import functools
import math
import resource
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from even_codecs import even_codecs
from random_layers import fitted
from recorded_graphs import use_kernels
from torch import Tensor

from kvfold.bench.scattered_cache import TOKENS, ScatteredCache
from kvfold.fitted import Fitted
from kvfold.format.codec import Codec
from kvfold.format.layout import (
    PageLayout,
    Segment,
    SlotLayout,
    affine_slot,
    channel_slot,
    codebook_slot,
    even_slot,
    mixed_slot,
    raw_slot,
)
from kvfold.format.open_block import DRAFTED, raw_from
from kvfold.geometry import Geometry
from kvfold.ops import naive
from kvfold.ops.attend import attend_gpu as kernels
from kvfold.ops.attend import open_block_kernel
from kvfold.ops.attend.parts import MAX_SPLITS, QueryTiles, merge
from kvfold.ops.naive import store
from kvfold.ops.pages import HostLengths, LayerPages, Logits, Step
from kvfold.ops.tiles import attended_sides
from kvfold.recipes import parse
from kvfold.transforms import Transform

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYER = 0
LOG2_E = math.log2(math.e)
FLOAT32 = 2**-21  # a few roundings, relative to the largest number that goes into a sum


pytestmark = pytest.mark.usefixtures("_poisoned_memory")


@functools.cache
def codecs(
    recipes: str, dims: int | tuple[int, int], kv_heads: int, raw_dtype: torch.dtype = torch.bfloat16
) -> tuple[Codec, Codec]:
    """Of one recipe, or keys as in the first of two and values as in the second: "int8 / bf16". The same of dims."""
    both = []
    for side, text in enumerate((recipes.split(" / ") * 2)[:2]):
        d = dims if isinstance(dims, int) else dims[side]
        layer = Fitted(parse(text), Geometry.uniform("any", 1, kv_heads, kv_heads, d), {0: fitted(text, d, kv_heads)})
        both.append(layer.layer_codecs(LAYER, raw_dtype)[side].to(DEVICE))
    return both[0], both[1]


class World:
    """One layer of a cache whose pages come in random order, fed with random tokens; every checked step is compared
    with the definition."""

    def __init__(
        self,
        codecs: tuple[Codec, Codec],
        sequences: int = 1,
        *,
        kv_heads: int = 2,
        ratio: int = 2,
        page_size: int = 16,
        block: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        pages: int = 160,
        sinks: bool = False,
        cap: float | None = None,
    ) -> None:
        self.codecs, self.dims = codecs, codecs[0].layout.dims
        self.kv_heads, self.q_heads = kv_heads, kv_heads * ratio
        self.dtype = dtype
        learned = 3 * torch.randn(self.q_heads, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        self.logits = Logits(self.dims**-0.5, cap, learned if sinks else None)
        self.generator = torch.Generator().manual_seed(seed)
        self.cache = ScatteredCache(
            [codecs], kv_heads, sequences,
            pages=pages, block=block, page_size=page_size, raw_dtype=codecs[0].raw_dtype, device=DEVICE,
        )  # fmt: skip

    def randn(self, *shape: int) -> Tensor:
        """Not around zero, as keys and values are not."""
        return (torch.randn(*shape, generator=self.generator) + 0.3).to(DEVICE, self.dtype)

    def fill(self, *counts: int) -> tuple[LayerPages, tuple[Tensor, Tensor] | None]:
        """Store new tokens."""
        self.cache.extend(counts)
        pages = self.cache.pages(LAYER)
        return pages, store(pages, *(self.randn(sum(counts), self.kv_heads, side.layout.dims) for side in self.codecs))

    def queries(self) -> Tensor:
        """Of the tokens that were stored last."""
        return self.randn(len(self.cache.step.locations), self.q_heads, self.dims)

    def step(self, *counts: int) -> None:
        """Store new tokens, and check what their queries get."""
        pages, new = self.fill(*counts)
        check(pages, self.queries(), new, self.logits)


def check(pages: LayerPages, q: Tensor, new: tuple[Tensor, Tensor] | None, logits: Logits) -> None:
    out = kernels.attend(pages, q, new, logits)
    assert out.dtype == torch.float32
    assert out.shape == (*q.shape[:2], pages.value.layout.dims)
    assert out.isfinite().all()
    compare(out, pages, q, new, logits)


def compare(
    out: Tensor,
    pages: LayerPages,
    q: Tensor,
    new: tuple[Tensor, Tensor] | None,
    logits: Logits,
    rounding: float = 0.0,
    coarser: float = 1.0,
) -> None:
    """Outputs are as near to the definition as 16-bit arithmetic allows: in every sequence the largest error is at most
    twice that of `fp16_error`, in transformed coordinates, which are what the kernel computes; and what their own
    `rounding`, relative to the largest, adds. `coarser`: how much coarser than float16 the arithmetic is."""
    rotation = Transform(rotation=pages.value.transform.rotation)
    rounded = rounding * rotation.forward(out).abs().max().item()
    errors = rotation.forward(out - naive.attend(pages, q, new, logits)).abs().amax(dim=(1, 2))
    host = pages.step.known
    each = zip(*host, q.split(host.counts), errors.split(host.counts), strict=True)
    for row, (start, length, queries, off) in enumerate(each):
        allowed = [
            fp16_error(
                scaled(pages, query, logits),
                *naive.read(pages, row, position, new),
                seen(pages, query, logits, position),
            )
            for query, position in zip(queries, range(start, length), strict=True)
        ]
        if allowed:
            worst, most = off.max().item(), 2 * coarser * max(allowed) + rounded
            assert worst <= most, f"sequence {row}: off by {worst:.2e}, where {most:.2e} are allowed"


def scaled(pages: LayerPages, q: Tensor, logits: Logits) -> Tensor:
    """Queries [q_heads, d] -> [kv_heads, ratio, d], whose products with transformed keys are logits to base 2."""
    return (pages.key.transform.dual(q) * (logits.scale * LOG2_E)).unflatten(0, (pages.pool.shape[1], -1))


@dataclass
class Seen:
    """What a query sees besides keys and values: [kv_heads, ratio, 1], to base 2."""

    of_mean: Tensor | float = 0.0  # its product with the mean key
    cap: float | None = None
    sinks: Tensor | None = None
    zero: Tensor | None = None  # [kv_heads, 1, d], transformed
    first: Tensor | None = None  # [kv_heads, d], transformed: the first token is packed as its difference from it


def seen(pages: LayerPages, q: Tensor, logits: Logits, position: int) -> Seen:
    """By queries [q_heads, d] at a position."""
    heads, key, value = pages.pool.shape[1], pages.key.transform, pages.value.transform
    found = Seen(cap=None if logits.cap is None else LOG2_E * logits.cap)
    if key.mean is not None:
        grouped = q.double().unflatten(0, (heads, -1))
        found.of_mean = LOG2_E * logits.scale * grouped @ key.mean.double().unsqueeze(-1)
    if raw_from(position, pages.block) > 0:
        found.first = pages.key.first
    if logits.sinks is not None:
        found.sinks = LOG2_E * logits.sinks.double().view(heads, -1, 1)
        found.zero = value.forward(torch.zeros(heads, pages.value.layout.dims, device=DEVICE)).double().unsqueeze(1)
    return found


def attention(
    query: Tensor, k: Tensor, v: Tensor, narrow: Callable[[Tensor], Tensor] = Tensor.double, seen: Seen | None = None
) -> Tensor:
    """Of queries [kv_heads, ratio, d] over k, v [tokens, kv_heads, d], in float64 but for what `narrow` does."""
    seen = seen or Seen()
    near = torch.zeros_like(k)
    if seen.first is not None:
        near[0] = seen.first
    logits = torch.einsum("hgd,jhd->hgj", narrow(query), narrow(k - near)) + seen.of_mean
    logits += torch.einsum("hgd,jhd->hgj", query.double(), near.double())
    if seen.cap is not None:
        logits = seen.cap * torch.tanh(logits / seen.cap)
    highest = logits.amax(dim=-1, keepdim=True)
    weights = torch.exp2(logits - highest)
    mixed, total = torch.einsum("hgj,jhd->hgd", narrow(weights), narrow(v)), weights.sum(dim=-1, keepdim=True)
    if seen.sinks is not None:
        learned = torch.exp2(seen.sinks - highest)
        mixed, total = mixed + learned * seen.zero, total + learned
    return mixed / total


def fp16_error(query: Tensor, k: Tensor, v: Tensor, seen: Seen | None = None) -> float:
    """How far attention is off if all that tensor cores take is rounded to fp16: queries times scale, keys, weights and
    values, each by up to 2^-11 of it. All else is exact but for float32 sums, which come on top.

    The kernel rounds the same numbers, apart from keys with metadata of their own, of which it rounds the levels of
    codebooks, centroids and nothing else.
    """
    error = (attention(query, k, v, lambda x: x.half().double(), seen) - attention(query, k, v, seen=seen)).abs().max()
    terms = query.abs().sum(dim=-1).max() * k.abs().max()  # of a logit
    return (error + FLOAT32 * (2 + terms) * v.abs().max()).item()


# --- what is stored


@pytest.mark.parametrize(
    "recipes",
    [
        "int8",
        "int4",
        "int2",
        "int8:group=8",
        "int4:group=16",
        "int2:group=32",
        "saw-int4",
        "saw-int4:order=8",
        "saw-int4:values=true,order=16",
        "quarot-int2",
        "hessian-int4",
        "oscar-int2",  # with a dense rotation and a clip
        "oscar-int2:per_head=true,group=16",
        "bf16",
        "int4:skip=0",
        *(f"tq-k{bits}v{9 - bits}" for bits in range(1, 9)),
        "gtq-k3v3",
        "fold3",
        "gtq-k4v2:widths=all",
        "int8 / bf16",
        "bf16 / int2:group=16",
        "tq-k3v3 / saw-int4",
        "int2 / gtq-k2v2",
        "kivi-2",
        "kivi-4",
        "kitty-2",
        "kmeans-int4:centroids=8",
        "kmeans-saw-int4:centroids=8",
        "gtq-k3v3:per_head=true",
        "kivi-2 / kitty-2",
        "kitty-2 / kmeans-int4:centroids=8",
        "kmeans-int4:centroids=5 / kmeans-int4:centroids=9",
        "gtq-k3v3:per_head=true / kmeans-int4:centroids=8",
    ],
)
def test_recipes(recipes):
    world = World(codecs(recipes, 64, 2), 2, block=8)
    world.fill(39, 0)
    world.step(2, 1)


INT8_OF_64 = affine_slot(64, 8, 32)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (affine_slot(64, 1), affine_slot(64, 3, 32)),
        (affine_slot(64, 5), affine_slot(64, 7)),
        (affine_slot(64, 6, 8), affine_slot(64, 8, 16)),
        (codebook_slot([(20, 3), (4, 8), (40, 1)]), codebook_slot([(8, 7), (56, 2)])),  # 20 and 4: padded codes
        (SlotLayout((Segment(0, 16, 4), Segment(16, 40, 6, "codebook"), Segment(40, 64, 16, "raw"))), raw_slot(64)),
        (raw_slot(64), SlotLayout((Segment(0, 24, 16, "raw"), Segment(24, 64, 2)))),
        (channel_slot(64, 3), channel_slot(64, 1)),
        (channel_slot(64, 3, boosted=24), channel_slot(64, 4, boosted=64)),
        (affine_slot(64, 8), channel_slot(64, 1, boosted=8)),
        (even_slot([(32, 4), (16, 8), (8, 1), (8, 2)]), even_slot([(32, 1), (32, 8)])),
        (even_slot([(64, 2)]), affine_slot(64, 3)),
        (mixed_slot([affine_slot(64, 4), codebook_slot([(44, 3), (20, 8)])]), mixed_slot([raw_slot(64), INT8_OF_64])),
    ],
    ids=lambda slot: "+".join(f"{segment.dims}x{segment.bits}{segment.rule[0]}" for segment in slot.segments),
)
def test_layouts(key, value):
    world = World((Codec(key), Codec(value)), 2, block=8)
    world.fill(39, 0)
    world.step(2, 1)


@pytest.mark.parametrize(
    ("key", "value", "page_size"),
    [
        ([(32, 4), (64, 2), (32, 1)], [(128, 2)], 16),
        ([(32, 4), (16, 2), (16, 1)], [(32, 4), (32, 2)], 5),
        ([(32, 8), (32, 4), (64, 2)], [(128, 4)], 64),
    ],
)
def test_evenly_spaced_levels(key, value, page_size):
    key, value = (codec.to(DEVICE) for codec in even_codecs(key, value))
    world = World((key, value), 2, block=8, page_size=page_size)
    world.fill(39, 0)
    world.step(2, 1)


@pytest.mark.parametrize("raw_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipes", ["bf16", "int4 / bf16"])
def test_types_of_sixteen_bits(recipes, raw_dtype):
    world = World(codecs(recipes, 64, 2, raw_dtype), 2, block=8)
    world.fill(21, 3)
    world.step(1, 1)


@pytest.mark.parametrize(
    ("recipes", "dims", "ratio", "n"),
    [
        ("int4", 64, 1, 1),
        ("int4", 80, 2, 3),
        ("tq-k3v3", 80, 7, 1),
        ("int2:group=24", 96, 3, 2),
        ("fold2", 96, 5, 2),
        ("gtq-k3v4", 96, 16, 1),
        ("saw-int4", 128, 4, 1),
        ("gtq-k3v3", 128, 8, 2),
        ("bf16", 128, 16, 5),
        ("saw-int4", 256, 7, 1),
        ("tq-k4v2", 256, 2, 2),
        ("int4", 64, 132, 1),  # more query heads than a block has rows
        ("int4", 32, 3, 40),  # queries of more than one block
        ("int4", 16, 2, 1),
        ("kivi-2", 80, 6, 1),
        ("kitty-2", 128, 3, 9),
        ("kitty-2:boost=0.5", 256, 2, 1),
        ("kmeans-int4:centroids=8", 80, 6, 2),
        ("kmeans-saw-int4:centroids=8", 256, 2, 1),
        ("saw-int4", 192, 4, 2),
        ("gtq-k3v3", 192, 2, 1),
        ("oscar-int2", (192, 128), 4, 1),
        ("int8 / tq-k3v3", (32, 80), 3, 40),
        ("kivi-2", (96, 64), 2, 3),
        ("kmeans-int4:centroids=8", (64, 96), 1, 1),
        ("bf16", (192, 128), 1, 2),
    ],
)
def test_shapes_of_heads(recipes, dims, ratio, n):
    world = World(codecs(recipes, dims, 1), 2, kv_heads=1, ratio=ratio, block=4)
    world.fill(35, 2)
    world.step(n, 1)


@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_numbers_of_kv_heads(kv_heads):
    world = World(codecs("saw-int4", 32, kv_heads), kv_heads=kv_heads, block=4)
    world.fill(20)
    world.step(1)


@pytest.mark.parametrize("page_size", [1, 3, 16, 24, 32, 64, 128])
@pytest.mark.parametrize("block", [0, 24])
def test_page_sizes(page_size, block):
    world = World(codecs("int4", 64, 1), 2, kv_heads=1, page_size=page_size, block=block)
    world.fill(0, 67 + page_size)
    world.step(1, 1)


@pytest.mark.pairs
@pytest.mark.parametrize("page_size", [16, 48, 64])
@pytest.mark.parametrize("block", [0, 32, 96])
@pytest.mark.parametrize("recipes", ["kivi-2", "kitty-2"])
def test_page_sizes_where_pages_are_quantized(recipes, page_size, block):
    """Pages that are full, that a step fills, and that no step has filled yet. Open blocks of one page or several."""
    world = World(codecs(recipes, 32, 1), 2, kv_heads=1, page_size=page_size, block=block)
    world.fill(2 * page_size - 1, page_size + 7)
    world.step(1, 1)
    world.step(3, page_size)


# --- what queries come as


@pytest.mark.pairs
@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("recipes", ["int4", "tq-k4v4"])  # whose queries are those of the engine, or turned ones
def test_queries_in_any_type_and_order(recipes, dtype, sequences):
    world = World(codecs(recipes, 32, 1), sequences, kv_heads=1, ratio=3, block=4, dtype=dtype)
    world.fill(*(20, 7)[:sequences])
    pages, new = world.fill(*(2, 1)[:sequences])
    tokens, heads = len(pages.step.locations), world.q_heads
    by_head = world.randn(heads, tokens, 32).transpose(0, 1)
    among_others = world.randn(tokens, heads + 4, 32)[:, 1 : heads + 1]
    expanded = world.randn(1, heads, 32).expand(tokens, heads, 32)
    for q in (by_head, among_others, expanded):
        assert not q.is_contiguous()
        check(pages, q, new, world.logits)


@pytest.mark.parametrize("recipes", ["int4", "saw-int4:values=true"])
def test_a_cache_takes_batches_that_are_padded_on_the_left(recipes, monkeypatch):
    """What is in the padding is not read, and outputs there are zero."""
    use_kernels(monkeypatch)
    world = World(codecs(recipes, 32, 1), 3, kv_heads=1, block=4)
    for counts in ((11, 3, 0), (2, 9, 1), (0, 1, 4), (2, 2, 2)):
        world.cache.extend(counts)
        pages, tokens = world.cache.pages(LAYER), sum(counts)
        q, k, v = (world.randn(tokens, heads, 32) for heads in (world.q_heads, 1, 1))
        padding = torch.arange(max(counts), device=DEVICE) < max(counts) - torch.tensor([counts], device=DEVICE).T
        batch = []
        for x in (q, k, v):
            padded = torch.full((*padding.shape, *x.shape[1:]), torch.nan, dtype=x.dtype, device=DEVICE)
            padded[~padding] = x
            batch.append(padded)
        out = world.cache.attend(LAYER, *batch, world.logits)
        assert (out[padding] == 0).all()
        compare(out[~padding], pages, q, store(pages, k, v), world.logits)


def test_sequences_without_queries():
    """As engines may describe them, with room for more queries than any has."""
    world = World(codecs("saw-int4", 32, 2), 4, block=6)
    world.fill(30, 3, 9, 1)
    starts, counts = list(world.cache.lengths), (1, 0, 21, 4)
    world.cache.extend(counts)
    pages = world.cache.pages(LAYER)
    table = torch.zeros(4, 2, dtype=torch.int64)
    for row, held in zip(table, world.cache.tables.pages, strict=True):
        row[: len(held)] = torch.tensor(held)
    step = Step.of(HostLengths(starts, world.cache.lengths), table, world.cache.ring_table, pages.step.page_size)
    assert torch.equal(step.locations, pages.step.locations)
    pages = pages.during(replace(step, max_queries=40))
    new = store(pages, *world.randn(2, sum(counts), 2, 32))
    check(pages, world.queries(), new, world.logits)


def test_a_step_without_tokens():
    world = World(codecs("int4", 32, 2), 2)
    world.fill(3, 4)
    world.cache.extend([0, 0])
    pages = world.cache.pages(LAYER)
    assert kernels.attend(pages, world.queries(), None, world.logits).shape == (0, world.q_heads, 32)


# --- histories


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("steps", "block"),
    [
        ([(1,)] * 4, 0),  # decoding from the first token on
        ([(1, 1)] * 4, 2),
        ([(61, 2), (2, 2), (3, 3), (4, 4), (5, 5), (16, 16)], 8),  # verification
        ([(7,), (33,), (47,), (1,)], 0),  # chunked prefill
        ([(7,), (33,), (47,), (1,)], 8),
        ([(0, 40), (13, 0), (0, 1), (27, 2)], 8),  # chunks beside sequences that decode, or have nothing
    ],
    ids=str,
)
@pytest.mark.parametrize(("recipes", "page_size"), [("int4", 8), ("kitty-2", 16)])
def test_histories(recipes, page_size, steps, block):
    world = World(codecs(recipes, 16, 1), len(steps[0]), kv_heads=1, page_size=page_size, block=block)
    for counts in steps:
        world.step(*counts)


@pytest.mark.parametrize("block", [1, 2, 5, 16, 63, 64, 65, 100, 127, 128, 129, 200])
def test_blocks(block):
    """Of tokens in a tile, up to its borders, over several, and more than there are. Each step crosses a border of
    some."""
    world = World(codecs("int4", 16, 1), kv_heads=1, block=block)
    world.fill(127)
    world.step(1)
    world.step(3)
    world.step(17)


@pytest.mark.each_value
@pytest.mark.parametrize(("before", "counts"), [((0, 0), (100, 64)), ((5, 90), (100, 64)), ((200, 1), (3, 65))])
@pytest.mark.parametrize("block", [7, 50, 128])
def test_blocks_of_long_steps(before, counts, block):
    """In tiles of the step's own tokens, of older ones and of both."""
    world = World(codecs("int4", 16, 1), 2, kv_heads=1, block=block)
    if any(before):
        world.fill(*before)
    world.step(*counts)


def test_layers_in_sixteen_bits_have_no_open_block():
    world = World(codecs("bf16", 32, 2), 2, block=8)
    world.fill(20, 3)
    pages, new = world.fill(2, 2)
    assert new is None
    assert not len(pages.ring)
    check(pages, world.queries(), new, world.logits)


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("block", [0, 200])
def test_splits(splits, block, monkeypatch):
    """Fewer than tiles, as many, and more, of which some are left without any."""
    monkeypatch.setattr(QueryTiles, "splits", lambda *_: splits)
    world = World(codecs("int4", 16, 1), kv_heads=1, block=block)
    world.fill(330)
    world.step(2)


@pytest.mark.parametrize("splits", [1, 2, 5, 128])
def test_merged_parts(splits):
    """Some of them without any token, which may be anything; a query that reads nothing gets zeros."""
    generator = torch.Generator().manual_seed(splits)
    parts, weights = torch.randn(splits, 3, 2, 80, generator=generator), torch.randn(splits, 3, 2, generator=generator)
    unseen = torch.rand(weights.shape, generator=generator) < 0.3
    shares = torch.softmax(torch.where(unseen, -torch.inf, 9 * weights).double() * math.log(2), dim=0)
    expected = (shares.nan_to_num().unsqueeze(-1) * parts).sum(dim=0)
    parts[unseen], weights = torch.nan, torch.where(unseen, -1e30, 9 * weights)
    merged = merge(parts.to(DEVICE), weights.to(DEVICE), Transform()).cpu().double()
    torch.testing.assert_close(merged, expected, rtol=0, atol=2**-20)


@pytest.mark.parametrize("sequences", [1, 3, 200])
@pytest.mark.parametrize("length", [1, 100, 5000])
def test_numbers_of_splits(sequences, length):
    world = World(codecs("int4", 16, 1), sequences, kv_heads=1)
    world.cache.extend([length - 1] * sequences)
    world.cache.extend([1] * sequences)
    splits = QueryTiles(world.cache.pages(LAYER), world.randn(sequences, 2, 16)).splits(length, torch.device(DEVICE))
    assert 1 <= splits <= min(-(-length // 16), MAX_SPLITS)
    if DEVICE == "cpu":  # as if there were 4 processors
        assert (splits > 1) == (sequences < 16 and length > 64)


@pytest.mark.parametrize("recipes", ["int4", "saw-int4:values=true", "oscar-int2:per_head=true", "int8:centre=false"])
@pytest.mark.parametrize("block", [0, 8])
def test_learned_sinks(recipes, block):
    """Where a query reads one token, one part, and several."""
    world = World(codecs(recipes, 32, 2), 2, ratio=3, sinks=True, block=block)
    world.fill(0, 70)
    world.step(1, 1)
    world.step(3, 0)


@pytest.mark.parametrize("cap", [0.7, 30.0])
@pytest.mark.parametrize(
    ("recipes", "options"),
    [
        ("int4", {}),
        ("saw-int4:values=true", {"block": 8}),
        ("int8:centre=false", {"block": 70, "sinks": True}),
        ("oscar-int2:per_head=true", {"block": 8, "sinks": True}),
    ],
)
def test_capped_logits(recipes, options, cap):
    """By much and by little; with learned sinks, which are not."""
    world = World(codecs(recipes, 32, 2), 2, cap=cap, **options)
    world.fill(70, 0)
    world.step(2, 1)


def test_capped_logits_of_any_size():
    """Where tanh is ±1, at up to 10⁴ times the cap."""
    world = World(codecs("int8:centre=false", 64, 1), kv_heads=1, ratio=1, dtype=torch.float32, cap=1.0)
    world.cache.extend([40])
    pages = world.cache.pages(LAYER)
    k, v = 40 * world.randn(40, 1, 64).sign(), world.randn(40, 1, 64)
    new = store(pages, k, v)
    for q in (k, -k, 100 * k):
        compare(kernels.attend(pages, q, new, world.logits), pages, q, new, world.logits)


@pytest.mark.parametrize("block", [1, 40, 128])
def test_the_open_block_alone(block):
    """For kernels that read the packed tokens themselves."""
    world = World(codecs("int4", 32, 2), 2, block=block)
    world.fill(100, 1)
    pages, new = world.fill(1, 1)
    q = world.queries()
    rotated = pages.key.transform.dual(q)
    parts, weights = torch.empty(2, *rotated.shape, device=DEVICE), torch.empty(2, *rotated.shape[:2], device=DEVICE)
    open_block_kernel.attend(pages, rotated, new, world.logits, parts, weights)
    out = merge(parts, weights, Transform())
    for row, length in enumerate(pages.step.known.lengths):
        k, v = (x[raw_from(length - 1, block) :] for x in naive.read(pages, row, length - 1, new))
        query = scaled(pages, q[row], world.logits)
        error = out[row].unflatten(0, (2, -1)) - attention(query, k, v)
        assert error.abs().max().item() <= 2 * fp16_error(query, k, v)
        total = torch.exp2(weights[:, row].double()).sum(dim=0).log2()
        exact = torch.exp2(torch.einsum("hgd,jhd->hgj", query.double(), k.double())).sum(dim=-1).log2().flatten()
        rounding = 2**-11 * torch.einsum("hgd,jhd->hgj", query.abs(), k.abs()).max().item()
        torch.testing.assert_close(total, exact, rtol=0, atol=rounding + 1e-5)


# --- what must not be read


@pytest.mark.each_value
@pytest.mark.parametrize("block", [0, 1, 6, 16, 70])
@pytest.mark.parametrize(
    ("recipes", "counts"),
    [
        ("int4", (1, 1)),
        ("int4", (0, 9)),
        ("int4", (9, 2)),
        ("tq-k3v3 / bf16", (2, 5)),
        ("int4", (70, 2)),
        ("kitty-2", (1, 1)),
        ("kitty-2", (9, 22)),
        ("kmeans-int4:centroids=8", (9, 2)),
    ],
)
def test_what_no_query_reads_may_be_anything(recipes, counts, block):
    """NaN in every slot and every place of a ring that no query of the step reads, by the definition of open blocks. If
    a sequence has many new tokens, no query reads rings."""
    world = World(codecs(recipes, 16, 1), 2, kv_heads=1, block=block)
    world.fill(20, 63)
    pages, new = world.fill(*counts)
    step, read_raw = pages.step, set()
    for row, (start, length) in enumerate(zip(*step.known, strict=True)):
        for token in range(length):
            page, offset = step.table[row, token // step.page_size], token % step.page_size
            readers = range(max(start, token), length)  # positions
            if not any(token < raw_from(position, pages.block) for position in readers):
                for _, (codes,), (meta,) in pages.views:
                    codes[page, offset] = 0xFF
                    if len(meta[page]) > 1 or offset == 0:
                        meta[page, offset] = torch.nan
            if any(token >= raw_from(position, pages.block) for position in readers) and max(counts) <= DRAFTED:
                read_raw.add(int(step.in_rings(torch.tensor(row), torch.tensor(token), TOKENS)))
    for place in set(range(len(pages.ring) * TOKENS)) - read_raw:
        for side in pages.ring_sides:
            side[place // TOKENS, :, place % TOKENS] = torch.nan
    q = world.queries()
    compare(kernels.attend(pages, q, new, world.logits), pages, q, new, world.logits)


@pytest.mark.usefixtures("_untouched_memory")
def test_addresses_past_two_to_the_31():
    """Pages and rings at both ends of memory for more than 2^31 numbers of 16 bits, of which only these are used."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    world = World(codecs("saw-int4", 128, 2), 2, block=40, page_size=64)
    cache = world.cache
    pages = 2**32 // (2 * cache.layouts[LAYER].page_bytes) + 9
    numbers = cache.rings[LAYER].shape[2]
    blocks = 2**31 // (2 * numbers) + 9
    cache.tables.references, cache.tables.free = [0] * pages, [0, *range(pages - 3, pages), 1]  # taken from the end
    cache.rings[LAYER] = cache.rings[LAYER].new_empty(blocks, 2, numbers)
    cache.ring_table = torch.tensor([[0, *range(blocks - 3, blocks)], [1, 2, 3, blocks // 2]], device=DEVICE)
    world.fill(70, 90)
    world.step(1, 3)
    used = [page for pages_ in cache.tables.pages for page in pages_]
    assert min(used) < 2
    assert max(used) * cache.pools[LAYER].stride(0) > 2**32
    assert int(cache.step.rings.max()) * cache.rings[LAYER].stride(0) > 2**31
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident
    assert DEVICE == "cuda" or grown < 256 * 1024, f"{grown} KiB of memory were touched"


# --- numbers


@pytest.mark.parametrize("block", [0, 9])
@pytest.mark.parametrize("recipes", ["int8:centre=false", "int2:centre=false", "tq-k4v4:centre=false", "bf16"])
def test_large_logits(recipes, block):
    """Of up to ±12 800: a query like one key gets the value of that key alone, and its opposite something finite."""
    dims, tokens = 64, 24
    world = World(codecs(recipes, dims, 1), kv_heads=1, ratio=1, dtype=torch.float32, block=block)
    world.cache.extend([tokens])
    pages = world.cache.pages(LAYER)
    k = 40 * world.randn(tokens, 1, dims).sign()
    v = world.randn(tokens, 1, dims)
    new = store(pages, k, v)
    stored = torch.stack([naive.read(pages, 0, t, new)[1][t] for t in range(tokens)])  # as its own query reads it
    own = pages.value.transform.inverse(stored)
    out = kernels.attend(pages, k, new, world.logits)
    torch.testing.assert_close(out, own, rtol=0, atol=2**-10 * stored.norm(dim=-1).max().item())
    assert kernels.attend(pages, -k, new, world.logits).isfinite().all()


def test_equal_logits_far_below_zero():
    """Every weight would be zero if it were not taken relative to the highest."""
    world = World(codecs("int8:centre=false", 64, 1), kv_heads=1, ratio=1, dtype=torch.float32)
    world.cache.extend([70])
    pages = world.cache.pages(LAYER)
    k, v = torch.full((70, 1, 64), 40.0, device=DEVICE), world.randn(70, 1, 64)
    out = kernels.attend(pages, -k, store(pages, k, v), world.logits)
    means = naive.read(pages, 0, 69, None)[1].cumsum(0) / torch.arange(1, 71, device=DEVICE)[:, None, None]
    torch.testing.assert_close(out, means.expand_as(out), rtol=0, atol=2**-10 * v.abs().max().item())


@pytest.mark.parametrize("block", [0, 1, 64])
@pytest.mark.parametrize("recipes", ["int8", "int4 / bf16", "int4 / tq-k3v3", "oscar-int2"])
def test_a_query_that_sees_one_token_gets_its_value(recipes, block):
    world = World(codecs(recipes, 32, 1), 2, kv_heads=1, block=block)
    world.cache.extend([1, 1])
    pages = world.cache.pages(LAYER)
    k, v = world.randn(2, 2, 1, 32)
    new = store(pages, k, v)
    out = kernels.attend(pages, 50 * world.queries(), new, world.logits)
    value = pages.value
    expected = value.transform.inverse(new[1].float()) if new is not None else value.decode(value.encode(v))
    bound = 2**-11 * value.transform.forward(v).norm(dim=-1).max().item() + 1e-5
    torch.testing.assert_close(out, expected.repeat_interleave(2, dim=1), rtol=0, atol=bound)


@pytest.mark.pairs
@pytest.mark.parametrize("recipe", ["int4", "saw-int4:values=true"])
@pytest.mark.parametrize("block", [0, 6])
@pytest.mark.parametrize("count", [1, 9])
def test_outputs_go_where_they_are_wanted(recipe, block, count):
    """In the type of that tensor, which may be a part of another one."""
    world = World(codecs(recipe, 32, 2), 2, block=block)
    world.fill(200, 30)
    pages, new = world.fill(count, count)
    q = world.queries()
    expected = kernels.attend(pages, q, new, world.logits)
    around = torch.full((len(q) + 2, *q.shape[1:]), torch.nan, dtype=torch.float16, device=DEVICE)
    assert kernels.attend(pages, q, new, world.logits, around[1:-1]).data_ptr() == around[1:-1].data_ptr()
    torch.testing.assert_close(around[1:-1].float(), expected, rtol=2**-9, atol=2**-14)
    assert around[[0, -1]].isnan().all()


# --- what there is no kernel for


@pytest.mark.parametrize(
    ("slot", "reason"),
    [
        (channel_slot(32, 2, boosted=4), "4 boosted coordinates are no multiple of 8"),
        (mixed_slot([affine_slot(32, 4), affine_slot(32, 4, 4)]), "4 coordinates of a segment are no multiple of 8"),
        (
            mixed_slot([SlotLayout((Segment(0, 8, 16, "raw"), Segment(8, 32, 4))), codebook_slot([(24, 8), (8, 7)])]),
            "16 bits lie at odd bytes",
        ),
        (affine_slot(32, 4, 4), "4 coordinates of a segment are no multiple of 8"),
        (SlotLayout((Segment(0, 20, 16, "raw"), Segment(20, 32, 4))), "20 coordinates of a segment"),
        (SlotLayout((Segment(0, 8, 1), Segment(8, 32, 16, "raw"))), "16 bits lie at odd bytes"),
    ],
    ids=["boosted", "heads", "odd_heads", "group", "raw", "odd"],
)
@pytest.mark.parametrize("side", ["key", "value"])
def test_other_layouts_are_refused_by_name(slot, reason, side):
    both = (slot, affine_slot(32, 8)) if side == "key" else (affine_slot(32, 8), slot)
    world = World((Codec(both[0]), Codec(both[1])))
    world.cache.extend([40])
    with pytest.raises(ValueError, match=reason) as error:
        kernels.attend(world.cache.pages(LAYER), world.queries(), None, world.logits)
    assert str(slot) in str(error.value)


@pytest.mark.parametrize("page_size", [8, 24])
def test_pages_that_are_quantized_are_refused_by_size(page_size):
    world = World(codecs("kivi-2", 64, 2), page_size=page_size)
    world.cache.extend([40])
    with pytest.raises(ValueError, match=f"keys: {page_size} tokens of a page .* are no multiple of 16"):
        kernels.attend(world.cache.pages(LAYER), world.queries(), None, world.logits)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dims", [8, 16, 24, 64])
def test_products_are_wide_enough_to_be_compiled_well(bits, dims):
    """Triton 3.6 compiles products of fewer than 32 columns wrongly where several of these come out of one byte, which
    only a GPU shows."""
    (side, _), *_ = attended_sides(PageLayout(affine_slot(dims, bits), affine_slot(dims, bits), 16))
    columns = side.parts[0] * side.width[0]
    assert columns >= (32 if side.parts[0] > 1 else 16)
    assert columns & (columns - 1) == 0
