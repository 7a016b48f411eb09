"""`attend` over unpacked tokens against its definition, and what unpacks them, on pages that the definition of `store`
wrote. Without a GPU kernels run in Triton's interpreter, and attention is that of torch for CPUs, or a stand-in for
FlashAttention 3, in float32."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import fake_flash_attention_3 as fakes
import pytest
import torch
from test_attend import DEVICE, LAYER, World, codecs, compare
from torch import Tensor

from kvfold.bench.expected_ops import relative_error
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
from kvfold.ops import naive
from kvfold.ops.attend import attend_gpu as portable
from kvfold.ops.attend import flash_attention_3, prompt_reads
from kvfold.ops.attend import unpacked_prefill as unpacked
from kvfold.ops.attend.flash_attention_3 import SGLANG, Ends, Library, Paged
from kvfold.ops.attend.prompt_reads import Read, reads_of
from kvfold.ops.attend.unpacked_prefill import Part, Target
from kvfold.ops.dequantize_gpu import Span, Tokens, dequantize
from kvfold.ops.dispatch import choose
from kvfold.ops.naive import store
from kvfold.ops.pages import HostLengths, LayerPages, Logits, Step

PAGE, ROOM = 8, 128  # tokens
OPERAND = torch.float16 if DEVICE == "cuda" else torch.float32  # of tensor cores, or of the interpreter
READERS = pytest.mark.parametrize("library", [None, fakes.LIBRARIES[0]], ids=["torch", "FA3"])


pytestmark = pytest.mark.usefixtures("_poisoned_memory")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a workspace of 128 tokens, with pages of 8. With torch, 8 queries are read together."""
    monkeypatch.setattr(unpacked, "MOST_TOKENS", ROOM)
    monkeypatch.setattr(unpacked, "MIN_QUERIES", 0)
    for module in (flash_attention_3, prompt_reads):
        monkeypatch.setattr(module, "PAGE", PAGE)


def step(world: World, counts: tuple[int, ...], library: Library | None) -> None:
    """Store new tokens, and check what their queries get."""
    pages, new = world.fill(*counts)
    check(pages, world.queries(), new, world.logits, library)


def check(
    pages: LayerPages, q: Tensor, new: tuple[Tensor, Tensor] | None, logits: Logits, library: Library | None
) -> None:
    out = unpacked.attend(pages, q, new, logits, library=library)
    assert out.dtype == torch.float32
    assert out.shape == q.shape
    assert_near(out, naive.attend(pages, q, new, logits), 2**-7)


def assert_near(x: Tensor, expected: Tensor, of_gpu: float) -> None:
    assert relative_error(x, expected) <= (of_gpu if DEVICE == "cuda" else 2**-16)


# --- unpacking


SLOTS = [
    affine_slot(64, 4),
    affine_slot(64, 2, 32),
    affine_slot(64, 1),
    affine_slot(64, 5, 8),
    affine_slot(80, 8),
    affine_slot(96, 7, 24),
    affine_slot(256, 6),
    codebook_slot([(20, 3), (4, 8), (40, 1)]),  # 20 and 4: padded codes
    codebook_slot([(8, 7), (56, 2)]),
    even_slot([(32, 4), (16, 8), (8, 1), (8, 2)]),
    raw_slot(64),
    SlotLayout((Segment(0, 16, 4), Segment(16, 40, 6, "codebook"), Segment(40, 64, 16, "raw"))),
]


def _name(slot: SlotLayout) -> str:
    return "+".join(f"{segment.dims}x{segment.bits}{segment.rule[0]}" for segment in slot.segments)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slot", SLOTS, ids=_name)
def test_unpacked_tokens_are_those_of_the_codec(slot, dtype):
    """Bit for bit, those of several sequences together, and nothing is written beside them."""
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("Triton's interpreter cuts bits off where a GPU rounds them")
    world = World((Codec(slot), Codec(affine_slot(slot.dims, 4))), 2)
    pages, _ = world.fill(20, 60)
    spans = [Span(1, range(5, 42), 42), Span(0, range(3, 20), 20)]
    room = torch.full((2, 60, 2, slot.dims), 7, dtype=dtype, device=DEVICE)
    unpacked, others = room.split([37 + 17, 6], dim=1)
    dequantize(pages, Tokens.of(pages.step, 0, spans), unpacked.unbind(0))
    assert (others == 7).all()
    for row, start, found in ((1, 5, slice(37)), (0, 3, slice(37, None))):
        for side, expected in zip(unpacked, naive.read(pages, row, [19, 59][row], None), strict=True):
            assert torch.equal(side[found], expected[start:][: len(side[found])].to(dtype))


@pytest.mark.parametrize("raw_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [1, 3, 24, 128])
def test_unpacked_tokens_of_any_page(page_size, raw_dtype):
    world = World(
        (Codec(affine_slot(32, 4), raw_dtype=raw_dtype), Codec(raw_slot(32), raw_dtype=raw_dtype)), page_size=page_size
    )
    pages, _ = world.fill(67 + page_size)
    for tokens in (range(67), range(66, 67), range(31, 66)):
        unpacked = torch.empty(2, len(tokens), 2, 32, device=DEVICE)
        dequantize(pages, Tokens.of(pages.step, 0, [Span(0, tokens, tokens.stop)]), unpacked.unbind(0))
        for side, expected in zip(unpacked, naive.read(pages, 0, 66, None), strict=True):
            assert torch.equal(side, expected[tokens.start : tokens.stop])


@pytest.mark.parametrize("recipes", ["saw-int4:values=true,order=16", "oscar-int2:per_head=true", "fold3", "int4"])
@pytest.mark.parametrize(("position", "tokens"), [(74, range(45, 75)), (60, range(40, 61)), (73, range(70, 74))])
def test_unpacked_tokens_are_rotated_back(recipes, position, tokens):
    """Also raw ones: of the step, and those of the open block before it. Values also get their mean. The first token
    fills a page up."""
    world = World(codecs(recipes, 64, 2), 2, block=16)
    world.fill(20, 55)
    pages, new = world.fill(1, 20)
    read = [[side[token] for token in [*tokens, *[tokens[0]] * 3]] for side in naive.read(pages, 1, position, new)]
    span = Span(1, tokens, raw_from(position, 16), padding=3)
    for back, centred in (((True, True), True), ((True, True), False), ((False, True), True), ((False, False), True)):
        found = torch.empty(2, len(tokens) + 3, 2, 64, dtype=OPERAND, device=DEVICE)
        dequantize(pages, Tokens.of(pages.step, 16, [span]), found.unbind(0), new, back, centred)
        for side, transform in enumerate((pages.key.transform, pages.value.transform)):
            expected = torch.stack(read[side])
            if back[side]:
                expected = transform.inverse(expected)
                if transform.mean is not None and (centred or side == 0):
                    expected = expected - transform.mean
            assert_near(found[side], expected, 2**-10)


# --- attention


@READERS
@pytest.mark.parametrize(
    "recipes",
    [
        *("int8:group=16", "saw-int4:values=true,order=16", "oscar-int2", "gtq-k3v3", "bf16"),
        *("int8 / bf16", "tq-k3v3 / saw-int4", "fold3"),
    ],
)
def test_recipes(recipes, library):
    world = World(codecs(recipes, 32, 2), 2, block=16)
    world.fill(27, 0)
    step(world, (3, 19), library)


@pytest.mark.parametrize("library", [None, fakes.LIBRARIES[0]])
@pytest.mark.parametrize(
    ("dims", "kv_heads", "ratio"),
    [(16, 1, 1), (80, 1, 3), (96, 3, 2), (128, 2, 4), (192, 1, 2), (256, 1, 2), (32, 2, 7)],
)
def test_shapes_of_heads(dims, kv_heads, ratio, library):
    world = World(codecs("int4", dims, kv_heads), kv_heads=kv_heads, ratio=ratio, block=8)
    world.fill(21)
    step(world, (18,), library)


@READERS
@pytest.mark.parametrize("block", [0, 1, 8, 12, 40])
def test_blocks(block, library):
    """Of fewer tokens than a page and of more, dividing it or not. Steps begin and end inside blocks and at borders.
    Some sequences have no tokens."""
    world = World(codecs("saw-int4:values=true", 16, 1), 4, kv_heads=1, block=block)
    for counts in ((29, 0, 16, 1), (1, 23, 0, 3)):
        step(world, counts, library)


@pytest.mark.pairs
@pytest.mark.parametrize("library", [None, *fakes.LIBRARIES])
@pytest.mark.parametrize("block", [0, 8, 64])
@pytest.mark.parametrize("before", [151, 180])
def test_contexts_beyond_the_workspace(before, block, library):
    world = World(codecs("saw-int4:values=true", 16, 1), 2, kv_heads=1, block=block)
    world.fill(before, 30)
    step(world, (18, 3), library)


@pytest.mark.pairs
@READERS
@pytest.mark.parametrize("cost", [0, 1000])
@pytest.mark.parametrize("recipes", ["saw-int4:values=true", "saw-int4", "oscar-int2:per_head=true"])
def test_keys_and_values_or_queries_and_outputs_are_rotated(recipes, cost, library, monkeypatch):
    monkeypatch.setattr(unpacked, "QUERY_COST", cost)
    world = World(codecs(recipes, 32, 2), 2, block=8)
    world.fill(5, 90)
    step(world, (18, 17), library)


@pytest.mark.pairs
@READERS
@pytest.mark.parametrize("block", [0, 16])
@pytest.mark.parametrize("recipes", ["int4", "saw-int4:values=true"])
def test_learned_sinks(recipes, block, library):
    world = World(codecs(recipes, 32, 2), 2, sinks=True, block=block)
    world.fill(27, 70)
    step(world, (3, 19), library)


@pytest.mark.pairs
@pytest.mark.parametrize("recipes", ["int4", "tq-k4v4"])  # whose queries are those of the engine, or turned ones
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("library", [None, fakes.LIBRARIES[0]])
def test_queries_in_any_type_and_order(recipes, dtype, library):
    world = World(codecs(recipes, 32, 1), 2, kv_heads=1, ratio=3, block=8, dtype=dtype)
    world.fill(9, 25)
    pages, new = world.fill(4, 17)
    by_head = world.randn(world.q_heads, 21, 32).transpose(0, 1)
    among_others = world.randn(21, world.q_heads + 4, 32)[:, 1 : world.q_heads + 1]
    for q in (by_head, among_others):
        check(pages, q, new, world.logits, library)


@READERS
@pytest.mark.parametrize("counts", [(1, 1), (DRAFTED, 3), (0, 0)])
def test_few_queries_are_left_to_the_portable_kernel(counts, library, monkeypatch):
    """It reads the open block's older tokens in rings: `store` does not return them."""
    world = World(codecs("int4", 32, 2), 2, block=16)
    world.fill(30, 44)
    monkeypatch.setattr(unpacked, "dequantize", lambda *_, **__: pytest.fail("unpacked"))
    pages, new = world.fill(*counts)
    assert len(new[0]) == sum(counts)
    q = world.queries()
    out = unpacked.attend(pages, q, new, world.logits, library=library)
    assert out.shape == q.shape
    if len(q):
        compare(out, pages, q, new, world.logits)


@pytest.mark.parametrize(("library", "alone"), [(None, True), (fakes.LIBRARIES[0], False)])
def test_a_few_more_are_read_by_the_portable_kernel_only_without_flash_attention_3(library, alone, monkeypatch):
    monkeypatch.setattr(unpacked, "MIN_QUERIES", DRAFTED + 3)
    asked = []
    monkeypatch.setattr(portable, "attend", lambda pages, *_: asked.append(pages.step.max_queries))
    world = World(codecs("int4", 16, 1), kv_heads=1, block=16)
    for count in (DRAFTED + 2, DRAFTED + 3):
        pages, new = world.fill(count)
        unpacked.attend(pages, world.queries(), new, world.logits, library=library)
    assert asked == [DRAFTED + 2] * alone


@pytest.mark.pairs
@READERS
@pytest.mark.parametrize("recipes", ["int4", "saw-int4:values=true"])
@pytest.mark.parametrize(("before", "counts"), [((0, 0), (19, 2)), ((30, 90), (19, 19))])
def test_outputs_go_where_they_are_wanted(recipes, before, counts, library):
    """In the type of that tensor, which may be a part of another one."""
    world = World(codecs(recipes, 32, 2), 2, block=8)
    if any(before):
        world.fill(*before)
    pages, new = world.fill(*counts)
    q = world.queries()
    expected = unpacked.attend(pages, q, new, world.logits, library=library)
    around = torch.full((len(q) + 2, *q.shape[1:]), torch.nan, dtype=torch.float16, device=DEVICE)
    found = unpacked.attend(pages, q, new, world.logits, around[1:-1], library)
    assert found.data_ptr() == around[1:-1].data_ptr()
    torch.testing.assert_close(around[1:-1].float(), expected, rtol=2**-9, atol=2**-14)
    assert around[[0, -1]].isnan().all()


@pytest.mark.parametrize("block", [0, 8])
@pytest.mark.parametrize(
    ("before", "counts", "direct"),
    [
        ((0, 0, 0), (17, 1, 3), [True]),  # in one call
        ((0,), (20,), [True]),
        ((130,), (20,), [False, False]),  # in two, whose parts are merged
    ],
)
def test_a_single_call_writes_where_outputs_are_wanted(before, counts, direct, block, monkeypatch):
    places: list[bool] = []

    def recorded(function: Any) -> Any:
        def call(*args: Tensor, **options: Any) -> Any:
            places.append(options["out"] is not None)
            return function(*args, **options)

        return call

    functions = {name: recorded(function) for name, function in vars(fakes.MODULES[SGLANG]).items()}
    monkeypatch.setattr(portable, "attend", lambda *_: pytest.fail("the portable kernel reads"))
    world = World(codecs("int4", 32, 2), len(counts), block=block)
    if any(before):
        world.fill(*before)
    step(world, counts, Library(SGLANG, SimpleNamespace(**functions)))
    assert places == direct


@pytest.mark.pairs
@READERS
@pytest.mark.parametrize("block", [0, 8, 24])
@pytest.mark.parametrize("recipes", ["int4", "tq-k3v3 / bf16"])
def test_what_no_query_reads_may_be_anything(recipes, block, library):
    """NaN in all rings, and in every slot that no query reads packed."""
    world = World(codecs(recipes, 16, 1), 2, kv_heads=1, block=block)
    world.fill(40, 20)
    pages, new = world.fill(19, 2)
    pages.ring.fill_(torch.nan)
    for row, length in enumerate(pages.step.known.lengths):
        for token in range(raw_from(length - 1, pages.block), length):
            page, offset = pages.step.table[row, token // 16], token % 16
            for _, (codes,), (meta,) in pages.views:
                codes[page, offset], meta[page, offset] = 0xFF, torch.nan
    check(pages, world.queries(), new, world.logits, library)


# --- what is read


class Token(NamedTuple):
    row: int
    position: int
    raw: bool


def found(read: Read) -> list[list[Token]]:
    """The tokens that each query of a read reads, over all chunks."""
    queries: list[list[Token]] = [[] for _ in range(read.queries.start, read.queries.stop)]
    for chunk in read.chunks:
        tokens, reach = chunk.tokens.locations, chunk.reach
        if isinstance(reach, Paged):
            sequences = []
            for pages, count in zip(reach.table.tolist(), reach.tokens.tolist(), strict=True):
                held = [page * PAGE + i for page in pages for i in range(PAGE)][:count]
                sequences.append([tokens[i] for i in held])
        elif isinstance(reach, Ends):
            sequences = [tokens[first:end] for first, end in pairwise(reach.tokens.tolist())]
        elif reach is None:
            for read_by in queries:
                read_by += tokens
            continue
        else:
            for i, read_by in enumerate(queries):
                allowed = (reach.first <= reach.position + i) & (reach.position + i < reach.end)
                read_by += [token for token, is_read in zip(tokens, allowed.tolist(), strict=True) if is_read]
            continue
        causal = isinstance(reach, Paged) or reach.causal
        for (first, end), read_tokens in zip(pairwise(reach.queries.tolist()), sequences, strict=True):
            for i in range(first, end):
                seen = read_tokens[: len(read_tokens) - (end - 1 - i if causal else 0)]
                assert seen, "FlashAttention 3 returns nothing useful for a query without tokens"
                queries[i] += seen
    return queries


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name unpacked tokens, instead of saying where they lie."""

    def of(step: Step, block: int, spans: list[Span]) -> Any:
        return SimpleNamespace(
            locations=[
                Token(span.row, position, position >= span.raw_from)
                for span in spans
                for position in [*span.tokens, *[span.tokens.start] * span.padding]
            ]
        )

    monkeypatch.setattr(prompt_reads, "Tokens", SimpleNamespace(of=of))


def a_step(starts: list[int], lengths: list[int]) -> Step:
    table = torch.zeros(len(starts), max(lengths), dtype=torch.int64)
    return Step.of(HostLengths(starts, lengths), table, table[:, :1], 1)


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("block", [0, 1, 3, 8, 12, 16, 40])
def test_every_query_reads_its_own_block_raw_and_all_before_it_packed(block, library):
    """Once, whatever the lengths and the borders."""
    generator = torch.Generator().manual_seed(block)
    for _ in range(3):
        counts, starts = (torch.randint(0, most, (3,), generator=generator).tolist() for most in (70, 200))
        counts[int(torch.randint(0, 3, (1,), generator=generator))] += 17
        if not int(torch.randint(0, 2, (1,), generator=generator)):
            starts = [0, 3, 8]
        step = a_step(starts, [start + count for start, count in zip(starts, counts, strict=True)])
        reads, most = reads_of(step, block, ROOM, library)
        assert most == max(len(chunk.tokens.locations) for read in reads for chunk in read.chunks)
        assert most <= max(ROOM, 4 * block + 4 * PAGE) + 7
        got = [sorted(tokens) for read in reads for tokens in found(read)]
        expected = [
            [Token(row, j, block > 0 and j >= raw_from(position, block)) for j in range(position + 1)]
            for row, (start, length) in enumerate(zip(*step.known, strict=True))
            for position in range(start, length)
        ]
        assert got == expected


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("block", [0, 16, 64, 100, 256, 4096])
@pytest.mark.parametrize(("start", "count"), [(0, 8192), (77, 20000), (66_000, 512)])
def test_the_workspace_is_bounded(start, count, block, library, monkeypatch):
    for module in (flash_attention_3, prompt_reads):
        monkeypatch.setattr(module, "PAGE", 128)
    room = 2**15
    reads, most = reads_of(a_step([start], [start + count]), block, room, library)
    assert most <= room + 7  # that pad rows of the mask
    assert [read.queries.start for read in reads] == [0, *(read.queries.stop for read in reads[:-1])]
    assert reads[-1].queries.stop == count
    if library and (start, count) == (0, 8192) and block in (0, 64, 256):
        assert len(reads) == len(reads[0].chunks) == 1, "a prompt that fits is read in one call"


# --- numbers


@READERS
def test_large_logits(library):
    """A query like one key gets the value of that key alone, wherever it lies."""
    dims, tokens = 64, 40
    world = World(codecs("int8:centre=false", dims, 1), kv_heads=1, ratio=1, dtype=torch.float32, block=16)
    world.cache.extend([tokens])
    pages = world.cache.pages(LAYER)
    k, v = 40 * world.randn(tokens, 1, dims).sign(), world.randn(tokens, 1, dims)
    new = store(pages, k, v)
    own = torch.stack([naive.read(pages, 0, t, new)[1][t] for t in range(tokens)])
    out = unpacked.attend(pages, k, new, world.logits, library=library)
    torch.testing.assert_close(out, pages.value.transform.inverse(own), rtol=0, atol=2**-9 * own.norm(dim=-1).max())
    assert unpacked.attend(pages, -k, new, world.logits, library=library).isfinite().all()


@READERS
def test_equal_logits_far_below_zero(library):
    world = World(codecs("int8:centre=false", 64, 1), kv_heads=1, ratio=1, dtype=torch.float32)
    world.cache.extend([40])
    pages = world.cache.pages(LAYER)
    k, v = torch.full((40, 1, 64), 40.0, device=DEVICE), world.randn(40, 1, 64)
    out = unpacked.attend(pages, -k, store(pages, k, v), world.logits, library=library)
    means = naive.read(pages, 0, 39, None)[1].cumsum(0) / torch.arange(1, 41, device=DEVICE)[:, None, None]
    torch.testing.assert_close(out, means.expand_as(out), rtol=0, atol=2**-9 * v.abs().max().item())


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("wanted", [False, True])
def test_merged_parts(count, wanted):
    generator = torch.Generator().manual_seed(0)
    parts, logs = torch.randn(count, 9, 2, 80, generator=generator), 9 * torch.randn(count, 9, 2, generator=generator)
    mean = torch.randn(1, 80, generator=generator)
    to = Target(torch.full((9, 2, 80), torch.nan, device=DEVICE), None, mean.to(DEVICE)) if wanted else None
    merged = None
    for i, (part, log) in enumerate(zip(parts.to(DEVICE), logs.to(DEVICE), strict=True)):
        by_head = Part(*(x.transpose(0, 1).contiguous().transpose(0, 1) if i % 2 else x for x in (part, log)))
        merged = unpacked._merged(merged, by_head, to if i == count - 1 else None)
    expected = (torch.softmax(logs.double(), dim=0).unsqueeze(-1) * parts).sum(dim=0)
    torch.testing.assert_close(merged.outs.cpu().double(), expected + wanted * mean, rtol=0, atol=2**-18)
    assert to is None or merged.outs is to.outs
    if not wanted:
        torch.testing.assert_close(merged.logs.cpu().double(), logs.double().logsumexp(dim=0), rtol=0, atol=2**-18)


# --- who gets it


@pytest.mark.parametrize(
    ("dims", "capability", "implementation", "reason"),
    [
        (128, (9, 0), "unpacked", "attention of torch"),
        (96, (8, 0), "unpacked", "attention of torch"),
        (512, (9, 0), "triton", "heads have 512 dims"),
        ((192, 128), (9, 0), "triton", "keys have 192 dims and values 128, and flash attention takes equal ones"),
    ],
)
def test_choice(dims, capability, implementation, reason):
    key, value = (dims, dims) if isinstance(dims, int) else dims
    layout = PageLayout(affine_slot(key, 4), affine_slot(value, 4), 16)
    choice = choose(layout, 4, torch.device("cuda"), capability).extend
    assert choice.implementation == implementation
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("slot", "reason"),
    [
        (channel_slot(128, 2), "keys are not unpacked: whole pages are quantized together"),
        (SlotLayout(affine_slot(128, 4).segments, centroid=True), "keys are not unpacked: slots name a centroid"),
        (mixed_slot([affine_slot(128, 4)] * 2), "keys are not unpacked: KV heads have layouts of their own"),
    ],
    ids=["channel", "centroid", "heads"],
)
def test_what_is_attended_and_not_unpacked(slot, reason):
    ops = choose(PageLayout(slot, affine_slot(128, 4), 32), 4, torch.device("cuda"), (9, 0))
    assert (ops.extend.implementation, ops.extend.reason) == ("triton", reason)
    assert ops.decode.implementation == "triton"
    assert (ops.store.implementation, ops.store.run) == ("torch", store)
