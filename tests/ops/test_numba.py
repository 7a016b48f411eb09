"""The kernels for CPUs against the definitions: `store` bit for bit, `attend` as near as float32 comes."""

import random
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")
if torch.cuda.is_available():
    pytest.skip("the tests of other kernels, which these share, are on the GPU", allow_module_level=True)

from test_attend import LAYER, World, codecs
from test_store import EVEN, Case, Twins, plain

from kvfold.format.codec import Codec
from kvfold.format.layout import (
    PageLayout,
    Segment,
    SlotLayout,
    affine_slot,
    channel_slot,
    codebook_slot,
    mixed_slot,
)
from kvfold.ops import cpu, naive
from kvfold.ops.attend import decode_cpu as kernels
from kvfold.ops.dispatch import choose
from kvfold.ops.store import store_cpu as store_kernel
from kvfold.recipes import parse

pytestmark = pytest.mark.usefixtures("_poisoned_memory")

CPU = torch.device("cpu")
RECIPES = [
    *("int8", "int4:block=9", "int2", "int4:group=32", "int2:group=16,block=4", "saw-int4", "hessian-int4"),
    *("saw-int4:values=true,block=9", "quarot-int2", "oscar-int2:block=9", "oscar-int2:per_head=true,block=0"),
    *("tq-k3v3:block=4", "tq-k8v1", "gtq-k3v3:block=9", "fold3:block=4", "bf16"),
]


@pytest.fixture(params=[1, 2, 5], ids=lambda threads: f"threads{threads}")
def _threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


DIMS = [64, 80, 96, 128, 192, 256, (192, 128)]


def fitting(recipe: str, dims: int | tuple[int, int]) -> str:
    """With groups that divide the dims."""
    return recipe.replace("group=32", "group=16") if dims == 80 else recipe


# --- store


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def check_store(twins: Twins, counts: list[int]) -> None:
    x = twins.extend(counts)
    expected = naive.store(twins.expected.pages(0), *x)
    got = store_kernel.store(twins.got.pages(0), *x)
    assert same_bytes(twins.expected.pools[0], twins.got.pools[0])
    assert same_bytes(twins.expected.rings[0], twins.got.rings[0])
    assert (expected is None) == (got is None)
    assert expected is None or all(map(same_bytes, expected, got))


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_stored_bytes(recipe, dims, dtype):
    """Of steps with unequal counts, long and short, in shuffled pages of 4 tokens that were full of garbage."""
    k, v = (dims, None) if isinstance(dims, int) else dims
    twins = Twins(Case(fitting(recipe, dims), dims=k, value_dims=v, dtype=dtype, kv_heads=3), 3)
    for counts in ([21, 1, 3], [1, 1, 1], [0, 18, 1], [1, 0, 1]):
        check_store(twins, counts)


@pytest.mark.parametrize("case", EVEN, ids=range(len(EVEN)))
def test_evenly_spaced_levels(case):
    """Both ways."""
    twins = Twins(case, 2)
    check_store(twins, [5, 2])
    check_store(twins, [0, 1])
    world = World(case.codecs, 2, page_size=case.page_size, pages=60, block=case.block)
    world.fill(75, 16)
    check(world, 1, 1)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("block", [0, 5])
def test_stored_bytes_by_several_threads(block):
    """More tokens than rings hold; then a step that returns the open block before it, too."""
    twins = Twins(Case(f"int2:group=16,block={block}"), 2)
    check_store(twins, [53, 13])
    check_store(twins, [1, 17])


@pytest.mark.parametrize(
    "slot",
    [
        affine_slot(24, 1),
        affine_slot(24, 3),
        affine_slot(16, 5, 8),
        affine_slot(40, 6, 8),
        affine_slot(24, 7),
        affine_slot(12, 4, 2),
        affine_slot(12, 8, 1),
        codebook_slot([(5, 7), (3, 6), (13, 5), (1, 1)]),
        SlotLayout((Segment(0, 10, 16, "raw"), Segment(10, 18, 2), Segment(18, 23, 2, "codebook"))),
    ],
    ids=lambda slot: "-".join(f"{part.dims}{part.rule}{part.bits}" for part in slot.segments[:3]),
)
@pytest.mark.parametrize("clip", [None, 0.9])
def test_odd_segments(slot, clip):
    """Every width, runs that are no multiple of what is unpacked at once, codes that are filled up: both ways."""
    check_store(Twins(plain(slot, clip), 2), [7, 2])
    world = World((Codec(slot, clip=clip), Codec(slot, clip=clip)), 2)
    world.fill(30, 1)
    check(world, 1, 1)


def test_numbers_of_16_bits():
    """All of them back and forth, and what lies between two goes to the nearer, or to the even one."""
    for dtype, half in ((torch.float16, True), (torch.bfloat16, False)):
        words = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
        numbers = words.view(dtype)
        words, numbers = words[numbers.isfinite()], numbers[numbers.isfinite()].float()
        assert all(cpu.widened(word, half) == x for word, x in zip(words.numpy(), numbers.tolist(), strict=True))
        middles = (numbers + numbers.abs().nextafter(torch.tensor(torch.inf)).copysign(numbers)) / 2
        between = torch.cat((numbers * (1 + 2**-12), numbers * (1 + 2**-9), numbers * (1 + 2**-11), middles, numbers))
        got = [cpu.narrowed(x, half) for x in between.numpy()]
        assert torch.equal(torch.tensor(got, dtype=torch.int32), between.to(dtype).view(torch.uint16).int())
    assert not cpu.finite(cpu.narrowed(np.float32("nan"), True), True)


# --- attend


def check(world: World, *counts: int) -> None:
    """Store one token of some sequences, and compare what their queries get with the definition."""
    pages, new = world.fill(*counts)
    q = world.queries()
    out = kernels.attend(pages, q, new, world.logits)
    lengths = enumerate(pages.step.known.lengths)
    values = max(naive.read(pages, row, length - 1, new)[1].abs().max().item() for row, length in lengths)
    expected = naive.attend(pages, q, new, world.logits)
    torch.testing.assert_close(out, expected, rtol=0, atol=2**-17 * (1 + values))


@pytest.mark.pairs
@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes(recipe, dims, ratio):
    """Queries within an open block and at its border."""
    recipe = fitting(recipe, dims)
    world = World(codecs(recipe, dims, 2), 3, ratio=ratio, block=parse(recipe).block)
    world.fill(75, 1, 16)
    for counts in ((1, 1, 1), (0, 1, 1), (1, 1, 1)):
        check(world, *counts)


@pytest.mark.pairs
@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("ratio", [1, 3, 7, 16])
@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
def test_heads_and_pages(ratio, page_size):
    world = World(codecs("saw-int4", 64, 3), 4, kv_heads=3, ratio=ratio, page_size=page_size, pages=2000)
    world.fill(1100, 1, 511, 63)
    check(world, 1, 1, 1, 1)


@pytest.mark.pairs
@pytest.mark.parametrize("raw_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", ["int2", "int4 / tq-k3v3", "oscar-int2"])
@pytest.mark.parametrize("block", [1, 7, 64, 70, 600])
def test_blocks(recipe, block, raw_dtype):
    """In a page, over several, longer than a tile or than a sequence, whose first token has one, too. Rings go round
    between steps."""
    world = World(codecs(recipe, 32, 2, raw_dtype), 4, block=block, pages=400)
    world.fill(530, 1, 66, 7)
    check(world, 1, 1, 1, 1)
    check(world, 1, 0, 1, 1)
    world.fill(40, 3, 0, block)
    check(world, 1, 1, 1, 1)


@pytest.mark.parametrize("options", [{"sinks": True}, {"cap": 2.0}, {"sinks": True, "cap": 30.0}], ids=str)
@pytest.mark.parametrize("block", [0, 7])
def test_learned_sinks_and_capped_logits(options, block):
    world = World(codecs("saw-int4:values=true", 32, 2), 3, ratio=3, pages=400, block=block, **options)
    world.fill(530, 0, 66)
    check(world, 1, 1, 1)


@pytest.mark.parametrize("recipe", ["saw-int4", "oscar-int2", "gtq-k3v3"])
def test_others_change_no_bit(recipe):
    """What a sequence gets alone, by one thread or several, it gets beside others, in any order."""
    lengths = (700, 1, 63, 512)
    world = World(codecs(recipe, 64, 2), 4, block=9)
    world.fill(*lengths)
    pages, new = world.fill(1, 1, 1, 1)
    q = world.queries()
    together = kernels.attend(pages, q, new, world.logits)
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert torch.equal(kernels.attend(pages, q, new, world.logits), together)
    torch.set_num_threads(before)
    rows = random.Random(0).sample(range(4), 3)
    world.cache.select(rows)
    world.cache.step = world.cache._describe([lengths[row] for row in rows])
    alone = kernels.attend(world.cache.pages(LAYER), q[rows], (new[0][rows], new[1][rows]), world.logits)
    assert torch.equal(alone, together[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_outputs_go_where_they_are_wanted(dtype):
    world = World(codecs("saw-int4:values=true", 32, 2), 2)
    world.fill(20, 3)
    pages, new = world.fill(1, 1)
    q = world.queries()
    expected = kernels.attend(pages, q, new, world.logits)
    for around in (torch.full((4, *q.shape[1:]), torch.nan, dtype=dtype), torch.empty(4, 4, 64, dtype=dtype)):
        out = around[1:3, ..., :32]
        assert kernels.attend(pages, q, new, world.logits, out) is out
        assert torch.equal(out, expected.to(dtype))


def test_large_logits():
    """A query like one key gets the value of that key alone, and its opposite something finite."""
    world = World(codecs("int8:centre=false", 64, 1), kv_heads=1, ratio=1, dtype=torch.float32)
    world.cache.extend([24])
    k, v = 40 * world.randn(24, 1, 64).sign(), world.randn(24, 1, 64)
    store_kernel.store(world.cache.pages(LAYER), k, v)
    world.cache.extend([1])
    pages = world.cache.pages(LAYER)
    store_kernel.store(pages, k[:1], v[:1])
    stored = naive.read(pages, 0, 24, None)[1]
    for token in (3, 23):
        out = kernels.attend(pages, k[token : token + 1], None, world.logits)
        torch.testing.assert_close(out[0], stored[token], rtol=0, atol=1e-5)
    assert kernels.attend(pages, -k[:1], None, world.logits).isfinite().all()


def test_several_threads_of_python_at_once():
    world = World(codecs("saw-int4", 64, 2), 2)
    world.fill(600, 70)
    pages, new = world.fill(1, 1)
    q = world.queries()
    expected, wrong = kernels.attend(pages, q, new, world.logits), []

    def decode() -> None:
        wrong.extend(not torch.equal(kernels.attend(pages, q, new, world.logits), expected) for _ in range(50))

    workers = [threading.Thread(target=decode) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(wrong) == 200
    assert not any(wrong)


# --- which layouts, and where


def test_decoding_is_compiled():
    for recipe in RECIPES:
        key, value = codecs(recipe, 64, 2)
        ops = choose(PageLayout(key.layout, value.layout, 16), 2, CPU)
        assert [choice.implementation for choice in ops] == ["numba", "numba", "torch"]


@pytest.mark.parametrize(
    ("slot", "reason"),
    [
        (channel_slot(32, 2), "whole pages are quantized together"),
        (mixed_slot([affine_slot(32, 4), affine_slot(32, 4, 8)]), "KV heads have layouts of their own"),
        (SlotLayout((Segment(0, 32, 4),), centroid=True), "slots name a centroid"),
        (SlotLayout((Segment(0, 8, 1), Segment(8, 32, 16, "raw"))), "numbers of 16 bits lie at odd bytes"),
    ],
)
@pytest.mark.parametrize("side", ["keys", "values"])
def test_what_else_stays_with_torch_and_why(slot, reason, side):
    both = (slot, affine_slot(32, 8)) if side == "keys" else (affine_slot(32, 8), slot)
    for choice in choose(PageLayout(*both, 16), 2, CPU):
        assert choice[:2] == ("torch", f"there is no kernel for these {side}: {reason}")


def test_without_numba_torch_does_it_and_says_how_to_get_it():
    code = """
import sys
sys.modules["numba"] = None
import torch
from kvfold.format.layout import PageLayout, affine_slot
from kvfold.ops.dispatch import choose
for choice in choose(PageLayout(affine_slot(64, 4), affine_slot(64, 4), 16), 1, torch.device("cpu")):
    print(choice.implementation, choice.reason)
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert [line.split(" (")[0] for line in run.stdout.splitlines()] == [
        "torch the kernels for CPUs need numba: pip install 'kvfold[cpu]'"
    ] * 3
