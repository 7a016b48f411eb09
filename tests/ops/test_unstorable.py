"""NaN, Inf and numbers beyond the range of 16-bit floats: zeros are stored in their place, their tokens are marked, and
nothing else changes by a bit."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from even_codecs import even_codecs
from page_views import key_views, value_views
from test_attend import World, codecs
from test_store import CARD, DEVICE, Case, Plain, Twins, places, plain, store_of
from torch import Tensor

from kvfold.bench.scattered_cache import TOKENS
from kvfold.format.codec import Codec
from kvfold.format.layout import Segment, SlotLayout, affine_slot, channel_slot
from kvfold.ops import naive
from kvfold.ops.attend import attend_gpu as portable
from kvfold.ops.attend import attend_torch
from kvfold.ops.attend import unpacked_prefill as unpacked
from kvfold.ops.store import store_gpu as triton
from kvfold.paged import PagedCache
from kvfold.transforms import Hadamard

pytestmark = [pytest.mark.usefixtures("_poisoned_memory"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

BAD = {"nan": torch.nan, "-inf": -torch.inf, "beyond metadata": -2e8}  # of which bfloat16 holds the last
CASES = [
    Case("int4"),
    Case("int4:block=4", 128),
    Case("int8:block=2,group=40", 80, torch.float16),
    Case("saw-int4:values=true", page_size=16),
    Case("oscar-int2:block=4"),
    Case("oscar-int2:block=0", 64, torch.float16),
    Case("tq-k3v2"),
    plain(SlotLayout((Segment(0, 16, 16, "raw"), Segment(16, 40, 2), Segment(40, 53, 3, "codebook")))),
    Plain(even_codecs([(16, 4), (32, 2), (16, 1)], [(32, 8), (32, 2)]), block=4),
]


def name(case: Case | Plain) -> str:
    return str(case) if isinstance(case, Case) else "+".join(each.rule for each in case.codecs[0].layout.segments)


@dataclass(frozen=True)
class Place:
    """A vector of a step: sequence, token of the step, side, KV head."""

    row: int
    token: int
    side: int
    head: int


COORDINATE = 20
COUNTS = (4, 3, 1)
# two of one token, which is to be marked once
PLACES = (Place(0, 3, 0, 1), Place(1, 1, 0, 0), Place(1, 1, 1, 1), Place(2, 0, 1, 0))


class Poisoned:
    """A step with numbers that cannot be stored, and what is to be stored: that of the same step with means, which are
    zero when transformed, in the place of whole vectors."""

    def __init__(self, case: Case | Plain, bad: float, counts=COUNTS, places=PLACES, where=COORDINATE) -> None:
        self.case, self.counts, self.places = case, counts, places
        self.twins = Twins(case, len(counts))
        self.x = self.twins.extend(counts)
        self.stored = self.x.float()
        for place in places:
            at = (place.side, sum(counts[: place.row]) + place.token, place.head)
            self.x[at][..., where] = bad
            mean = case.codecs[place.side].transform.mean
            self.stored[at] = 0 if mean is None else mean[place.head].float()

    def page_and_offset(self, place: Place) -> tuple[int, int]:
        tables, size = self.twins.expected.tables, self.case.page_size
        token = tables.lengths[place.row] - self.counts[place.row] + place.token
        return tables.pages[place.row][token // size], token % size

    def check(self, store: Callable, any_codes: bool) -> None:
        """`any_codes`: under metadata of zeros codes may be any."""
        expected, cache = naive.store(self.twins.expected.pages(0), *self.stored), self.twins.got
        assert not self.twins.expected.faults.any()
        got = store(cache.pages(0), *self.x.to(DEVICE))
        marked = {page * self.case.page_size + offset for page, offset in map(self.page_and_offset, self.places)}
        assert set(cache.faults.nonzero().flatten().tolist()) == marked
        if any_codes:
            self.check_zeros(cache)
        assert (got is None) == (expected is None)
        self.twins.check([(a, b.cpu()) for a, b in zip(expected or (), got or (), strict=True)])

    def check_zeros(self, cache: PagedCache) -> None:
        """What could not be packed decodes to zero. Afterwards it has the expected codes."""
        layout = cache.layouts[0]
        for place in self.places:
            page, offset = self.page_and_offset(place)
            views, expected = (
                layout.views(pool, together=False)[place.side]
                for pool in (cache.pools[0], self.twins.expected.pools[0])
            )
            read = views.read(*(torch.tensor([index], device=DEVICE) for index in (page, offset)))
            decoded = self.case.codecs[place.side].dequantize(*(part.cpu() for part in read))
            assert (decoded[0, place.head] == 0).all()
            for codes, right in zip(views.codes, expected.codes, strict=True):
                codes[page, offset, place.head] = right[page, offset, place.head].to(DEVICE)


# --- store

IMPLEMENTATIONS = ("naive", "store_cpu", "store_gpu")
BLOCKS = Case("saw-int4:order=16,group=32,block=4"), Case("gtq-k3v3:block=2")  # rotated in blocks
WITHOUT_KERNEL = Case("gtq-k3v3:per_head=true"), Case("kmeans-int4:centroids=4")
BOTH = [
    *(pytest.param(case, bad, id=f"{name(case)}-{said}") for case in CASES for said, bad in BAD.items()),
    *((case, bad) for case in (*BLOCKS, Case("bf16", 80)) for bad in (torch.nan, -torch.inf)),
]


@pytest.mark.parametrize(("case", "bad"), [*BOTH, *((case, torch.nan) for case in WITHOUT_KERNEL)])
def test_the_definition_stores_zeros(case, bad):
    Poisoned(case, bad).check(naive.store, any_codes=False)


@pytest.mark.parametrize(("case", "bad"), BOTH)
def test_the_kernel_for_cpus_stores_zeros(case, bad):
    Poisoned(case, bad).check(store_of("store_cpu"), any_codes=False)


@pytest.mark.parametrize(("case", "bad"), [*BOTH[:3], *BOTH[3:24:4], *BOTH[24::2]])  # one or two of most cases
def test_the_kernel_for_gpus_stores_zeros(case, bad):
    Poisoned(case, bad).check(partial(triton.store, CARD), any_codes=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("recipe", ["saw-int4:values=true", "saw-int4:values=true,block=4"])
def test_finite_numbers_whose_rotation_16_bits_cannot_hold(implementation, recipe):
    """-60000 is a float16. Times √64 it is none."""
    store = store_of(implementation)
    poisoned = Poisoned(Case(recipe, dtype=torch.float16), -60000, where=slice(None))
    poisoned.check(store, any_codes=implementation == "store_gpu")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_only_the_copy_cannot_hold_is_zero_in_both(implementation):
    """120000 packs, as the upper end of a range, but is no float16."""
    store = store_of(implementation)
    far = torch.zeros(2, 64)
    far[1, 7] = -60000
    twins = Twins(plain(affine_slot(64, 4), mean=far, dtype=torch.float16, block=4), 1)
    x = twins.extend([3])
    x[:, :, 1, 7] = -60000
    x[1, 2, 1, 7] = 60000
    new = store(twins.got.pages(0), *x.to(DEVICE))
    page, place = (int(index[2]) for index in places(twins.got))
    assert twins.got.faults.nonzero().tolist() == [[page * 4 + place]]
    assert (new[1][2, 1] == 0).all()
    assert (new[1][2, 0] != 0).all()
    assert (new[0][2, 1, :7] != 0).all()
    at = int(twins.got.pages(0).fresh.kept[2])
    assert (twins.got.pages(0).ring_sides[1][at // TOKENS, 1, at % TOKENS] == 0).all()
    _, meta = value_views(twins.got.layouts[0], twins.got.pools[0])
    assert (meta[page, 1, place] == 0).all()
    assert (meta[page, 0, place, 0] != 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_numbers_are_stored_if_they_are_clipped(implementation):
    """Beyond the range of float16, in which scale and offset are stored."""
    twins = Twins(plain(affine_slot(64, 2), clip=0.5), 1)
    x = twins.extend([2])
    x[0, 1, 0, 9], x[1, 1, 0, 9] = 1e5, -1e5
    for store, cache in ((naive.store, twins.expected), (store_of(implementation), twins.got)):
        store(cache.pages(0), *x.to(cache.pools[0].device))
        assert not cache.faults.any()
    twins.check([])
    for views, codec, sign in zip((key_views, value_views), twins.case.codecs, (1, -1), strict=True):
        codes, meta = views(twins.got.layouts[0], twins.got.pools[0].cpu())
        page, place = (int(index[1]) for index in places(twins.got))
        number = codec.dequantize(codes, meta)[page, 0, place, 9]
        assert float(number) == pytest.approx(sign * 0.5 * 1e5, rel=2**-9)


CLIPPED = plain(affine_slot(64, 2), clip=0.5), plain(affine_slot(64, 2, 32), clip=0.5, rotation=Hadamard(64))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CLIPPED, ids=["", "rotated"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_clipping_takes_no_fault_away(implementation, case, bad):
    """Neither Inf nor NaN, nor numbers that are too large after clipping."""
    Poisoned(case, bad).check(store_of(implementation), any_codes=implementation == "store_gpu")


def test_blocks_of_many_tokens(monkeypatch):
    monkeypatch.setattr(triton, "MANY_VECTORS", 1)
    Poisoned(Case("saw-int4:block=4", page_size=16), torch.nan).check(partial(triton.store, CARD), any_codes=True)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 65536.0])
def test_pages_that_are_quantized_as_a_whole(bad):
    """Neither when a token comes nor when its page is full is there anything but zeros in its place."""
    codec, value = Codec(channel_slot(16, 2)), Codec(affine_slot(16, 2))
    caches = [PagedCache([(codec, value)], 2, 1, page_size=4) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    for count in (2, 1, 3):
        x = torch.randn(2, count, 2, 16, generator=generator).bfloat16()
        clean = x.clone()
        if count == 1:
            x[0, 0, 1, 3], clean[0, 0, 1] = bad, 0
        for cache, tokens in zip(caches, (x, clean), strict=True):
            cache.extend([count])
            new = naive.store(cache.pages(0), *tokens)
            assert all(side.isfinite().all() for side in new)
            assert cache.faults.nonzero().tolist() == ([[2]] if cache is caches[0] and count != 2 else [])
    for a, b in zip(*((cache.pools[0], cache.rings[0]) for cache in caches), strict=True):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16))


# --- attend: a query with NaN beside others


def numba_attend(*arguments) -> Tensor:
    return pytest.importorskip("kvfold.ops.attend.decode_cpu").attend(*arguments)


DECODE, EXTEND = (1, 1, 1), (5, 2, 9)
PATHS = {
    "portable-decode": (portable.attend, DECODE),
    "portable-extend": (portable.attend, EXTEND),
    "unpacked": (unpacked.attend, (5, 2, 19)),
    "torch-decode": (attend_torch.attend, DECODE),
    "torch-extend": (attend_torch.attend, EXTEND),
    "numba": (numba_attend, DECODE),
}


@pytest.mark.parametrize(("attend", "counts"), PATHS.values(), ids=PATHS)
def test_a_query_with_nan_changes_no_other(attend, counts, monkeypatch):
    """Neither of another sequence, nor of another token or head of its own."""
    monkeypatch.setattr(unpacked, "MIN_QUERIES", 0)
    world = World(codecs("saw-int4", 64, 2), 3, block=8)
    world.fill(20, 33, 7)
    pages, new = world.fill(*counts)
    q = world.queries()
    expected = attend(pages, q, new, world.logits)
    poisoned = torch.zeros(q.shape[:2], dtype=torch.bool, device=q.device)
    poisoned[counts[0] : counts[0] + counts[1]] = True
    poisoned[-1, 3] = True  # one head of one token
    q[poisoned] = torch.nan
    got = attend(pages, q, new, world.logits)
    assert torch.equal(got[~poisoned], expected[~poisoned])
