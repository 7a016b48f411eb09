"""`attend` on unpacked chunks against its definition, and what unpacks them, on pages that the definition of `store`
wrote. Without a GPU kernels run in Triton's interpreter, and attention is that of torch for CPUs, in float32."""

import math
from types import SimpleNamespace
from typing import Any

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
from kvfold.format.windows import Windows
from kvfold.ops import naive
from kvfold.ops.attend import attend_gpu as portable
from kvfold.ops.attend import unpacked_prefill as unpacked
from kvfold.ops.attend.diagonal_kernel import Diagonal, Heads, Near, Part, Target
from kvfold.ops.attend.flash_attention_3 import SGLANG, Library
from kvfold.ops.dequantize_gpu import Span, Tokens, dequantize
from kvfold.ops.dispatch import choose
from kvfold.ops.naive import store
from kvfold.ops.pages import LayerPages, Logits, Step
from kvfold.ops.sizes import power_of_two

ROOM = 16  # tokens
OPERAND = torch.float16 if DEVICE == "cuda" else torch.float32  # of tensor cores, or of the interpreter
ROUNDING = 2.0**-11  # of outputs of chunks, which torch gives in float16 on a GPU


pytestmark = pytest.mark.usefixtures("_poisoned_memory")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 3 queries and 4 packed tokens on, in a workspace of 16 tokens, in chunks of 16, 8 and 4, with
    queries padded to powers of two from 4 on. cuDNN has a mask for multiples of 8."""
    for name, size in (
        *(("MIN_QUERIES", 3), ("MIN_TOKENS", 4), ("MOST_TOKENS", ROOM), ("CHUNK_STEP", 16)),
        *(("FEWEST_QUERIES", 4), ("CAUSAL_STEP", 8)),
    ):
        monkeypatch.setattr(unpacked, name, size)


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, range]]]:
    """What is unpacked for flash attention, per chunk: of which sequence, by its first page, and which tokens of it."""
    seen: list[list[tuple[int, range]]] = []

    def recorded(step: Step, sink: int, spans: list[Span]) -> Tokens:
        packed = [span for span in spans if span.tokens and span.raw_from == span.tokens.stop]
        seen.append([(int(step.table[span.row, 0]), span.tokens) for span in packed])
        return Tokens.of(step, sink, spans)

    monkeypatch.setattr(unpacked, "Tokens", SimpleNamespace(of=recorded))
    return seen


def step(world: World, *counts: int) -> None:
    """Store new tokens, and check what their queries get."""
    pages, new = world.fill(*counts)
    check(pages, world.queries(), new, world.logits)


def check(
    pages: LayerPages, q: Tensor, new: tuple[Tensor, Tensor] | None, logits: Logits, library: Library | None = None
) -> None:
    out = unpacked.attend(pages, q, new, logits, library=library)
    assert out.dtype == torch.float32
    assert out.shape == q.shape
    assert out.isfinite().all()
    coarser = 8 if DEVICE == "cuda" and q.dtype == torch.bfloat16 else 1  # three bits
    compare(out, pages, q, new, logits, coarser * ROUNDING, coarser)


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
    world = World((Codec(slot, unit=0.5), Codec(affine_slot(slot.dims, 4))), 2)
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
@pytest.mark.parametrize("raw_from", [None, 50])
def test_unpacked_tokens_are_rotated_back(recipes, raw_from):
    """Also raw ones: of the sink, and from `raw_from` on, in shadows and in the step. Values also get their mean."""
    world = World(codecs(recipes, 64, 2), 2, sink=3, recent=12)
    world.fill(20, 55)
    pages, new = world.fill(1, 14)
    start = 45 if raw_from else 0
    tokens = range(start, 69 if raw_from else 57)
    raw = {token for token in tokens if token < 3 or (raw_from and token >= raw_from)}
    early, late = (
        naive.read(pages, 1, position, new) for position in (60, 68)
    )  # a query that reads 50 raw, and the last one
    for back, centred in (((True, True), True), ((True, True), False), ((False, True), True), ((False, False), True)):
        found = torch.empty(2, len(tokens), 2, 64, dtype=OPERAND, device=DEVICE)
        spans = [Span(1, tokens, raw_from or tokens.stop)]
        dequantize(pages, Tokens.of(pages.step, 3, spans), found.unbind(0), new, back, centred)
        for side, transform in enumerate((pages.key.transform, pages.value.transform)):
            read = [early if token in raw and token <= 60 else late for token in tokens]
            expected = torch.stack([states[side][token] for token, states in zip(tokens, read, strict=True)])
            if back[side]:
                expected = transform.inverse(expected)
                if transform.mean is not None and (centred or side == 0):
                    expected = expected - transform.mean
            assert_near(found[side], expected)


def assert_near(x: Tensor, expected: Tensor) -> None:
    assert relative_error(x, expected) <= (2**-10 if DEVICE == "cuda" else 2**-20)


# --- attention


@pytest.mark.parametrize(
    "recipes",
    [
        *("int8:group=16", "saw-int4:values=true,order=16", "oscar-int2", "gtq-k3v3", "bf16"),
        *("int8 / bf16", "tq-k3v3 / saw-int4", "fold3"),
    ],
)
def test_recipes(recipes):
    world = World(codecs(recipes, 32, 2), 2, sink=3, recent=5)
    world.fill(27, 0)
    step(world, 3, 13)


@pytest.mark.parametrize(
    ("dims", "kv_heads", "ratio"),
    [(16, 1, 1), (80, 1, 3), (96, 3, 2), (128, 2, 4), (192, 1, 2), (256, 1, 2), (32, 2, 7)],
)
def test_shapes_of_heads(dims, kv_heads, ratio):
    world = World(codecs("int4", dims, kv_heads), kv_heads=kv_heads, ratio=ratio, recent=2)
    world.fill(40)
    step(world, 5)


@pytest.mark.parametrize(
    ("sink", "recent"),
    [(1, 0), (20, 0), (0, 1), (0, 9), (3, 4), (16, 17), (34, 2), (2, 34), (37, 0), (0, 40)],
)
def test_windows(sink, recent):
    """Also such that no query, or only some, read anything packed."""
    world = World(codecs("int4", 16, 1), kv_heads=1, sink=sink, recent=recent)
    world.fill(31)
    step(world, 8)


@pytest.mark.parametrize("recipes", ["int4", "saw-int4:values=true"])
@pytest.mark.parametrize("windows", [{}, {"sink": 3, "recent": 7}])
def test_learned_sinks(recipes, windows):
    world = World(codecs(recipes, 32, 2), 2, sinks=True, **windows)
    world.fill(27, 0)
    step(world, 3, 13)


@pytest.mark.parametrize("windows", [{}, {"sink": 3, "recent": 7}])
@pytest.mark.parametrize("page_size", [1, 24])
def test_histories(page_size, windows):
    """Chunked prefill from the first token on, with more queries than a block takes."""
    world = World(codecs("int4", 16, 1), kv_heads=1, page_size=page_size, **windows)
    for count in (21, 1, 4, 18):
        step(world, count)


@pytest.mark.parametrize("windows", [{}, {"sink": 2, "recent": 6}])
@pytest.mark.parametrize(
    ("before", "counts", "many"),
    [
        ((20, 33), (3, 5), {0, 1}),
        ((30, 0, 33, 0), (5, 3, 1, 0), {0}),  # too few tokens, too few queries, none at all
        ((0, 40, 3, 9), (1, 5, 0, 12), {1, 3}),
        ((20, 1), (2, 1), set()),
    ],
)
def test_batches(before, counts, many, windows, chunks):
    """Sequences of different lengths, of which some take the portable kernel."""
    world = World(codecs("saw-int4", 16, 2), len(counts), **windows)
    world.fill(*before)
    pages, new = world.fill(*counts)
    check(pages, world.queries(), new, world.logits)
    assert len({row for chunk in chunks for row, _ in chunk}) == len(many)


@pytest.mark.parametrize("recipes", ["int4", "tq-k4v4"])  # whose queries are those of the engine, or turned ones
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("library", [None, fakes.LIBRARIES[0]])
def test_queries_in_any_type_and_order(recipes, dtype, library):
    world = World(codecs(recipes, 32, 1), 2, kv_heads=1, ratio=3, recent=4, dtype=dtype)
    world.fill(9, 25)
    pages, new = world.fill(4, 5)
    by_head = world.randn(world.q_heads, 9, 32).transpose(0, 1)
    among_others = world.randn(9, world.q_heads + 4, 32)[:, 1 : world.q_heads + 1]
    for q in (by_head, among_others):
        check(pages, q, new, world.logits, library)


def test_steps_without_tokens_or_with_few_are_left_to_the_portable_kernel(monkeypatch):
    world = World(codecs("int4", 32, 2), 2)
    world.fill(30, 40)
    monkeypatch.setattr(unpacked, "_attend", lambda *_: pytest.fail("unpacked"))
    step(world, 2, 1)
    world.cache.extend([0, 0])
    pages = world.cache.pages(LAYER)
    assert unpacked.attend(pages, world.queries(), None, world.logits).shape == (0, world.q_heads, 32)


@pytest.mark.pairs
@pytest.mark.parametrize("recipes", ["int4", "saw-int4:values=true"])
@pytest.mark.parametrize("recent", [0, 6])
@pytest.mark.parametrize("counts", [(19, 19), (19, 12)])
def test_outputs_go_where_they_are_wanted(recipes, recent, counts):
    """In the type of that tensor, which may be a part of another one."""
    world = World(codecs(recipes, 32, 2), 2, recent=recent)
    world.fill(30, 17)
    pages, new = world.fill(*counts)
    q = world.queries()
    expected = unpacked.attend(pages, q, new, world.logits)
    around = torch.full((len(q) + 2, *q.shape[1:]), torch.nan, dtype=torch.float16, device=DEVICE)
    assert unpacked.attend(pages, q, new, world.logits, around[1:-1]).data_ptr() == around[1:-1].data_ptr()
    torch.testing.assert_close(around[1:-1].float(), expected, rtol=2**-9, atol=2**-14)
    assert around[[0, -1]].isnan().all()


FIRST, NEXT = ((0,), (8,), 1), ((9,), (7,), 1)  # tokens before and new ones per sequence, and chunks
SEVERAL = ((0, 6, 0, 1, 4, 0), (2, 1, 3, 2, 0, 5), 2)  # together they do not fit
BESIDE_LONG = ((2, 36, 5), (3, 11, 4), 8)  # a long context between short ones
LONG_LAST = ((1, 1, 30), (5, 3, 10), 7)  # the first chunk is smaller than others
ALONE = ((0, 4, 0), (2, 6, 3), 3)  # together they would fit, but one of them fills more than half of a chunk


@pytest.mark.parametrize(
    ("recipes", "windows", "library", "requests"),
    [
        ("saw-int4", {}, 0, FIRST),
        ("saw-int4", {}, 0, SEVERAL),
        ("saw-int4", {}, 0, ALONE),
        ("saw-int4", {}, 2, LONG_LAST),
        ("saw-int4:values=true,order=16", {}, 1, NEXT),
        ("saw-int4:values=true,order=16", {}, 1, SEVERAL),
        ("int4", {"sink": 3}, 2, BESIDE_LONG),
        ("fold3", {"sink": 3, "recent": 4}, 1, FIRST),
        ("fold3", {"sink": 3, "recent": 4}, 1, SEVERAL),
        ("oscar-int2", {"sink": 3, "recent": 14}, 2, BESIDE_LONG),
        ("int4", {"sinks": True, "recent": 2}, 0, SEVERAL),
    ],
)
def test_flash_attention_3(recipes, windows, library, requests, chunks, monkeypatch):
    """Of all packages, it reads chunks of several sequences instead of torch, and no graph of cuDNN is built."""
    before, counts, read = requests
    world = World(codecs(recipes, 16, 2), len(before), **windows)
    world.fill(*before)
    pages, new = world.fill(*counts)
    monkeypatch.setattr(unpacked, "_flash", lambda *_: pytest.fail("torch reads chunks"))
    monkeypatch.setattr(portable, "attend", lambda *_: pytest.fail("the portable kernel reads"))
    unpacked.build_graphs(pages, world.q_heads // world.kv_heads, fakes.LIBRARIES[library])
    for _ in range(2):  # the second time as another layer of the step, for which everything is found already
        check(pages, world.queries(), new, world.logits, fakes.LIBRARIES[library])
    assert max(sum(len(tokens) for _, tokens in chunk) for chunk in chunks) <= ROOM
    if not windows.get("recent"):
        assert len(chunks) == read


@pytest.mark.parametrize(("before", "recent", "direct"), [(0, 0, [True]), (20, 0, [False] * 4), (0, 4, [False])])
def test_flash_attention_3_writes_a_single_part_where_it_is_wanted(before, recent, direct):
    """Its outputs are not copied. Causal chunks may have more tokens than queries, and there are few chunks."""
    world = World(codecs("int4", 32, 2), recent=recent)
    world.fill(before)
    pages, new = world.fill(8 if not before else 10)
    places: list[bool] = []

    def recorded(*args: Tensor, **options: Any) -> Any:
        places.append(options["out"] is not None)
        return fakes.sglang_kvcache(*args, **options)

    library = Library(SGLANG, SimpleNamespace(flash_attn_with_kvcache=recorded))
    check(pages, world.queries(), new, world.logits, library)
    assert places == direct


# --- what is unpacked


@pytest.mark.parametrize(("sink", "recent"), [(0, 0), (5, 6), (18, 12)])
@pytest.mark.parametrize("recipes", ["int4", "tq-k3v3 / bf16"])
def test_what_no_query_reads_packed_may_be_anything(recipes, sink, recent):
    world = World(codecs(recipes, 16, 1), 2, kv_heads=1, sink=sink, recent=recent)
    world.fill(40, 20)
    pages, new = world.fill(6, 2)
    for row, length in enumerate(pages.step.known.lengths):
        for token in (*range(sink), *range(max(sink, length - recent), length)):
            page, offset = pages.step.table[row, token // 16], token % 16
            for _, (codes,), (meta,) in pages.views:
                codes[page, offset], meta[page, offset] = 0xFF, torch.nan
    check(pages, world.queries(), new, world.logits)


@pytest.mark.parametrize(("sink", "recent"), [(0, 0), (3, 5)])
def test_chunks_of_a_step(sink, recent, chunks):
    """Every block of 8 queries reads every token before its recent windows once, the sink among them."""
    world = World(codecs("int4", 16, 1), kv_heads=1, sink=sink, recent=recent)
    world.fill(40)
    step(world, 19)
    ends = (48, 56, 59)  # of blocks
    expected = [token for end in ends for token in range(end - recent)]
    assert [token for [(_, tokens)] in chunks for token in tokens] == expected
    assert max(len(tokens) for [(_, tokens)] in chunks) == ROOM


@pytest.mark.parametrize("room", [2, 16, 64, 16384])
@pytest.mark.parametrize("masked", [False, True])
def test_sizes_of_chunks(room, masked, monkeypatch):
    """Those without a mask have few sizes, since cuDNN builds a graph for each; the others fit in the workspace. Where
    cuDNN has a mask for the queries, what all of them see is apart, whatever its size."""
    monkeypatch.setattr(unpacked, "CHUNK_STEP", max(2, room // 4))
    usual = set(unpacked._sizes(room, 3))
    assert len(usual) <= 12
    assert max(usual) == room
    for n in {1, room // 4 + 1, room // 2}:
        for shared in (0, 3, room // 3, room, 3 * room, 5 * room - 1):
            *full, (rest, last) = unpacked._chunks(shared, shared + n, unpacked._sizes(room, 3), masked)
            assert last
            assert not any(causal for _, causal in full)
            assert [token for tokens, _ in full for token in tokens] == list(range(rest.start))
            assert n <= len(rest) <= room
            assert rest.stop == shared + n
            if masked:
                assert len(rest) == n
            assert all(len(tokens) in usual for tokens, _ in (full[:-1] if masked else full))


@pytest.mark.parametrize(("sink", "recent"), [(0, 0), (3, 5)])
def test_graphs_of_cudnn_are_known_before_the_first_prompt(sink, recent, monkeypatch):
    seen: set[tuple[object, ...]] = set()
    flash = unpacked._flash

    def recorded(q, k, v, scale, causal, usual):
        if usual:
            n = len(q) if causal else max(4, power_of_two(len(q)))
            seen.add((n, q.shape[1:], q.stride(), q.dtype, k.shape, k.stride(), causal))
        return flash(q, k, v, scale, causal, usual)

    monkeypatch.setattr(unpacked, "_flash", recorded)
    world = World(codecs("int4", 16, 2), sink=sink, recent=recent)
    pages, _ = world.fill(1)
    unpacked.build_graphs(pages, world.q_heads // world.kv_heads)
    built = set(seen)
    seen.clear()
    for n in (40, 19, 8, 4, 5, 16, 31):
        step(world, n)
    assert {causal for *_, causal in seen} == {False, True}
    assert seen <= built


# --- numbers


def test_large_logits():
    """A query like one key gets the value of that key alone, wherever it lies."""
    dims, tokens = 64, 40
    world = World(codecs("int8:centre=false", dims, 1), kv_heads=1, ratio=1, dtype=torch.float32, recent=5)
    world.cache.extend([tokens])
    pages = world.cache.pages(LAYER)
    k, v = 40 * world.randn(tokens, 1, dims).sign(), world.randn(tokens, 1, dims)
    new = store(pages, k, v)
    own = torch.stack([naive.read(pages, 0, t, new)[1][t] for t in range(tokens)])
    out = unpacked.attend(pages, k, new, world.logits)
    torch.testing.assert_close(out, pages.value.transform.inverse(own), rtol=0, atol=2**-9 * own.norm(dim=-1).max())
    assert unpacked.attend(pages, -k, new, world.logits).isfinite().all()


def test_equal_logits_far_below_zero():
    world = World(codecs("int8:centre=false", 64, 1), kv_heads=1, ratio=1, dtype=torch.float32)
    world.cache.extend([40])
    pages = world.cache.pages(LAYER)
    k, v = torch.full((40, 1, 64), 40.0, device=DEVICE), world.randn(40, 1, 64)
    out = unpacked.attend(pages, -k, store(pages, k, v), world.logits)
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


@pytest.mark.parametrize(
    ("n", "position", "token", "lag", "reach"),
    [
        (70, 0, 0, 0, 10),  # the recent windows of a first chunk
        (37, 90, 80, 0, 11),  # and of a later one
        (37, 90, 0, 20, 1000),  # everything before windows
        (5, 8, 8, 0, 1000),  # the step's own tokens
        (20, 0, 0, 6, 1000),  # of which the first queries read none
    ],
)
@pytest.mark.parametrize("known", [None, 0, 3])  # the first query that has another part
def test_near_the_diagonal(n, position, token, lag, reach, known):
    generator, scale, length = torch.Generator().manual_seed(0), 0.2, position + n - token
    shape = length, 2, 24
    q, *kv = (torch.randn(shape, generator=generator) for shape in ((n, 6, 24), shape, shape))
    part, where = None, torch.arange(position, position + n)[:, None] - lag - torch.arange(token, token + length)
    k, v = (x.double().repeat_interleave(3, dim=1).transpose(0, 1) for x in kv)
    logits = scale * torch.einsum("nhd,htd->nht", q.double(), k)
    weights = logits.masked_fill(((where < 0) | (where >= reach))[:, None], -math.inf)
    values = v.expand(n, -1, -1, -1)
    if known is not None:
        part = Part(torch.randn(n, 6, 24, generator=generator), torch.randn(n, 6, generator=generator))
        part.outs[:known], part.logs[:known] = math.nan, math.nan
        others = torch.full((n, 6, 1), -math.inf, dtype=torch.float64), torch.zeros(n, 6, 1, 24, dtype=torch.float64)
        others[0][known:, :, 0], others[1][known:, :, 0] = part.logs[known:].double(), part.outs[known:].double()
        weights, values = torch.cat((weights, others[0]), dim=-1), torch.cat((values, others[1]), dim=2)
    expected = (torch.softmax(weights, dim=-1).nan_to_num().unsqueeze(-1) * values).sum(dim=2)
    logs = weights.logsumexp(dim=-1).clamp_min(-1e29)
    # among others: two sequences with the same queries and tokens, in another order
    q, k, v = (x.to(DEVICE, OPERAND).repeat(2, 1, 1) for x in (q, *kv))
    part = part and Part(*(x.to(DEVICE).repeat(2, *[1] * (x.ndim - 1)) for x in part))
    sequences = [Near(0, n, position, token, length), Near(n, n, position, token, 0)]
    diagonal = Diagonal.of(sequences, lag, reach, Heads(3, 24), q.device)
    found = diagonal.attend(q, k, v, scale, part, position + (known or 0), None)
    bound = 2**-8 if DEVICE == "cuda" else 2**-18
    for rows in (slice(n), slice(n, None)):
        torch.testing.assert_close(found.outs[rows].cpu().double(), expected, rtol=0, atol=bound)
        torch.testing.assert_close(found.logs[rows].cpu().double().clamp_min(-1e29), logs, rtol=0, atol=bound)


# --- who gets it


@pytest.mark.parametrize(
    ("dims", "capability", "implementation", "reason"),
    [
        (128, (9, 0), "unpacked", "flash attention"),
        (96, (8, 0), "unpacked", "flash attention"),
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


def test_thresholds_count_what_is_packed_and_who_reads_it():
    """With windows, fewer queries than there are."""
    world = World(codecs("int4", 16, 1), kv_heads=1)
    for length, pays in ((10, False), (11, False), (12, True)):
        world.cache.crop(world.cache.lengths)
        world.cache.extend([length])
        assert (unpacked._kinds(world.cache.step, Windows(2, 6)) == [unpacked.Kind.LONG]) == pays
