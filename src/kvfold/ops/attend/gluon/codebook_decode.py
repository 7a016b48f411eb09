"""The Gluon kernel for codebooks. It works as the kernel for integers, but codes are looked up as levels.

Keys may have several segments, each with a norm and a product of its own. Values have one segment. Registers cannot
hold two tiles. So keys are loaded while values are multiplied, and values while keys are multiplied. That is early
enough: lookups take longer than loads. level_lookup.py says which words a lane loads, and how they become levels.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kvfold.format.layout import SlotLayout
from kvfold.ops.attend.gluon import level_lookup as levels
from kvfold.ops.attend.gluon.decode_tiles import (
    UNSEEN,
    differs,
    faded,
    float_pair,
    head_in,
    in_columns,
    joined,
    log2,
    logits_layout,
    logits_near,
    own_queries,
    own_tiles,
    packed_to,
    release_next,
    row_of,
    seen_by_each,
    seen_tokens,
    softmax,
    store_weights,
    wait_by,
    wait_for_stored,
    weights_operand,
    with_first,
)
from kvfold.ops.attend.gluon.level_lookup import Lookup, Word, codebook, coordinate, lane_lookups, lane_words, share
from kvfold.ops.attend.gluon.open_block import own_raw, read_raw

KEY_LANES, VALUE_LANES = gl.constexpr(levels.KEY_LANES), gl.constexpr(levels.VALUE_LANES)


class CodebookWords(NamedTuple):
    """The keys or the values of a page as 32-bit words. Tuples have one entry per segment."""

    start: tuple[int, ...]  # the first coordinate
    columns: tuple[int, ...]
    share: tuple[int, ...]  # how many lanes divide a column
    words: tuple[tuple[Word, ...], ...]  # that a lane loads
    lookups: tuple[tuple[Lookup, ...], ...]  # that a lane does
    word: tuple[int, ...]  # where the segment's codes begin in the codes of a token
    factor: tuple[float, ...]  # of norms
    segments: int
    per_token: int  # words of codes
    codes: int  # the word of a page at which codes begin
    meta: int  # the word at which metadata begin, half a word per token and segment


def key_words(slot: SlotLayout, codes: int, meta: int) -> CodebookWords:
    return _words(slot, codes, meta, levels.KEY_LANES)


def value_words(slot: SlotLayout, codes: int, meta: int) -> CodebookWords:
    return _words(slot, codes, meta, levels.VALUE_LANES)


def _words(slot: SlotLayout, codes: int, meta: int, lanes: int) -> CodebookWords:
    rows = []
    for segment, (byte, _) in zip(slot.segments, slot.places, strict=True):
        bits, columns = segment.bits, segment.dims // 32
        per_lane = share(columns, lanes), lane_words(bits, columns, lanes), lane_lookups(bits, columns, lanes)
        rows.append((segment.start, columns, *per_lane, byte // 4, 1 / codebook(bits).scale))
    start, columns_, shares, words, lookups, at, factors = zip(*rows, strict=True)
    whole = len(rows), slot.code_bytes // 4, codes // 4, meta // 4
    return CodebookWords(start, columns_, shares, words, lookups, at, factors, *whole)


@gluon.jit(
    do_not_specialize=["q_stride", "table_stride", "table_pages", "tokens", "groups", "ring_stride", "ring_blocks"],
    do_not_specialize_on_alignment=["table", "lengths", "query_starts", "starts", "rings"],
)
def decode(
    q,  # [tokens, q_heads, DIMS], tokens q_stride apart
    outs,
    weights,
    pool,
    table,
    lengths,
    scale,  # of logits, times log2(e)
    q_stride,
    table_stride,
    table_pages,
    query_starts,  # None: every sequence has one query
    tokens,  # of q, None as well
    groups,  # CTAs that share the queries of a sequence, None as well
    ring,  # all rings; None: there is no open block
    rings,  # int64[sequences, ring_blocks], rows ring_stride apart; None as well
    ring_stride,
    ring_blocks,
    starts,  # without an open block None as well
    near,  # float32[kv_heads, DIMS], in the queries' coordinates: what keys at position 0 are near; or None
    KEY: gl.constexpr,
    VALUE: gl.constexpr,
    DIMS: gl.constexpr,
    PAGE: gl.constexpr,
    PAGE_WORDS: gl.constexpr,
    RATIO: gl.constexpr,  # query heads per KV head
    QUERIES: gl.constexpr,  # of a CTA
    HEADS: gl.constexpr,  # QUERIES · RATIO, up to 4, 8 or 16
    COLUMNS: gl.constexpr,  # one or two per head
    ORDER: gl.constexpr,  # 1: queries come rotated
    BLOCK: gl.constexpr,  # tokens of the open block, 0: none
    RING: gl.constexpr,  # its blocks
    SHARED: gl.constexpr,  # not used: what is loaded goes to registers
    OVERLAP: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    LOGITS: gl.constexpr = logits_layout(HEADS)
    HEAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, LOGITS))
    head, kv_heads = gl.program_id(1), gl.num_programs(1)
    table += gl.program_id(2).to(gl.int64) * table_stride
    split, splits, token, tokens, live, shortest, length, latest = own_queries(
        query_starts, lengths, tokens, groups, RATIO, QUERIES
    )
    readers, less, raw, raw_end = own_raw(starts, split, splits, shortest, length, BLOCK, DIMS, PAGE, PAGE_WORDS)
    end, first, last, newest = own_tiles(split, splits, readers, less, length, latest, BLOCK)
    whole = packed_to(shortest, BLOCK)  # up to where all queries of the CTA read
    final = gl.maximum(first, last)  # the last tile to prefetch, which exists even if there is nothing to read
    pool += head.to(gl.int64) * PAGE_WORDS
    final_page = table_pages - 1

    row = (token * kv_heads + head) * RATIO
    q += token.to(gl.int64) * q_stride + head * (RATIO * DIMS)
    stride = kv_heads * RATIO
    if BLOCK > 0 and split < readers:
        part = (splits + split).to(gl.int64) * tokens * stride + row
        read_raw(
            q, outs + part * DIMS, weights + part, ring, rings, ring_stride, ring_blocks, scale, raw, raw_end, shortest,
            live, q_stride, stride, RING, BLOCK, DIMS, RATIO, QUERIES, HEADS, OVERLAP, 2048,
        )  # fmt: skip
    wait_for_stored(first, newest, OVERLAP)
    k_page, v_page = find_pages(table, first, final_page, kv_heads, PAGE)
    k = _load_keys(pool, k_page, first, KEY, PAGE, PAGE_WORDS)
    next_k_page, next_v_page = find_pages(table, gl.minimum(first + 1, final), final_page, kv_heads, PAGE)

    constants = ()  # one register each, instead of a move before every lookup
    for i in gl.static_range(len(all_constants(KEY, VALUE))):
        constants += (_constant(all_constants(KEY, VALUE)[i]),)
    wait_by(OVERLAP, "end")  # here in any case, while the first keys are loaded
    queries = ()
    for i in gl.static_range(len(KEY.start)):
        queries += (_queries(q, live, q_stride, KEY, i, DIMS, RATIO, QUERIES, HEADS, COLUMNS, MMA),)

    highest = gl.full([HEADS], UNSEEN, gl.float32, HEAD)
    lacking = logits_near(q, near, first, live, scale, q_stride, DIMS, RATIO, QUERIES, HEADS, HEAD)
    total = gl.zeros([8, HEADS], gl.float32, gl.SliceLayout(0, LOGITS))
    out = gl.zeros([DIMS, COLUMNS], gl.float32, MMA)
    for tile in range(first, last + 1):
        k_meta = _load_norms(pool, k_page, tile, KEY, PAGE, PAGE_WORDS)
        v = _load_values(pool, v_page, tile, VALUE, PAGE, PAGE_WORDS)
        v_meta = _load_norms(pool, k_page, tile, VALUE, PAGE, PAGE_WORDS)
        logits = gl.zeros([8, 8, HEADS], gl.float32, LOGITS)
        norms = _norms(k_meta, KEY, LOGITS)
        for i in gl.static_range(len(KEY.start)):
            products = mma_v2(
                _keys(k[i], constants, KEY, VALUE, i, MMA), queries[i], gl.zeros([64, COLUMNS], gl.float32, MMA)
            )
            logits += _by_head(products, HEADS, COLUMNS, LOGITS) * (norms[i] * (scale * KEY.factor[i]))
        norm = _norms(v_meta, VALUE, LOGITS)[0]

        following = gl.minimum(tile + 1, final)
        k_page, v_page = next_k_page, next_v_page
        k = _load_keys(pool, k_page, following, KEY, PAGE, PAGE_WORDS)
        next_k_page, next_v_page = find_pages(table, gl.minimum(tile + 2, final), final_page, kv_heads, PAGE)

        if differs(tile, 1, whole, near):
            logits = with_first(logits, tile, lacking, near, LOGITS)
            seen = seen_tokens(tile, end, LOGITS)
            by_each = seen_by_each(seen, tile, shortest, BLOCK, LOGITS, RATIO, QUERIES, HEADS)
            logits = gl.where(by_each, logits, UNSEEN)
            norm = gl.where(seen, norm, 0.0)
        weight, fade, highest, total = softmax(logits, highest, total)
        scaled = weights_operand(weight * norm, weight, VALUE, HEADS, COLUMNS, MMA)
        out = mma_v2(
            _values(v, constants, KEY, VALUE, DIMS, MMA), scaled, faded(out, fade, VALUE, DIMS, HEADS, COLUMNS, MMA)
        )

    release_next(OVERLAP)
    total = gl.sum(total, 0)
    place = split.to(gl.int64) * tokens * stride + row
    _store_part(outs + place * DIMS, out, total, live, stride, VALUE, DIMS, RATIO, QUERIES, HEADS, COLUMNS)
    store_weights(weights + place, highest, total, live, stride, RATIO, QUERIES, HEADS)


# --- the two products


@gluon.jit
def _by_head(products, HEADS: gl.constexpr, COLUMNS: gl.constexpr, LOGITS: gl.constexpr):
    """Products [token, column] -> [place, run, head]."""
    if COLUMNS == 2 * HEADS:
        first, _ = gl.split(gl.reshape(products, [8, 8, HEADS, 2]))
    else:
        first = gl.permute(gl.reshape(products, [8, 8, HEADS // 8, 4, 2]), [0, 1, 2, 4, 3])
        first = gl.reshape(first, [8, 8, HEADS])
    return gl.convert_layout(first, LOGITS, assert_trivial=True)


@gluon.jit
def _queries(q, live, stride, KEY: gl.constexpr, SEGMENT: gl.constexpr, DIMS: gl.constexpr, RATIO: gl.constexpr,
             QUERIES: gl.constexpr, HEADS: gl.constexpr, COLUMNS: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """The second operand of a segment's logits. If heads have two columns, the second is zero."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    index = gl.arange(0, KEY.columns[SEGMENT] * 32, gl.SliceLayout(1, OPERAND))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, OPERAND))
    # where `_keys` puts a code; from the low bits of the index up: half, lane, byte, lookup
    at = coordinate(
        index >> 5, (index >> 3) & 3, index & 1, (index >> 1) & 3, KEY.columns[SEGMENT], KEY_LANES, KEY.share[SEGMENT]
    )
    head = column // 2 if COLUMNS == 2 * HEADS else head_in(column, HEADS)
    mine = (head < live) & ((column % 2 == 0) | (COLUMNS == HEADS))
    pointers = q + row_of(head, stride, RATIO, QUERIES, DIMS)[None, :] + (KEY.start[SEGMENT] + at)[:, None]
    return gl.load(pointers, mask=mine[None, :], other=0.0).to(gl.float16)


@gluon.jit
def _store_part(part, out, total, live, stride, VALUE: gl.constexpr, DIMS: gl.constexpr, RATIO: gl.constexpr,
                QUERIES: gl.constexpr, HEADS: gl.constexpr, COLUMNS: gl.constexpr):  # fmt: skip
    """Store outputs [coordinate, column] as means over this CTA's tokens, float32[RATIO, DIMS] per query."""
    if COLUMNS == 2 * HEADS:
        first, _ = gl.split(gl.reshape(out, [DIMS, HEADS, 2]))
    else:
        first, total = out, in_columns(total)
    LAYOUT: gl.constexpr = first.type.layout
    index = gl.arange(0, DIMS, gl.SliceLayout(1, LAYOUT))
    head = gl.arange(0, HEADS, gl.SliceLayout(0, LAYOUT))
    if COLUMNS == HEADS:
        head = head_in(head, HEADS)
    # where `_values` puts a code; from the low bits of the index up: lane, byte, part, lookup
    at = coordinate(
        index >> 6, (index >> 3) & 3, (index >> 5) & 1, index & 7, VALUE.columns[0], VALUE_LANES, VALUE.share[0]
    )
    total = gl.convert_layout(total, gl.SliceLayout(0, LAYOUT), assert_trivial=True)
    mean = first * gl.where(total > 0.0, VALUE.factor[0] / total, 0.0)[None, :]
    row = row_of(head, stride * DIMS, RATIO, QUERIES, DIMS)
    gl.store(part + row[None, :] + at[:, None], mean, mask=(head < live)[None, :])


# --- from words to operands


@gluon.jit
def _keys(words, constants, KEY: gl.constexpr, VALUE: gl.constexpr, SEGMENT: gl.constexpr, MMA: gl.constexpr):
    """Words [run, place, lane] of a segment -> the first operand of its logits, float16[token, coordinate]."""
    COUNT: gl.constexpr = KEY.columns[SEGMENT]
    lane = gl.arange(0, KEY_LANES, gl.SliceLayout(0, gl.SliceLayout(1, key_layout())))
    u = (lane // COUNT)[None, None, :] + gl.zeros_like(words[0])
    halves = ()
    for i in gl.static_range(count(KEY.lookups, SEGMENT)):
        halves += _look_up(words, u, constants, all_constants(KEY, VALUE), KEY, SEGMENT, i)
    # dims: run, place / 2, half, lane, two bits of the byte, place % 2, bits of the lookup
    levels = gl.reshape(joined(halves), key_shape(len(halves)).value)
    levels = gl.permute(levels, key_permutation(len(halves)).value)
    return gl.convert_layout(gl.reshape(levels, [64, COUNT * 32]), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _values(words, constants, KEY: gl.constexpr, VALUE: gl.constexpr, DIMS: gl.constexpr, MMA: gl.constexpr):
    """Words [lane of the run, place, lane, run % 2] -> the first operand of outputs, float16[coordinate, token]."""
    COUNT: gl.constexpr = VALUE.columns[0]
    lane = gl.arange(0, VALUE_LANES, gl.SliceLayout(0, gl.SliceLayout(1, quarter_layout())))
    u = (lane // COUNT)[None, None, :] + gl.zeros([4, 8, 8], gl.int32, quarter_layout())
    u = gl.join(u, u)
    halves = ()
    for i in gl.static_range(count(VALUE.lookups, 0)):
        halves += _look_up(words, u, constants, all_constants(KEY, VALUE), VALUE, 0, i)
    levels = gl.permute(joined(halves), value_permutation(len(halves)).value)
    return gl.convert_layout(gl.reshape(levels, [DIMS, 64]), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _look_up(words, u, constants, ALL: gl.constexpr, SIDE: gl.constexpr, SEGMENT: gl.constexpr, LOOKUP: gl.constexpr):
    """8 codes per token: 8 tensors of float16."""
    WHICH: gl.constexpr = entry(SIDE.lookups, SEGMENT, LOOKUP, 0)
    NUMBERS: gl.constexpr = entry(SIDE.lookups, SEGMENT, LOOKUP, 2)
    used = ()
    for i in gl.static_range(len(WHICH)):
        used += (words[WHICH[i]],)
    used += (u,)
    for i in gl.static_range(len(NUMBERS)):
        used += (constants[index(ALL, NUMBERS[i])],)
    return gl.inline_asm_elementwise(
        entry(SIDE.lookups, SEGMENT, LOOKUP, 1), registers(len(used)), used, dtype=float16s(8), is_pure=True, pack=2
    )


@gluon.jit
def _constant(NUMBER: gl.constexpr):
    """A number in a register. It is ORed with a computed zero, so that the compiler takes it for a variable."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a, b; mov.u32 a, %lanemask_lt; mov.u32 b, %lanemask_ge; and.b32 a, a, b; or.b32 $0, a, $1; }",
        "=r,r", [gl.to_tensor(NUMBER)], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _norms(meta, SIDE: gl.constexpr, LOGITS: gl.constexpr):
    """Words of metadata, 8 · segments halves per run -> the norms per segment, [place, run, 1]."""
    halves = ()
    for i in gl.static_range(len(meta)):
        halves += _floats(meta[i])
    norms = ()
    for segment in gl.static_range(len(SIDE.start)):
        own = ()
        for place in gl.static_range(8):
            own += (halves[place * SIDE.segments + segment],)
        norm = gl.permute(joined(own), [3, 2, 1, 0])
        norm = gl.convert_layout(gl.reshape(norm, [8, 8]), gl.SliceLayout(2, LOGITS), assert_trivial=True)
        norms += (norm[:, :, None],)
    return norms


@gluon.jit
def _floats(words):
    """Words [run, 4] -> 8 tensors of halves, [run]."""
    even, odd = gl.split(gl.reshape(words, [8, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return float_pair(first) + float_pair(second) + float_pair(third) + float_pair(fourth)


# --- loads


@gluon.jit
def find_pages(table, tile, final_page, kv_heads, PAGE: gl.constexpr):
    """Where in the pool a tile's pages are, in rows of KV head 0: for keys and for values.

    A tile in one page has one row. Otherwise keys have one row per run, and values one per lane t, for runs 2·t and
    2·t + 1. Past the table's end, its last page stands in.
    """
    if PAGE % 64 == 0:
        page = gl.load(table + gl.minimum(tile * 64 // PAGE, final_page)).to(gl.int64) * kv_heads
        pages = page
    else:
        run = gl.arange(0, 8, gl.SliceLayout(1, run_layout()))
        page = gl.load(table + gl.minimum((tile * 64 + run * 8) // PAGE, final_page)).to(gl.int64) * kv_heads
        lane = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, quarter_layout())))
        pages = gl.load(table + gl.minimum((tile * 64 + lane * 16) // PAGE, final_page)).to(gl.int64) * kv_heads
    return page, pages


@gluon.jit
def _load_keys(pool, page, tile, KEY: gl.constexpr, PAGE: gl.constexpr, PAGE_WORDS: gl.constexpr):
    """The words of a tile's keys: per segment, `lane_words` tensors [run, place, lane]."""
    start = _tokens(pool, page, tile, KEY, key_layout(), 8, PAGE, PAGE_WORDS)
    lane = gl.arange(0, KEY_LANES, gl.SliceLayout(0, gl.SliceLayout(1, key_layout())))
    words = ()
    for i in gl.static_range(len(KEY.start)):
        words += (_load_segment(start + KEY.word[i], lane[None, None, :], KEY, i),)
    return words


@gluon.jit
def _load_values(pool, page, tile, VALUE: gl.constexpr, PAGE: gl.constexpr, PAGE_WORDS: gl.constexpr):
    """The words of a tile's values, [lane of the run, place, lane, run % 2]."""
    start = _tokens(pool, page, tile, VALUE, quarter_layout(), 16, PAGE, PAGE_WORDS)
    lane = gl.arange(0, VALUE_LANES, gl.SliceLayout(0, gl.SliceLayout(1, quarter_layout())))
    even = _load_segment(start, lane[None, None, :], VALUE, 0)
    odd = _load_segment(start + 8 * VALUE.per_token, lane[None, None, :], VALUE, 0)
    words = ()
    for i in gl.static_range(len(even)):
        words += (gl.join(even[i], odd[i]),)
    return words


@gluon.jit
def _tokens(pool, page, tile, SIDE: gl.constexpr, LAYOUT: gl.constexpr, EACH: gl.constexpr, PAGE: gl.constexpr,
            PAGE_WORDS: gl.constexpr):  # fmt: skip
    """Pointers to the first 8 of every `EACH` tokens of a tile, [64 / EACH, place, 1].

    There is one `page` for the tile, or one per `EACH` tokens.
    """
    GROUP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    group = gl.arange(0, 64 // EACH, GROUP)
    place = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    within = (place * SIDE.per_token)[None, :, None]
    if PAGE % 64 == 0:
        start = pool + page * PAGE_WORDS + SIDE.codes + gl.multiple_of(tile * 64 % PAGE, 64) * SIDE.per_token
        start += (group * (EACH * SIDE.per_token))[:, None, None] + within
    else:
        at = gl.convert_layout(page, GROUP, assert_trivial=True) * PAGE_WORDS
        at += (tile * 64 + group * EACH) % PAGE * SIDE.per_token
        start = pool + SIDE.codes + at[:, None, None] + within
    return start


@gluon.jit
def _load_segment(start, lane, SIDE: gl.constexpr, SEGMENT: gl.constexpr):
    """One tensor per word of `lane_words`."""
    column, u = lane % SIDE.columns[SEGMENT], lane // SIDE.columns[SEGMENT]
    words = ()
    for i in gl.static_range(count(SIDE.words, SEGMENT)):
        row = u % entry(SIDE.words, SEGMENT, i, 1) * SIDE.columns[SEGMENT]
        words += (gl.load(start + (entry(SIDE.words, SEGMENT, i, 0) + row + column)),)
    return words


@gluon.jit
def _load_norms(pool, page, tile, SIDE: gl.constexpr, PAGE: gl.constexpr, PAGE_WORDS: gl.constexpr):
    """The metadata of a tile: tensors of 4 words per run, [run, 4]."""
    LAYOUT: gl.constexpr = norms_layout()
    RUN: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    run = gl.arange(0, 8, RUN)
    word = gl.arange(0, 4, gl.SliceLayout(0, LAYOUT))
    if PAGE % 64 == 0:
        start = pool + page * PAGE_WORDS + SIDE.meta + gl.multiple_of(tile * 64 % PAGE, 64) // 2 * SIDE.segments
        pointers = start + ((run * (4 * SIDE.segments))[:, None] + word[None, :])
    else:
        at = gl.convert_layout(page, RUN, assert_trivial=True) * PAGE_WORDS
        at += (tile * 64 + run * 8) % PAGE // 2 * SIDE.segments
        pointers = pool + SIDE.meta + gl.multiple_of(at, 4)[:, None] + word[None, :]
    words = ()
    for i in gl.static_range(len(SIDE.start)):
        words += (gl.load(pointers + 4 * i),)
    return words


# --- layouts


@gluon.constexpr_function
def run_layout():
    """[run, place]: all lanes of a run hold the same."""
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4]], lanes, [], [], [8, 8])


@gluon.constexpr_function
def quarter_layout():
    """[lane t of the run, place, lane]: 8 lanes, one per run, share the tokens of runs 2·t and 2·t + 1."""
    places, lanes = [[0, 1, 0], [0, 2, 0], [0, 4, 0]], [[1, 0, 0], [2, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]]
    return gl.DistributedLinearLayout(places, lanes, [], [], [4, 8, 8])


@gluon.constexpr_function
def key_layout():
    """[run, place, lane]"""
    places, lanes = [[0, 1, 0], [0, 2, 0], [0, 4, 0]], [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(places, lanes, [], [], [8, 8, 4])


@gluon.constexpr_function
def norms_layout():
    """[run, word]: all lanes of a run hold the same."""
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2]], lanes, [], [], [8, 4])


@gluon.constexpr_function
def key_shape(count):
    return (8, 4, 2, 4) + (2,) * log2(count)


@gluon.constexpr_function
def key_permutation(count):
    """To place / 2, place % 2, run; lookup, byte, lane, half."""
    lookup = tuple(range(7, 4 + log2(count)))
    return (1, 6, 0, *lookup[::-1], 5, 4, 3, 2)


@gluon.constexpr_function
def value_permutation(count):
    """To lookup, part, byte, lane; place, lane of the run, run % 2."""
    bits = tuple(range(4, 4 + log2(count)))
    return (*bits[::-1], 2, 1, 0, 3)


@gluon.constexpr_function
def registers(inputs):
    """The constraints of a lookup: 8 pairs of levels come out, and inputs for two tokens go in."""
    return ",".join(["=r"] * 8 + ["r"] * (2 * inputs))


@gluon.constexpr_function
def all_constants(key, value):
    lookups = [lookup for segment in key.lookups + value.lookups for lookup in segment]
    return tuple(sorted({number for lookup in lookups for number in lookup[2]}))


@gluon.constexpr_function
def index(numbers, number):
    return numbers.index(number)


@gluon.constexpr_function
def count(rows, segment):
    return len(rows[segment])


@gluon.constexpr_function
def entry(rows, segment, i, number):
    """Field `number` of the i-th row of a segment: in kernels, inner tuples have no field names."""
    return rows[segment][i][number]


@gluon.constexpr_function
def float16s(count):
    return (gl.float16,) * count
