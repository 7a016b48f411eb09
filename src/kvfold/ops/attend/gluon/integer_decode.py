"""The Gluon kernel for integers. A CTA is one warp, which unpacks codes in the registers from which MMA reads them.

A tile is 64 tokens, 8 runs of 8. There are two products:

- Logits: the rows of K are tokens, the columns of q are query heads. The order of coordinates is free.
- Outputs: the rows of Vᵀ are coordinates. The order of tokens is free.

So each lane unpacks the words that it reads, and only weights move between lanes (`movmatrix`). Meanwhile the next tile
is prefetched to shared memory, in the byte order of its pages.

Codes become operands by a single AND:

- Keys are bytes, four per register. A code that is not in the lowest bits of its byte is 2^place times too large;
  queries are divided by that. Queries are 16-bit integers with a unit per head: the high byte is one column, the low
  byte the next.
- Values are subnormal float16 numbers c·2^(place − 24), wherever the code lies in its 16-bit half. MMA multiplies them
  exactly. The highest code of a byte would take one AND more, so the whole byte is multiplied instead. The epilogue
  subtracts the other codes and takes the powers of two away.

Each segment of a token has a scale and an offset of its own, which go into logits and weights. A segment of keys is a
product of its own: of its words, or if these are fewer than the four lanes of a run, of all words with queries that are
zero outside the segment. Two segments of values take two columns per head.

Queries are rotated by Hadamard matrices in the registers from which MMA reads them. An entry of such a matrix is
(−1)^n, where n bits are set in both row and column. So the matrix stays the same if the bits of both are permuted in
the same way, as they are here.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kvfold.format.layout import SlotLayout
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
from kvfold.ops.attend.gluon.integer_layouts import (
    around_bits,
    copy_layout,
    flat,
    key_layout,
    key_parts,
    meta_layout,
    places_first,
    registers,
    repeated,
    unpack_bytes,
    unpack_halves,
    value_layout,
    with_bits,
)
from kvfold.ops.attend.gluon.occupancy import STAGES, ctas, meta_stages
from kvfold.ops.attend.gluon.open_block import own_raw, read_raw
from kvfold.ops.store.quantize_tiles import ROUNDER

# names that Triton 3.9 has changed
async_load = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)
REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

UNIT = gl.constexpr(2.0**24)  # 1 / the smallest subnormal float16


class IntegerWords(NamedTuple):
    """The keys or the values of a page as 32-bit words: equal segments with codes of `bits` bits."""

    bits: int
    segments: int
    per_token: int  # words of codes
    codes: int  # the word of a page at which codes begin
    meta: int  # the word at which metadata begin, one per token and segment


def integer_words(slot: SlotLayout, codes: int, meta: int) -> IntegerWords:
    return IntegerWords(slot.segments[0].bits, len(slot.segments), slot.code_bytes // 4, codes // 4, meta // 4)


def room(key: IntegerWords, value: IntegerWords, shared: int) -> int:
    """How many CTAs an SM with `shared` bytes of shared memory takes."""
    return ctas(key.per_token + value.per_token + key.segments + value.segments, shared)


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
    COLUMNS: gl.constexpr,  # of outputs: one or two per head
    ORDER: gl.constexpr,  # of the Hadamard matrices that rotate queries here; 1: none
    BLOCK: gl.constexpr,  # tokens of the open block, 0: none
    RING: gl.constexpr,  # its blocks
    SHARED: gl.constexpr,  # bytes of an SM's shared memory
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
    pool += head.to(gl.int64) * PAGE_WORDS

    KEYS: gl.constexpr = gl.SwizzledSharedLayout(KEY.per_token, 1, 8, [1, 0])
    VALUES: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    META: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    OTHERS: gl.constexpr = KEY.per_token + VALUE.per_token + VALUE.segments
    META_STAGES: gl.constexpr = meta_stages(KEY.segments, OTHERS, SHARED)
    keys = gl.allocate_shared_memory(gl.int32, [STAGES, 8, 8 * KEY.per_token], KEYS)
    key_meta = gl.allocate_shared_memory(gl.int32, [META_STAGES, 8, 8 * KEY.segments], META)
    values = gl.allocate_shared_memory(gl.int32, [STAGES, 8, 8 * VALUE.per_token], VALUES)
    value_meta = gl.allocate_shared_memory(gl.int32, [STAGES, 8, 8 * VALUE.segments], META)
    shared = (keys, key_meta, values, value_meta)
    for i in gl.static_range(STAGES - 1):
        pages = _pages(table, first + i, table_pages, kv_heads, KEY, VALUE, PAGE)
        _copy_tile(shared, i, pool, pages, first + i, last, newest, KEY, VALUE, PAGE, PAGE_WORDS, OVERLAP)
    pages = _pages(table, first + (STAGES - 1), table_pages, kv_heads, KEY, VALUE, PAGE)

    row = (token * kv_heads + head) * RATIO
    q += token.to(gl.int64) * q_stride + head * (RATIO * DIMS)
    stride = kv_heads * RATIO
    if BLOCK > 0 and split < readers:
        part = (splits + split).to(gl.int64) * tokens * stride + row
        read_raw(
            q, outs + part * DIMS, weights + part, ring, rings, ring_stride, ring_blocks, scale, raw, raw_end, shortest,
            live, q_stride, stride, RING, BLOCK, DIMS, RATIO, QUERIES, HEADS, OVERLAP, 4096,
        )  # fmt: skip
    wait_by(OVERLAP, "start")
    place = split.to(gl.int64) * tokens * stride + row
    highest = gl.full([HEADS], UNSEEN, gl.float32, HEAD)
    if (first > last) & (splits > 1):  # nothing to read: free the SM; `merge` ignores the outputs of such a part
        wait_by(OVERLAP, "end")
        release_next(OVERLAP)
        nothing = gl.zeros_like(highest)
        store_weights(weights + place, highest, nothing, live, stride, RATIO, QUERIES, HEADS)
        return
    query0, unit0, sum0 = _queries(q, 0, scale, live, q_stride, KEY, DIMS, RATIO, QUERIES, HEADS, ORDER, MMA)
    query1, unit1, sum1 = query0, unit0, sum0
    if KEY.segments == 2:
        query1, unit1, sum1 = _queries(q, 1, scale, live, q_stride, KEY, DIMS, RATIO, QUERIES, HEADS, ORDER, MMA)

    lacking = logits_near(q, near, first, live, scale, q_stride, DIMS, RATIO, QUERIES, HEADS, HEAD)
    total = gl.zeros([8, HEADS], gl.float32, gl.SliceLayout(0, LOGITS))
    shift0 = gl.zeros([8, HEADS], gl.float32, gl.SliceLayout(0, LOGITS))
    shift1 = gl.zeros([8, HEADS], gl.float32, gl.SliceLayout(0, LOGITS))
    out = gl.zeros([DIMS, COLUMNS], gl.float32, MMA)
    for tile in range(first, last + 1):
        async_copy.wait_group(STAGES - 2)
        stage = (tile - first) % STAGES
        free = (stage + (STAGES - 1)) % STAGES
        _copy_tile(shared, free, pool, pages, tile + (STAGES - 1), last, newest, KEY, VALUE, PAGE, PAGE_WORDS, OVERLAP)
        pages = _pages(table, tile + STAGES, table_pages, kv_heads, KEY, VALUE, PAGE)
        k, k_meta = _read_keys(keys.index(stage), KEY), _read_meta(key_meta.index(stage), KEY)
        logits = _logits(k, k_meta, query0, unit0, sum0, query1, unit1, sum1, KEY, DIMS, HEADS, MMA)
        scale0, offset0, scale1, offset1 = _scales(_read_meta(value_meta.index(stage), VALUE), VALUE, LOGITS)
        if differs(tile, 1, whole, near):
            logits = with_first(logits, tile, lacking, near, LOGITS)
            seen = seen_tokens(tile, end, LOGITS)
            by_each = seen_by_each(seen, tile, shortest, BLOCK, LOGITS, RATIO, QUERIES, HEADS)
            logits = gl.where(by_each, logits, UNSEEN)
            scale0, offset0 = gl.where(seen, scale0, 0.0), gl.where(seen, offset0, 0.0)
            scale1, offset1 = gl.where(seen, scale1, 0.0), gl.where(seen, offset1, 0.0)
        weight, fade, highest, total = softmax(logits, highest, total)
        shift0 = shift0 * fade[None, :] + gl.sum(weight * offset0, 0)
        if VALUE.segments == 2:
            shift1 = shift1 * fade[None, :] + gl.sum(weight * offset1, 0)
        scaled = weights_operand(weight * scale0, weight * scale1, VALUE, HEADS, COLUMNS, MMA)
        v = value_operand(read_values(values.index(stage), VALUE), VALUE, DIMS, MMA)
        out = mma_v2(v, scaled, faded(out, fade, VALUE, DIMS, HEADS, COLUMNS, MMA))

    wait_by(OVERLAP, "end")
    release_next(OVERLAP)
    total, shift0, shift1 = gl.sum(total, 0), gl.sum(shift0, 0), gl.sum(shift1, 0)
    _store_part(
        outs + place * DIMS, out, total, shift0, shift1, live, stride, VALUE, DIMS, RATIO, QUERIES, HEADS, COLUMNS
    )
    store_weights(weights + place, highest, total, live, stride, RATIO, QUERIES, HEADS)


# --- the two products


@gluon.jit
def _logits(k, meta, query0, unit0, sum0, query1, unit1, sum1, KEY: gl.constexpr, DIMS: gl.constexpr,
            HEADS: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Logits [place in a run, run, head] of a tile."""
    scale0, offset0, scale1, offset1 = _scales(meta, KEY, logits_layout(HEADS))
    k0, k1 = k, k
    if key_parts(KEY.per_token, KEY.segments) == 2:
        k0, k1 = gl.split(gl.permute(gl.reshape(k, [8, 8, 2, KEY.per_token // 2]), [0, 1, 3, 2]))
    logits = _segment(k0, scale0, offset0, query0, unit0, sum0, KEY, DIMS, HEADS, MMA)
    if KEY.segments == 2:
        logits += _segment(k1, scale1, offset1, query1, unit1, sum1, KEY, DIMS, HEADS, MMA)
    return logits


@gluon.jit
def _segment(k, scale, offset, query, unit, total, KEY: gl.constexpr, DIMS: gl.constexpr, HEADS: gl.constexpr,
             MMA: gl.constexpr):  # fmt: skip
    """What one segment of keys adds to the logits."""
    products = mma_v2(_keys(k, KEY, DIMS, MMA), query, gl.zeros([64, 2 * HEADS], gl.int32, MMA))
    high, low = gl.split(gl.reshape(products, [8, 8, HEADS, 2]))
    product = gl.convert_layout((high * 256 + low).to(gl.float32), logits_layout(HEADS), assert_trivial=True)
    if KEY.bits == 8:
        offset += 128.0 * scale
    return product * (scale * unit[None, :][None, :, :]) + offset * total[None, :][None, :, :]


@gluon.jit
def _queries(q, SEGMENT: gl.constexpr, scale, live, stride, KEY: gl.constexpr, DIMS: gl.constexpr, RATIO: gl.constexpr,
             QUERIES: gl.constexpr, HEADS: gl.constexpr, ORDER: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """The second operand of a segment's logits; and per head, the unit and the sum of its numbers, times `scale`."""
    PARTS: gl.constexpr = key_parts(KEY.per_token, KEY.segments)
    COUNT: gl.constexpr = DIMS // PARTS
    WORDS: gl.constexpr = KEY.per_token // PARTS // 4  # per lane
    CODES: gl.constexpr = 8 // KEY.bits
    BYTES: gl.constexpr = 4 * KEY.per_token // KEY.segments
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    HEAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, logits_layout(HEADS)))
    index = gl.arange(0, COUNT, gl.SliceLayout(1, OPERAND))
    column = gl.arange(0, 2 * HEADS, gl.SliceLayout(0, OPERAND))
    coordinate = index * 0
    for bit in gl.static_range(log2(COUNT)):
        coordinate += (index >> bit & 1) * key_coordinate(bit, WORDS, CODES, BYTES)
    head = (column // 2)[None, :]
    q += row_of(head, stride, RATIO, QUERIES, DIMS) + coordinate[:, None]
    x = gl.load(q + SEGMENT % PARTS * COUNT, mask=head < live, other=0.0).to(gl.float32)
    if PARTS == 2 and ORDER == DIMS:
        other = gl.load(q + (1 - SEGMENT) * COUNT, mask=head < live, other=0.0).to(gl.float32)
        x = other + (x if SEGMENT == 0 else -x)
    for bit in gl.static_range(log2(COUNT)):
        if key_coordinate(bit, WORDS, CODES, BYTES) < ORDER:
            x = _butterfly(x, bit, COUNT, 2 * HEADS, OPERAND)
    x *= ORDER**-0.5
    if KEY.segments > PARTS:
        x = gl.where((coordinate // (CODES * BYTES) == SEGMENT)[:, None], x, 0.0)
    place = 1 << (coordinate // BYTES % CODES * KEY.bits & 3)
    narrow, unit, total = _fixed(x, place.to(gl.float32)[:, None], (column % 2)[None, :])
    unit, total = gl.max(gl.reshape(unit, [HEADS, 2]), 1), gl.max(gl.reshape(total, [HEADS, 2]), 1)
    return narrow, gl.convert_layout(unit * scale, HEAD), gl.convert_layout(total * scale, HEAD)


@gluon.jit
def _butterfly(x, BIT: gl.constexpr, COUNT: gl.constexpr, COLUMNS: gl.constexpr, OPERAND: gl.constexpr):
    """Sums and differences of numbers whose indices differ in one bit. Bits 2 and 3 are bits of the lane."""
    if BIT == 2 or BIT == 3:
        other = gl.inline_asm_elementwise(
            f"shfl.sync.bfly.b32 $0, $1, {BIT - 1}, 31, -1;", "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1
        )
        index = gl.arange(0, COUNT, gl.SliceLayout(1, OPERAND))
        x = other + gl.where((index >> BIT & 1 == 0)[:, None], x, -x)
    else:
        pairs = gl.reshape(x, [COUNT >> (BIT + 1), 2, 1 << BIT, COLUMNS])
        low, high = gl.split(gl.permute(pairs, [0, 2, 3, 1]))
        pairs = gl.permute(gl.join(low + high, low - high), [0, 3, 1, 2])
        x = gl.convert_layout(gl.reshape(pairs, [COUNT, COLUMNS]), OPERAND, assert_trivial=True)
    return x


@gluon.jit
def _fixed(x, place, low):
    """x / place as 16-bit integers, their unit, and the sum of x. Columns come in pairs, for high and low bytes."""
    x = x * (1.0 / place)
    unit = gl.max(gl.abs(x), 0) / 32639.0 + 1e-30
    rounded = x * (1.0 / unit)[None, :] + ROUNDER
    total = gl.sum((rounded - ROUNDER) * place, 0) * unit
    fixed = rounded.to(gl.int32, bitcast=True)  # in the low 16 bits, which are 0 in ROUNDER
    return gl.where(low == 0, (fixed + 128) >> 8, fixed).to(gl.int8), unit, total


@gluon.jit
def _store_part(part, out, total, shift0, shift1, live, stride, VALUE: gl.constexpr, DIMS: gl.constexpr,
                RATIO: gl.constexpr, QUERIES: gl.constexpr, HEADS: gl.constexpr, COLUMNS: gl.constexpr):  # fmt: skip
    """Store outputs [coordinate, column] as means over this CTA's tokens, float32[RATIO, DIMS] per query."""
    out = codes_alone(out, VALUE, DIMS, COLUMNS)
    if COLUMNS == 2 * HEADS:
        first, second = gl.split(gl.reshape(out, [DIMS, HEADS, 2]))
    else:
        first, second = out, out
        total, shift0 = in_columns(total), in_columns(shift0)
    LAYOUT: gl.constexpr = first.type.layout
    total = gl.convert_layout(total, gl.SliceLayout(0, LAYOUT), assert_trivial=True)
    shift0 = gl.convert_layout(shift0, gl.SliceLayout(0, LAYOUT), assert_trivial=True)
    index = gl.arange(0, DIMS, gl.SliceLayout(1, LAYOUT))
    head = gl.arange(0, HEADS, gl.SliceLayout(0, LAYOUT))
    if COLUMNS == HEADS:
        head = head_in(head, HEADS)
    # the code that `value_operand` puts at this index; from the low bits up: half of a row, row, code of the byte, byte
    ROWS: gl.constexpr = VALUE.per_token // 4
    CODES: gl.constexpr = 8 // VALUE.bits
    BYTES: gl.constexpr = 4 * VALUE.per_token // VALUE.segments
    code, half = (index >> 3) // ROWS % CODES, (index >> 3) % ROWS * 8 + (index & 7)
    byte = 2 * half + (index >> 3) // (ROWS * CODES)
    segment = byte // BYTES
    coordinate = segment * (DIMS // VALUE.segments) + byte % BYTES + code * BYTES
    back = (UNIT / (1 << (code * VALUE.bits)).to(gl.float32))[:, None]
    mean = first * back + shift0[None, :]
    if VALUE.segments == 2:
        shift1 = gl.convert_layout(shift1, gl.SliceLayout(0, LAYOUT), assert_trivial=True)
        mean = gl.where((segment == 0)[:, None], mean, second * back + shift1[None, :])
    mean = mean * gl.where(total > 0.0, 1.0 / total, 0.0)[None, :]
    at = row_of(head, stride * DIMS, RATIO, QUERIES, DIMS)
    gl.store(part + at[None, :] + coordinate[:, None], mean, mask=(head < live)[None, :])


@gluon.jit
def codes_alone(out, VALUE: gl.constexpr, DIMS: gl.constexpr, COLUMNS: gl.constexpr):
    """Outputs of codes alone: where `value_operand` has the whole byte, subtract its lower codes."""
    CODES: gl.constexpr = 8 // VALUE.bits
    if CODES > 1:
        LAYOUT: gl.constexpr = out.type.layout
        out = gl.reshape(out, [2, CODES, DIMS // (2 * CODES), COLUMNS])
        IN_CODES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, out.type.layout)))
        whole = (gl.arange(0, CODES, IN_CODES) == CODES - 1)[None, :, None, None]
        lower = gl.sum(gl.where(whole, 0.0, out), 1)
        out = gl.where(whole, out - lower[:, None, :, :], out)
        out = gl.convert_layout(gl.reshape(out, [DIMS, COLUMNS]), LAYOUT, assert_trivial=True)
    return out


@gluon.constexpr_function
def key_coordinate(bit, words, codes, segment_bytes):
    """What a bit of an index of `_keys` adds to the coordinate in the part. An index has, from the low bits up: the
    byte of a word, the lane, the word of the lane's `words`, the code of the byte."""
    if bit >= 4 + log2(words):
        return segment_bytes << (bit - 4 - log2(words))
    byte = 1 << bit if bit < 2 else 4 * words << (bit - 2) if bit < 4 else 4 << (bit - 4)
    return byte if byte < segment_bytes else codes * byte  # in the second segment of a part


# --- from words to operands


@gluon.jit
def _keys(k, KEY: gl.constexpr, DIMS: gl.constexpr, MMA: gl.constexpr):
    """Words [run, place, word] of a part -> the first operand of its logits, int8[token, coordinate]."""
    PARTS: gl.constexpr = key_parts(KEY.per_token, KEY.segments)
    COUNT: gl.constexpr = KEY.per_token // PARTS
    OUT: gl.constexpr = 4 * (8 // KEY.bits)
    k = gl.convert_layout(k, places_first(COUNT), assert_trivial=True)
    codes = gl.inline_asm_elementwise(
        unpack_bytes(KEY.bits), registers(OUT, 4), [k], dtype=repeated(gl.int8, OUT), is_pure=True, pack=4
    )
    codes = gl.reshape(joined(codes), with_bits((8, 2, 4, 4, COUNT // 4), OUT).value)
    codes = gl.permute(codes, around_bits((1, 6, 5, 0), 7, OUT // 4, (4, 3, 2)).value)
    codes = gl.reshape(codes, [64, DIMS // PARTS])
    return gl.convert_layout(codes, gl.DotOperandLayout(0, MMA, 4), assert_trivial=True)


@gluon.jit
def value_operand(v, VALUE: gl.constexpr, DIMS: gl.constexpr, MMA: gl.constexpr):
    """Halves [run, place, row, half of the row] -> the first operand of outputs, float16[coordinate, token]."""
    OUT: gl.constexpr = 2 * (8 // VALUE.bits)
    codes = gl.inline_asm_elementwise(
        unpack_halves(VALUE.bits), registers(OUT, 1), [v], dtype=repeated(gl.float16, OUT), is_pure=True, pack=2
    )
    codes = gl.reshape(joined(codes), with_bits((8, 8, VALUE.per_token // 4, 8), OUT).value)
    codes = gl.permute(codes, around_bits((), 4, OUT, (2, 3, 1, 0)).value)
    return gl.convert_layout(gl.reshape(codes, [DIMS, 64]), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _scales(meta, SIDE: gl.constexpr, LOGITS: gl.constexpr):
    """Metadata words [run, place(, segment)] -> scale and offset per segment, [place, run, 1]."""
    if SIDE.segments == 2:
        first, second = gl.split(meta)
        scale0, offset0 = _scale(first, LOGITS)
        scale1, offset1 = _scale(second, LOGITS)
    else:
        scale0, offset0 = _scale(meta, LOGITS)
        scale1, offset1 = scale0, offset0
    return scale0, offset0, scale1, offset1


@gluon.jit
def _scale(meta, LOGITS: gl.constexpr):
    scale, offset = float_pair(meta)
    scale = gl.convert_layout(gl.permute(scale, [1, 0]), gl.SliceLayout(2, LOGITS), assert_trivial=True)
    offset = gl.convert_layout(gl.permute(offset, [1, 0]), gl.SliceLayout(2, LOGITS), assert_trivial=True)
    return scale[:, :, None], offset[:, :, None]


# --- from pages to shared memory, [run, word of its tokens], and from there to lanes


@gluon.jit
def _pages(table, tile, table_pages, kv_heads, KEY: gl.constexpr, VALUE: gl.constexpr, PAGE: gl.constexpr):
    """Where in the pool a tile's pages are, in rows of KV head 0: for keys, key metadata, values, value metadata."""
    return (
        page_row(table, tile, table_pages, kv_heads, KEY.per_token, PAGE),
        page_row(table, tile, table_pages, kv_heads, KEY.segments, PAGE),
        page_row(table, tile, table_pages, kv_heads, VALUE.per_token, PAGE),
        page_row(table, tile, table_pages, kv_heads, VALUE.segments, PAGE),
    )


@gluon.jit
def page_row(table, tile, table_pages, kv_heads, COUNT: gl.constexpr, PAGE: gl.constexpr):
    """One row if a tile lies in one page, else one per run. Past the table's end, its last page stands in."""
    if PAGE % 64 == 0:
        page = gl.load(table + gl.minimum(tile * 64 // PAGE, table_pages - 1))
    else:
        run = gl.arange(0, 8, gl.SliceLayout(1, copy_layout(COUNT, PAGE)))
        page = gl.load(table + gl.minimum((tile * 64 + run * 8) // PAGE, table_pages - 1))
    return page.to(gl.int32) * kv_heads


@gluon.jit
def _copy_tile(shared, stage, pool, pages, tile, last, newest, KEY: gl.constexpr, VALUE: gl.constexpr,
               PAGE: gl.constexpr, PAGE_WORDS: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Prefetch a tile as one group of copies: keys, key metadata, values, value metadata.

    Past the last tile, the group is empty.
    """
    keys, key_meta, values, value_meta = shared
    if tile <= last:
        wait_for_stored(tile, newest, OVERLAP)
        _copy(keys.index(stage), pool + KEY.codes, pages[0], tile, KEY.per_token, PAGE, PAGE_WORDS)
        _copy(key_meta.index(stage), pool + KEY.meta, pages[1], tile, KEY.segments, PAGE, PAGE_WORDS)
        _copy(values.index(stage), pool + VALUE.codes, pages[2], tile, VALUE.per_token, PAGE, PAGE_WORDS)
        _copy(value_meta.index(stage), pool + VALUE.meta, pages[3], tile, VALUE.segments, PAGE, PAGE_WORDS)
    async_copy.commit_group()


@gluon.jit
def _copy(to, pool, page, tile, COUNT: gl.constexpr, PAGE: gl.constexpr, PAGE_WORDS: gl.constexpr):
    """Prefetch COUNT words per token of a tile."""
    LAYOUT: gl.constexpr = copy_layout(COUNT, PAGE)
    run = gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
    word = gl.arange(0, 8 * COUNT, gl.SliceLayout(0, LAYOUT))
    if PAGE % 64 == 0:
        start = pool + page.to(gl.int64) * PAGE_WORDS + gl.multiple_of(tile * 64 % PAGE, 64) * COUNT
        pointers = start + ((run * (8 * COUNT))[:, None] + word[None, :])
    else:
        at = page.to(gl.int64) * PAGE_WORDS + (tile * 64 + run * 8) % PAGE * COUNT
        pointers = pool + gl.multiple_of(at, 4)[:, None] + word[None, :]
    async_load(to, pointers)


@gluon.jit
def _read_keys(shared, KEY: gl.constexpr):
    """The words of a tile's keys, [run, place, word]."""
    LAYOUT: gl.constexpr = key_layout(KEY.per_token, key_parts(KEY.per_token, KEY.segments))
    words = gl.reshape(shared.load(flat(LAYOUT)), [8, 8, KEY.per_token])
    return gl.convert_layout(words, LAYOUT, assert_trivial=True)


@gluon.jit
def read_values(shared, VALUE: gl.constexpr):
    """The values of a tile in halves of words, [run, place, row of 16 bytes, half of the row].

    They are read by `ldmatrix`, which puts the same half of two runs into one register of a lane.
    """
    COUNT: gl.constexpr = 2 * VALUE.per_token
    HALVES: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])  # the swizzle of VALUES, in halves
    if REINTERPRETS:
        halves = shared.reinterpret(gl.int16, [8, 8 * COUNT], HALVES)
    else:
        halves = shared._reinterpret(gl.int16, [8, 8 * COUNT], HALVES)
    return gl.reshape(halves.load(value_layout(COUNT)), [8, 8, COUNT // 8, 8])


@gluon.jit
def _read_meta(shared, SIDE: gl.constexpr):
    """The scales and offsets of a tile, [run, place(, segment)]."""
    LAYOUT: gl.constexpr = meta_layout(SIDE.segments)
    if SIDE.segments == 2:
        meta = gl.convert_layout(gl.reshape(shared.load(flat(LAYOUT)), [8, 8, 2]), LAYOUT, assert_trivial=True)
    else:
        meta = shared.load(LAYOUT)
    return meta
