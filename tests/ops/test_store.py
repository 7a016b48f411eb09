"""The Triton kernel of `store` against its definition, and against float64.

On a machine without a GPU it runs in Triton's interpreter, with TRITON_INTERPRET=1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import pytest
import torch
from clipping import clipped, limit
from even_codecs import even_codecs
from even_steps import chosen
from page_views import key_views, value_views
from random_layers import fitted
from rounded_rotations import as_multiplied, hadamard

from kvfold.bench.scattered_cache import TOKENS, ScatteredCache
from kvfold.fitted import Fitted
from kvfold.format.codec import Codec
from kvfold.format.layout import PageLayout, affine_slot, codebook_slot, even_slot
from kvfold.format.packing import unpack
from kvfold.geometry import Geometry
from kvfold.paged import PagedCache
from kvfold.quantizers import even, lloyd_max
from kvfold.recipes import parse
from kvfold.transforms import Hadamard, Matrix, Transform, hadamard_matrix

knobs = pytest.importorskip("triton").knobs
if not torch.cuda.is_available() and not knobs.runtime.interpret:
    pytest.skip("the kernel takes a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from kvfold.ops import naive  # noqa: E402
from kvfold.ops.cards import HOPPER, card_of  # noqa: E402
from kvfold.ops.store import store_gpu as triton  # noqa: E402

DEVICE = torch.device("cpu" if knobs.runtime.interpret else "cuda")
CARD = card_of(HOPPER)._replace(overlaps=False)
PAGES = 24
ULP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@dataclass(frozen=True)
class Case:
    recipe: str
    dims: int = 64
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 4
    kv_heads: int = 2
    centred: bool = True
    value_dims: int | None = None  # where they differ from those of keys

    @property
    def block(self) -> int:
        return parse(self.recipe).block

    @cached_property
    def codecs(self) -> tuple[Codec, Codec]:
        both = []
        for side, dims in enumerate((self.dims, self.value_dims or self.dims)):
            fit = fitted(self.recipe, dims, self.kv_heads, self.centred)
            geometry = Geometry.uniform("any", 1, self.kv_heads, self.kv_heads, dims)
            both.append(Fitted(parse(self.recipe), geometry, {0: fit}).layer_codecs(0, self.dtype)[side])
        return both[0], both[1]

    def __str__(self) -> str:
        values = f"v{self.value_dims}" if self.value_dims else ""
        return f"{self.recipe}-d{self.dims}{values}-{str(self.dtype)[6:]}-page{self.page_size}"


@dataclass(frozen=True)
class Plain:
    """Codecs that no recipe has."""

    codecs: tuple[Codec, Codec]
    dtype: torch.dtype = torch.bfloat16
    block: int = 0
    page_size: int = 4
    kv_heads: int = 2

    @property
    def dims(self) -> int:
        return self.codecs[0].layout.dims


def plain(slot, clip=None, mean=None, rotation=None, **options) -> Plain:
    codec = Codec(slot, Transform(mean, rotation), options.get("dtype", torch.bfloat16), clip)
    return Plain((codec, codec), **options)


class Twins:
    """The same cache twice, full of the same garbage: one for the definition, one for the kernel."""

    def __init__(self, case: Case | Plain, sequences: int, seed: int = 0) -> None:
        self.case, self.card, self.generator = case, CARD, torch.Generator().manual_seed(seed)
        self.expected, self.got = (self._cache(sequences, device) for device in (torch.device("cpu"), DEVICE))
        self.pool, self.ring = (
            torch.randint(0, 256, tensor.view(torch.uint8).shape, dtype=torch.uint8, generator=self.generator)
            for tensor in (self.expected.pools[0], self.expected.rings[0])
        )
        for cache in (self.expected, self.got):
            cache.pools[0].copy_(self.pool)
            cache.rings[0].view(torch.uint8).copy_(self.ring)

    def _cache(self, sequences: int, device: torch.device) -> PagedCache:
        case = self.case
        key, value = (codec.to(device) for codec in case.codecs)
        cache = ScatteredCache(
            [(key, value)], case.kv_heads, sequences,
            pages=PAGES, block=case.block, page_size=case.page_size, raw_dtype=case.dtype, device=device,
        )  # fmt: skip
        cache.extend([0] * sequences)
        return cache

    def extend(self, counts: Sequence[int]) -> torch.Tensor | list[torch.Tensor]:
        """Begin a step of random tokens [2, tokens, kv_heads, d] around the means. Keys and values that differ in d are
        two tensors."""
        case, dims = self.case, [codec.layout.dims for codec in self.case.codecs]
        for cache in (self.expected, self.got):
            cache.extend(counts)
        x = torch.randn(2, sum(counts), case.kv_heads, max(dims), generator=self.generator)
        x *= torch.rand(max(dims), generator=self.generator).mul(3).exp()
        sides = [side[..., :d] for side, d in zip(x, dims, strict=True)]
        for side, codec in zip(sides, case.codecs, strict=True):
            if codec.transform.mean is not None:
                side += codec.transform.mean
        return x.to(case.dtype) if dims[0] == dims[1] else [side.to(case.dtype) for side in sides]

    def take_out(self, rows: Sequence[int], x: torch.Tensor) -> torch.Tensor:
        """After the definition stored the step x: let these rows fill up a CUDA graph, so that the kernel is to leave
        their places as they were. Returns what the kernel is given."""
        for row in rows:
            page, offset = (int(place[row]) for place in self.expected.step.places)
            for array, before in zip(
                *(arrays(self.expected, p) for p in (self.expected.pools[0], self.pool)), strict=True
            ):
                array.view(torch.uint8)[page, offset] = before.view(torch.uint8)[page, offset]
            if self.case.block:
                layout, bits = self.expected.layouts[0], torch.int16
                at = int(self.expected.pages(0).fresh.kept[row])
                now, before = (layout.ring_sides(x.view(bits)) for x in (self.expected.rings[0], self.ring))
                for side, old in zip(now, before, strict=True):
                    side[at // TOKENS, :, at % TOKENS] = old[at // TOKENS, :, at % TOKENS]
        self.got.step.locations[rows] = -1
        x = x.clone()
        x[:, rows] = torch.nan
        return x

    def store(self, x: torch.Tensor, view=lambda x: x) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Both ways; `view` makes the kernel's inputs. Returns what both returned, by side."""
        new = naive.store(self.expected.pages(0), *x)
        got = triton.store(self.card, self.got.pages(0), *(view(side.to(DEVICE)) for side in x))
        assert not self.got.faults.any()
        assert (new is None) == (got is None)
        return [] if new is None else [(a, b.cpu()) for a, b in zip(new, got, strict=True)]

    def check(self, new: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Bit for bit, but for the signs of zeros, without a rotation and a clip. With either, up to what float32 sums
        may change."""
        pairs = [*new, (self.expected.rings[0], self.got.rings[0].cpu())]
        pools = self.expected.pools[0], self.got.pools[0].cpu()
        if all(codec.transform.rotation is None and codec.clip is None for codec in self.case.codecs):
            assert torch.equal(*(unsigned_zeros(self.expected.layouts[0], pool) for pool in pools))
            assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)
            return
        check_pools(self.expected, pools[0], self.expected, pools[1], self.pool)
        for a, b in pairs:
            different = a.view(torch.int16) != b.view(torch.int16)
            assert different.sum() <= 0.01 * different.numel()
            a, b = a[different].float(), b[different].float()
            assert ((a - b).abs() <= ULP[self.case.dtype] * a.abs() + 1e-4).all()


def unsigned_zeros(layout: PageLayout, pool: torch.Tensor) -> torch.Tensor:
    """The least of zeros of both signs is either."""
    pool = pool.clone()
    for meta in (meta for views in layout.views(pool, together=False) for meta in views.meta):
        meta.masked_fill_(meta == 0, 0)
    return pool


def arrays(cache: PagedCache, pool: torch.Tensor) -> list[torch.Tensor]:
    """All arrays of a pool: [pages, page_size, kv_heads, 1, …]."""
    return [array for _, *both in cache.layouts[0].views(pool, together=False) for part in both for array in part]


def places(cache: PagedCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Page and offset of every token."""
    size = cache.tables.page_size
    found = [
        (pages[token // size], token % size)
        for pages, length in zip(cache.tables.pages, cache.lengths, strict=True)
        for token in range(length)
    ]
    page, offset = torch.tensor(found).unbind(dim=1)
    return page, offset


def check_pools(
    expected: PagedCache, pool: torch.Tensor, got: PagedCache, got_pool: torch.Tensor, before: torch.Tensor | None
) -> None:
    """Every token has the expected slots, and all other bytes are as they were `before`."""
    layout, touched = expected.layouts[0], torch.zeros_like(pool)
    page, place = places(expected)
    got_at = [index.to(got_pool.device) for index in places(got)]
    both = zip(*(layout.views(p, together=False) for p in (pool, got_pool)), strict=True)
    for slot, (views, got_views) in zip((layout.key, layout.value), both, strict=True):
        check_slots(slot, views.read(page, place), [x.cpu() for x in got_views.read(*got_at)])
    for array in arrays(expected, touched):
        array.view(torch.uint8)[page, place] = 1
    if before is not None:
        assert torch.equal(got_pool[touched == 0], before[touched == 0])


def check_slots(slot, expected, got) -> None:
    """Codes may be a step away where rounding decides, metadata the last bit."""
    for (segment, codes, meta), (_, got_codes, got_meta) in zip(slot.split(*expected), slot.split(*got), strict=True):
        kind = torch.uint8 if slot.even else torch.int16
        ulps = (meta.contiguous().view(kind).int() - got_meta.contiguous().view(kind).int()).abs()
        assert ulps.max() <= 1
        same = (ulps == 0).all(dim=-1)
        assert (~same).sum() <= 1 + 0.01 * same.numel()
        steps = (unpack(codes, segment.bits).int() - unpack(got_codes, segment.bits).int()).abs()
        assert steps.max() <= 1
        assert (steps[same] > 0).sum() <= 1e-3 * steps.numel()


def run(case: Case | Plain, steps=((5, 3), (0, 2)), view=lambda x: x) -> Twins:
    twins = Twins(case, len(steps[0]))
    for counts in steps:
        twins.check(twins.store(twins.extend(counts), view))
    assert not torch.equal(twins.got.pools[0].cpu(), twins.pool)
    return twins


# --- against the definition

UNROTATED = [
    *(Case(f"int{bits}:block=4", dims) for bits, dims in ((8, 64), (4, 80), (2, 96), (4, 128), (2, 256))),
    Case("int4:group=32", 128, torch.float16, page_size=16),
    Case("int2:group=40,block=2", 80, torch.float16, page_size=1),
    Case("int8:block=8", 256, torch.float16, page_size=5),
    Case("int4", 64, centred=False),
    Case("bf16", 80, page_size=3),
    Case("saw-int4:skip=0", 128, torch.float16),
    Case("int4:block=4", 192, value_dims=128),
]
ROTATED = [
    Case("saw-int4:block=4", 64),
    Case("saw-int4:order=16,values=true", 80, torch.float16, page_size=16),
    Case("saw-int4:order=32", 96, page_size=1),
    Case("saw-int4:block=8", 128, torch.float16),
    Case("saw-int4:values=true", 256, page_size=5),
    Case("saw-int4:order=1,group=16", 64),
    Case("quarot-int2:group=32,block=2", 128),
    Case("quarot-int2", 64, torch.float16, centred=False),
    Case("hessian-int4", 64),
    Case("oscar-int2:block=4", 128),
    Case("oscar-int2:per_head=true", 64, torch.float16, page_size=16),
    Case("oscar-int2:group=80,block=0", 80),
    Case("tq-k3v3:block=2", 80),
    Case("tq-k8v7", 128, torch.float16),
    Case("tq-k6v5", 64, page_size=3),
    Case("tq-k4v1", 96, torch.float16),
    Case("tq-k2v2", 256),
    Case("gtq-k3v3", 128),
    Case("gtq-k2v4:block=8", 64, torch.float16),
    Case("gtq-k3v3:block=2", 192),
    Case("fold3:block=8", 96),
    Case("saw-int4:values=true,block=4", 192, value_dims=128),
    Case("tq-k3v4:block=8", 64, torch.float16, value_dims=192),
]


@pytest.mark.parametrize("case", [*UNROTATED, *ROTATED], ids=str)
def test_kernel_agrees_with_the_definition(case):
    run(case)


@pytest.mark.parametrize("recipe", ["int4:block=4", "saw-int4:values=true,block=32", "gtq-k3v3:block=1"])
def test_long_steps_return_the_open_block_first(recipe):
    """They begin in a block and at its end, and overwrite rings while their own queries would read them. A step behind
    them is short."""
    twins = run(Case(recipe, page_size=16), [[5, 8, 0], [20, 90, 18], [1, 3, 16]])
    assert twins.expected.pages(0).fresh.rows is None
    twins.check(new := twins.store(twins.extend([17, 1, 2])))
    fresh = twins.expected.pages(0).fresh
    assert len(new[0][0]) == fresh.starts[-1] == 20 + sum(start % twins.case.block for start in (26, 101, 34))


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_width_is_packed_as_defined(bits):
    affine, codebook = affine_slot(48, bits, 24), codebook_slot([(20, bits), (13, 9 - bits), (7, 3)])
    run(plain(affine, mean=torch.randn(2, 48)), [[6, 2]])
    run(plain(codebook, rotation=Hadamard(8)), [[6, 2]])


HALF = torch.float16
EVEN = [
    Plain(even_codecs([(32, 4), (64, 2), (32, 1)], [(128, 2)])),
    Plain(even_codecs([(64, 4), (32, 2), (32, 1)], [(64, 4), (64, 2)], dtype=HALF), HALF, page_size=3),
    Plain(even_codecs([(32, 8), (32, 4), (64, 2)], [(128, 4)]), block=4, page_size=16),
    Plain(even_codecs([(16, 4), (32, 2), (16, 1)], [(64, 2)], centred=False), block=4),
]


@pytest.mark.parametrize("case", EVEN, ids=range(len(EVEN)))
def test_evenly_spaced_levels(case):
    run(case)


def test_the_step_with_the_largest_cosine_is_taken():
    """Where two steps are equally good but for float32, either is."""
    widths = [(32, 4), (40, 4), (32, 2), (24, 2)]  # with columns that have no coordinate, too
    twins = Twins(plain(even_slot(widths), page_size=16), 1)
    x = twins.extend([45])
    twins.store(x)
    layout = twins.got.layouts[0]
    page, place = places(twins.got)
    for tokens, slot, views in zip(
        x, (layout.key, layout.value), layout.views(twins.got.pools[0].cpu(), together=False), strict=True
    ):
        for segment, codes, meta in slot.split(*views.read(page, place)):
            part = tokens[..., segment.start : segment.stop].double().numpy()
            levels = unpack(codes, segment.bits).double().numpy().reshape(part.shape) - (2**segment.bits - 1) / 2
            assert np.any(chosen(part, levels, segment.bits, tie=1e-6), axis=0).all()
            scale = (part**2).sum(-1) / (part * levels).sum(-1)
            stored = even.decode(meta).double().numpy().reshape(scale.shape)
            assert np.allclose(stored, scale, rtol=2**-5 * (1 + 1e-4), atol=0)


def test_keys_and_values_of_different_layouts():
    key = Codec(affine_slot(64, 4), Transform(torch.randn(2, 64), Hadamard(64)))
    value = Codec(codebook_slot([(64, 3)]), Transform(None, Hadamard(32)))
    run(Plain((key, value), block=4))


@pytest.mark.parametrize("mean", [None, torch.linspace(-4, 4, 96).view(2, 48)], ids=["", "centred"])
def test_blocks_of_different_sizes_in_one_segment(mean):
    """The columns of its rotation have different factors."""
    rotation = Matrix.of_signs(torch.block_diag(hadamard_matrix(16), hadamard_matrix(32)).float().flip(0)[None])
    run(plain(affine_slot(48, 4, 48), mean=mean, rotation=rotation), [[6, 2]])


VIEWS = {
    "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "part of a wider tensor": lambda x: torch.cat((x, -x), dim=1).contiguous()[:, : x.shape[1]],
    "coordinates apart": lambda x: torch.stack((x, -x), dim=-1)[..., 0],
    "tokens apart": lambda x: torch.stack((x, -x), dim=1)[:, 0],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("recipe", ["int4:block=4", "saw-int4"])
def test_inputs_need_not_be_contiguous(recipe, view):
    run(Case(recipe), [[5, 3, 7]], view)


@pytest.mark.parametrize("products", triton.MANY)
@pytest.mark.parametrize("recipe", ["int4", "saw-int4", "saw-int4:values=true,block=4", "oscar-int2", "gtq-k3v3"])
def test_many_tokens(recipe, products):
    """More than a tile of each size. On a small GPU, a program takes several tiles of keys, then of values; on a large
    one, a tile of either."""
    for many, sms in ((triton.MANY_VECTORS, 1), (16, 1), (16, 100)):
        twins = Twins(Case(recipe, page_size=16, kv_heads=2), 3)
        twins.card = CARD._replace(products=products)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton, "MANY_VECTORS", many)
            patch.setattr(triton, "sms", lambda device, sms=sms: sms)
            twins.check(twins.store(twins.extend([90, 27, 33])))


@pytest.mark.parametrize("clip", [0.3, 0.8, 0.95, 1.3, 100.0])
@pytest.mark.parametrize("rotation", [None, Hadamard(16)], ids=["", "rotated"])
def test_groups_are_clipped(clip, rotation):
    """The last group has fewer numbers than columns."""
    twins = Twins(plain(affine_slot(80, 2, 40), clip, rotation=rotation), 2)
    x = twins.extend([6, 4])
    x[..., 3] *= 30
    twins.check(twins.store(x))


# --- against float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "recipe", ["int8", "saw-int4", "quarot-int2", "oscar-int2", "oscar-int2:clip=false", "tq-k3v5"]
)
def test_errors_are_those_of_rounding(recipe, dtype):
    case = Case(recipe, 64, dtype, page_size=4)
    twins = Twins(case, 1)
    x = twins.extend([12])
    triton.store(CARD, twins.got.pages(0), *x.to(DEVICE))
    pool, layout = twins.got.pools[0].cpu()[twins.got.tables.pages[0]], twins.got.layouts[0]
    for tokens, codec, views in zip(x, case.codecs, (key_views, value_views), strict=True):
        codes, meta = (array.transpose(1, 2).flatten(0, 1) for array in views(layout, pool))  # [tokens, kv_heads, …]
        y = transformed(tokens, codec)
        if codec.first is not None:  # at position 0, the difference is packed
            y[0] -= codec.first.double().numpy()
        for segment, part_codes, part_meta in codec.layout.split(codes, meta):
            part = y[..., segment.start : segment.stop]
            code, entries = unpack(part_codes, segment.bits).numpy(), part_meta.double().numpy()
            if segment.rule == "affine":
                if codec.clip is not None:
                    assert (np.abs(part) > limit(part, codec.clip)).any()
                    part = clipped(part, codec.clip)
                low, high = part.min(-1), part.max(-1)
                assert np.allclose(entries[..., 0], (high - low) / (2**segment.bits - 1), rtol=2**-10)
                assert np.allclose(entries[..., 1], low, rtol=2**-10, atol=1e-6)
                # half a step, and at the ends what the rounding of scale and offset takes
                room = entries[..., :1] * (0.5 + 2**-10 * 2**segment.bits) + 2**-11 * np.abs(low)[..., None] + 1e-5
                assert (np.abs(code * entries[..., :1] + entries[..., 1:] - part) <= room).all()
            else:
                levels = np.array(lloyd_max.levels(segment.bits))
                norm = np.linalg.norm(part, axis=-1, keepdims=True)
                distance = np.abs(levels - (part / norm * segment.dims**0.5)[..., None])
                chosen = np.take_along_axis(distance, code[..., None].astype(np.int64), -1)[..., 0]
                assert (chosen <= distance.min(-1) + 1e-4).all()
                decoded = np.linalg.norm(levels[code] * entries, axis=-1, keepdims=True)
                assert np.allclose(decoded, norm, rtol=2**-10)


def transformed(x: torch.Tensor, codec: Codec) -> np.ndarray:
    """(x − mean)·A in float64."""
    mean, rotation = codec.transform.mean, codec.transform.rotation
    y = x.double().numpy() - (0 if mean is None else mean.double().numpy())
    if isinstance(rotation, Matrix):
        matrix = np.broadcast_to(as_multiplied(rotation.matrix.double().numpy()), (x.shape[1], *y.shape[-1:] * 2))
        return np.einsum("...hd,hde->...he", y, matrix)
    if isinstance(rotation, Hadamard):
        return y @ hadamard(y.shape[-1], rotation.order)
    return y


# --- odd numbers


@pytest.mark.parametrize("value", [0.0, -3.0, 1e-30, 30000.0, -30000.0])
@pytest.mark.parametrize("slot", [affine_slot(64, 4, 32), codebook_slot([(64, 3)])], ids=["affine", "codebook"])
def test_constant_vectors(slot, value):
    twins = Twins(plain(slot), 1)
    twins.store(torch.full_like(twins.extend([3]), value))
    for a, b in zip(*(decoded(cache) for cache in (twins.expected, twins.got)), strict=True):
        assert torch.equal(a, b)


def decoded(cache: PagedCache) -> list[torch.Tensor]:
    """The three tokens of a cache with a page of four, as they are read."""
    layout, pool = cache.layouts[0], cache.pools[0].cpu()[cache.tables.pages[0]]
    return [
        codec.to("cpu").dequantize(*(array[:, :, :3] for array in views(layout, pool)))
        for codec, views in zip(cache.codecs[0], (key_views, value_views), strict=True)
    ]


def test_ranges_as_wide_as_metadata_allow():
    twins = Twins(plain(affine_slot(64, 8), dtype=torch.float16), 1)
    x = twins.extend([3]).clamp(-2, 2) * 30000
    twins.check(twins.store(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ties_go_to_even(dtype):
    """Numbers halfway between two of 16 bits, in rings and what is returned, and codes halfway between two."""
    low = int(1 / ULP[dtype])  # from here on 16-bit floats are integers
    case = plain(affine_slot(64, 8), mean=torch.full((2, 64), 0.5), dtype=dtype, block=4)
    twins = Twins(case, 1)
    x = torch.randint(low + 1, 2 * low, twins.extend([6]).shape, generator=twins.generator)
    twins.check(twins.store(x.to(dtype)))
    twins = Twins(plain(affine_slot(64, 4), dtype=dtype), 1)
    x = torch.randint(0, 31, twins.extend([6]).shape, generator=twins.generator)
    x[..., :2] = torch.tensor([0, 30])  # a scale of 2
    twins.check(twins.store(x.to(dtype)))


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6])
def test_zero_has_the_level_below(bits):
    """It lies on a boundary. Zeros of both signs."""
    twins = Twins(plain(codebook_slot([(64, bits)])), 1)
    x = twins.extend([6])
    x[..., ::3], x[..., 1::3] = 0, -0.0
    twins.check(twins.store(x))


# --- rows without a location


def store_of(implementation: str) -> Callable:
    if implementation == "naive":
        return naive.store
    if implementation == "store_cpu" and DEVICE.type == "cuda":
        pytest.skip("numba compiles for CPUs")
    store = pytest.importorskip(f"kvfold.ops.store.{implementation}").store
    return partial(store, CARD) if implementation == "store_gpu" else store


@pytest.mark.parametrize("implementation", ["naive", "store_cpu", "store_gpu"])
@pytest.mark.parametrize("recipe", ["int4", "tq-k3v2", "saw-int4:block=4"])
def test_rows_without_a_location_are_not_stored(recipe, implementation):
    """And what they hold is no fault."""
    twins = Twins(Case(recipe), 3)
    x = twins.extend([4, 3, 1])
    new = naive.store(twins.expected.pages(0), *x)
    x, live = twins.take_out([1, 4, 7], x), [0, 2, 3, 5, 6]
    got = store_of(implementation)(twins.got.pages(0), *x.to(DEVICE))
    assert not twins.got.faults.any()
    twins.check([(a[live], b.cpu()[live]) for a, b in zip(new or (), got or (), strict=True)])


# --- refusals


def test_other_types_are_refused():
    twins = Twins(Case("int4"), 1)
    x = twins.extend([2]).float()
    with pytest.raises(ValueError, match=r"not torch\.float32"):
        triton.store(CARD, twins.got.pages(0), *x.to(DEVICE))
    k, v = x.bfloat16().to(DEVICE)
    with pytest.raises(ValueError, match=r"one dtype, not torch\.bfloat16 and torch\.float16"):
        triton.store(CARD, twins.got.pages(0), k, v.half())


@pytest.mark.parametrize(
    "wrong", [lambda x: x[:, :1], lambda x: x[:, :, :1], lambda x: x[..., :32], lambda x: x.unsqueeze(1)]
)
def test_other_shapes_are_refused(wrong):
    twins = Twins(Case("int4"), 1)
    with pytest.raises(ValueError, match="of the step"):
        triton.store(CARD, twins.got.pages(0), *wrong(twins.extend([2])).to(DEVICE))


@pytest.mark.parametrize("recipe", ["kivi-2", "kmeans-int4:centroids=4", "gtq-k3v3:per_head=true"])
def test_layouts_without_a_kernel_are_refused(recipe):
    case = Case(recipe)
    cache = PagedCache([tuple(c.to(DEVICE) for c in case.codecs)], 2, 1, block=case.block, device=DEVICE)
    cache.extend([2])
    x = torch.zeros(2, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match="no kernel"):
        triton.store(CARD, cache.pages(0), x, x)


# --- large pools


@pytest.fixture
def large() -> PagedCache:
    """A cache of more than 2^31 bytes of pages, of which only those in use are touched."""
    case = Case("saw-int4:block=4", 128, page_size=16)
    cache = PagedCache(
        [tuple(codec.to(DEVICE) for codec in case.codecs)], 2, 2, block=case.block, page_size=16, device=DEVICE
    )
    pages = 2**31 // (2 * cache.layouts[0].page_bytes) + 1000
    cache.tables.references = [0] * pages
    cache.tables.free = [*range(2), *range(pages - 2, pages)]
    return cache


def test_pages_past_two_gibibytes(large):
    twins = Twins(Case("saw-int4:block=4", 128, page_size=16), 2)
    x = twins.extend([20, 5])
    large.extend([20, 5])
    naive.store(twins.expected.pages(0), *x)
    triton.store(CARD, large.pages(0), *x.to(DEVICE))
    assert large.pools[0].nbytes > 2**31
    used = [page for pages in large.tables.pages for page in pages]
    assert max(used) * large.pools[0].stride(0) > 2**31
    check_pools(twins.expected, twins.expected.pools[0], large, large.pools[0], None)
