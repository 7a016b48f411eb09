"""The Gluon kernel for evenly spaced levels. It is the kernel for integers (see integer_decode.py) with segments of
different widths, each in an array of its own.

- Keys: every segment is a product of its own. Its sum begins at −middle·Σ query, so levels lie around zero without an
  instruction. If a token has fewer words than the four lanes of a run, lanes share a word: each shifts it and takes
  some codes of every byte.
- Values: every segment has outputs of its own. −middle·Σ weight·scale is added to them in the end.
- Scales: a byte shifted to the place of exponent and mantissa is a float32 that is 2^119 times too small. It is
  subnormal, and so flushed to zero, if its exponent is 0. A lane reads the scales of its run at once, for all segments.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kvfold.ops.attend.gluon.decode_tiles import (
    UNSEEN,
    differs,
    exp2,
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
    store_weights,
    wait_by,
    weights_operand,
    with_first,
)
from kvfold.ops.attend.gluon.even_layouts import (
    codes_per_lane,
    key_coordinate,
    key_middle,
    shared_words,
    sharing,
    sharing_layout,
    unpack_shared_bytes,
)
from kvfold.ops.attend.gluon.even_pages import (
    EvenSide,
    copy_tiles,
    dims_of,
    of,
    read_keys,
    read_scales,
    scale_rows,
    start_of,
    tile_pages,
)
from kvfold.ops.attend.gluon.integer_decode import UNIT, codes_alone, read_values, value_operand
from kvfold.ops.attend.gluon.integer_layouts import around_bits, registers, repeated, with_bits
from kvfold.ops.attend.gluon.occupancy import STAGES, ctas, meta_stages, tiles_at_once
from kvfold.ops.attend.gluon.open_block import own_raw, read_raw
from kvfold.ops.store.quantize_tiles import ROUNDER

# A byte at the place of a float32 is 2^119 times too small. So units of queries are 2^64 times too large, which is far
# from overflow, and softmax multiplies logits by the rest. Weights are 2^122 times too large; times a scale, they lie
# in the middle of float16's range.
QUERY = gl.constexpr(2.0**64)
LOGIT = gl.constexpr(2.0**55)
WEIGHT = gl.constexpr(122)
BACK = gl.constexpr(2.0**-3)
EXACT = gl.constexpr(2.0**22 - 2.0**12)  # products up to this are the low bits of ROUNDER + product


def room(key: EvenSide, value: EvenSide, shared: int) -> int:
    """How many CTAs an SM with `shared` bytes of shared memory takes."""
    return ctas(key.words + value.words + scale_rows(key.segments + value.segments) // 4, shared)


@gluon.jit(
    do_not_specialize=["q_stride", "table_stride", "table_pages", "tokens", "groups", "ring_stride", "ring_blocks"],
    do_not_specialize_on_alignment=["table", "lengths", "query_starts", "starts", "rings"],
)
def decode(
    q,  # [tokens, q_heads, DIMS], tokens q_stride apart, rotated
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
    COLUMNS: gl.constexpr,  # of a segment's outputs: HEADS, or 8 if that is more
    ORDER: gl.constexpr,  # 1: queries come rotated
    BLOCK: gl.constexpr,  # tokens of the open block, 0: none
    RING: gl.constexpr,  # its blocks
    SHARED: gl.constexpr,  # bytes of an SM's shared memory
    OVERLAP: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    LOGITS: gl.constexpr = logits_layout(HEADS)
    HEAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, LOGITS))
    ROWS: gl.constexpr = scale_rows(KEY.segments + VALUE.segments)
    head, kv_heads = gl.program_id(1), gl.num_programs(1)
    table += gl.program_id(2).to(gl.int64) * table_stride
    split, splits, token, tokens, live, shortest, length, latest = own_queries(
        query_starts, lengths, tokens, groups, RATIO, QUERIES
    )
    readers, less, raw, raw_end = own_raw(starts, split, splits, shortest, length, BLOCK, DIMS, PAGE, PAGE_WORDS)
    end, first, last, newest = own_tiles(split, splits, readers, less, length, latest, BLOCK)
    end = gl.minimum(end, last * 64 + 64)  # the loop may go past the last tile
    whole = gl.minimum(packed_to(shortest, BLOCK), end)  # up to where all queries of the CTA read
    pool += head.to(gl.int64) * PAGE_WORDS

    WORDS: gl.constexpr = KEY.words + VALUE.words + ROWS // 4
    TILES: gl.constexpr = tiles_at_once(WORDS, VALUE.segments, HEADS, SHARED)
    keys, values = (), ()
    for i in gl.static_range(len(KEY.each)):
        keys += (_allocate(TILES, KEY.each[i].per_token, shared_words(KEY.each[i].per_token)),)
    for i in gl.static_range(len(VALUE.each)):
        values += (_allocate(TILES, VALUE.each[i].per_token, gl.SwizzledSharedLayout(4, 1, 8, [1, 0])),)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    PADDED: gl.constexpr = meta_stages(TILES * (ROWS // 4), TILES * (WORDS - ROWS // 4), SHARED)
    scales = gl.allocate_shared_memory(gl.int32, [TILES * PADDED, 8, ROWS, 2], FLAT)
    shared = (keys, values, scales)
    pages = tile_pages(table, first, table_pages, kv_heads, KEY, VALUE, TILES, PAGE)
    copy_tiles(shared, 0, pool, pages, first, last, newest, KEY, VALUE, PAGE, PAGE_WORDS, OVERLAP)
    pages = tile_pages(table, first + TILES, table_pages, kv_heads, KEY, VALUE, TILES, PAGE)

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
    queries = ()
    for i in gl.static_range(len(KEY.each)):
        own = q + start_of(KEY, i)
        queries += (
            _queries(own, scale, table_pages >> 31, live, q_stride, of(KEY, i), DIMS, RATIO, QUERIES, HEADS, MMA),
        )

    lacking = logits_near(q, near, first, live, scale / LOGIT, q_stride, DIMS, RATIO, QUERIES, HEADS, HEAD)
    total = gl.zeros([8, HEADS], gl.float32, gl.SliceLayout(0, LOGITS))
    shifts, out = (), ()
    for i in gl.static_range(len(VALUE.each)):
        shifts += (gl.zeros([8, HEADS], gl.float32, gl.SliceLayout(0, LOGITS)),)
        out += (gl.zeros([dims_of(of(VALUE, i)), COLUMNS], gl.float32, MMA),)
    for tile in range(first, last + 1, TILES):
        async_copy.wait_group(0)
        stage = (tile - first) % (2 * TILES)
        copy_tiles(
            shared, TILES - stage, pool, pages, tile + TILES, last, newest, KEY, VALUE, PAGE, PAGE_WORDS, OVERLAP
        )
        pages = tile_pages(table, tile + 2 * TILES, table_pages, kv_heads, KEY, VALUE, TILES, PAGE)
        factors = _scales(scales, stage, TILES, ROWS, LOGITS)
        logits = _logits(keys, stage, factors, queries, KEY, HEADS, MMA)
        if differs(tile, TILES, whole, near):
            logits = _masked(logits, tile, lacking, near, end, shortest, BLOCK, LOGITS, RATIO, QUERIES, HEADS)
        weight, fade, highest, total = _softmax(logits, highest, total)
        shifts, out = _faded(shifts, out, fade, HEADS, MMA)
        for j in gl.static_range(TILES):
            shifts, out = _add_values(
                shifts, out, weight[j], factors[j], values, stage + j, KEY, VALUE, HEADS, COLUMNS, MMA
            )

    wait_by(OVERLAP, "end")
    release_next(OVERLAP)
    total = gl.sum(total, 0)
    for i in gl.static_range(len(VALUE.each)):
        part = outs + (place * DIMS + start_of(VALUE, i))
        shift = gl.sum(shifts[i], 0)
        _store_segment(part, out[i], total, shift, live, stride, i, of(VALUE, i), DIMS, RATIO, QUERIES, HEADS, COLUMNS)
    store_weights(weights + place, highest, total, live, stride, RATIO, QUERIES, HEADS)


@gluon.jit
def _allocate(TILES: gl.constexpr, WORDS: gl.constexpr, LAYOUT: gl.constexpr):
    """Shared memory for tiles with WORDS words per token: those that are read, and those that are copied."""
    return gl.allocate_shared_memory(gl.int32, [STAGES * TILES, 8, 8 * WORDS], LAYOUT)


@gluon.jit
def _scales(scales, stage, TILES: gl.constexpr, ROWS: gl.constexpr, LOGITS: gl.constexpr):
    """The scales of tiles: per tile, those of all segments."""
    tiles = ()
    for j in gl.static_range(TILES):
        tiles += (read_scales(scales.index(stage + j), ROWS, LOGITS),)
    return tiles


@gluon.jit
def _masked(logits, tile, lacking, near, end, shortest, BLOCK: gl.constexpr, LOGITS: gl.constexpr, RATIO: gl.constexpr,
            QUERIES: gl.constexpr, HEADS: gl.constexpr):  # fmt: skip
    masked = ()
    for j in gl.static_range(len(logits)):
        seen = seen_tokens(tile + j, end, LOGITS)
        seen = seen_by_each(seen, tile + j, shortest, BLOCK, LOGITS, RATIO, QUERIES, HEADS)
        masked += (gl.where(seen, with_first(logits[j], tile + j, lacking, near, LOGITS), UNSEEN),)
    return masked


@gluon.jit
def _softmax(logits, highest, total):
    """`softmax` of several tiles together. Logits are LOGIT times too small, weights 2^WEIGHT times too large."""
    peaks = gl.max(logits[0], 0)
    for j in gl.static_range(1, len(logits)):
        peaks = gl.maximum(peaks, gl.max(logits[j], 0))
    now = gl.maximum(highest, gl.max(peaks, 0) * LOGIT)
    fade = exp2(highest - now)
    one = (now - WEIGHT)[None, :][None, :, :]
    weights = ()
    total = total * fade[None, :]
    for j in gl.static_range(len(logits)):
        weights += (exp2(logits[j] * LOGIT - one),)
        total += gl.sum(weights[j], 0) * 2.0**-WEIGHT
    return weights, fade, now, total


# --- the two products


@gluon.jit
def _logits(keys, stage, factors, queries, KEY: gl.constexpr, HEADS: gl.constexpr, MMA: gl.constexpr):
    """Logits [place in a run, run, head] per tile, LOGIT times too small."""
    tiles = ()
    for j in gl.static_range(len(factors)):
        logits = gl.zeros([8, 8, HEADS], gl.float32, logits_layout(HEADS))
        for i in gl.static_range(len(queries)):
            k = read_keys(keys[i].index(stage + j), of(KEY, i))
            logits = _add_logits(logits, k, factors[j][i], queries[i], of(KEY, i), HEADS, MMA)
        tiles += (logits,)
    return tiles


@gluon.jit
def _add_logits(logits, k, factor, query, SEGMENT: gl.constexpr, HEADS: gl.constexpr, MMA: gl.constexpr):
    """The logits of a tile, with what a segment adds."""
    operand, begin, unit = query
    products = mma_v2(_keys(k, SEGMENT, MMA), operand, begin)
    high, low = gl.split(gl.reshape(products, [8, 8, HEADS, 2]))
    product = high * 256 + low
    unit = unit[None, :][None, :, :]
    if SEGMENT.bits == 8:
        product = gl.convert_layout(product.to(gl.float32), logits_layout(HEADS), assert_trivial=True) * unit
    else:
        product = gl.convert_layout(product, logits_layout(HEADS), assert_trivial=True)
        product = product.to(gl.float32, bitcast=True) * unit - ROUNDER * unit
    return gl.inline_asm_elementwise(
        "fma.rn.ftz.f32 $0, $1, $2, $3;", "=f,f,f,f", [product, factor, logits], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _queries(q, scale, zero, live, stride, SEGMENT: gl.constexpr, DIMS: gl.constexpr, RATIO: gl.constexpr,
             QUERIES: gl.constexpr, HEADS: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """For a segment of keys: the second operand of its logits, what sums begin with, and the unit per head.

    `zero` is 0, but the compiler does not know.
    """
    COUNT: gl.constexpr = dims_of(SEGMENT)
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    HEAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, logits_layout(HEADS)))
    index = gl.arange(0, COUNT, gl.SliceLayout(1, OPERAND))
    column = gl.arange(0, 2 * HEADS, gl.SliceLayout(0, OPERAND))
    coordinate = index * 0
    for bit in gl.static_range(log2(COUNT)):
        coordinate += (index >> bit & 1) * key_coordinate(bit, SEGMENT.bits, SEGMENT.per_token)
    # the code of a nibble: queries are divided by its place value
    code = (index >> (log2(COUNT) - log2(codes_per_lane(SEGMENT.bits, SEGMENT.per_token)))) * SEGMENT.bits & 3
    place = (1 << code).to(gl.float32)[:, None]
    head = (column // 2)[None, :]
    at = row_of(head, stride, RATIO, QUERIES, DIMS) + coordinate[:, None]
    x = gl.load(q + at, mask=head < live, other=0.0).to(gl.float32)
    unit = gl.max(gl.abs(x * (1.0 / place)), 0) / 32639.0 + 1e-30
    MIDDLE: gl.constexpr = key_middle(SEGMENT.bits)
    if SEGMENT.bits < 8:  # a sum of products is at most |x|·|codes − middle|
        unit = gl.maximum(unit, gl.sqrt(gl.sum(x * x, 0)) * (MIDDLE * COUNT**0.5 / EXACT))
    rounded = x * (1.0 / place) * (1.0 / unit)[None, :] + ROUNDER
    fixed = rounded.to(gl.int32, bitcast=True)  # in the low 16 bits, which are 0 in ROUNDER
    begin = gl.sum((rounded - ROUNDER) * place, 0) * -MIDDLE
    if SEGMENT.bits < 8:
        begin += ROUNDER
        begin = begin.to(gl.int32, bitcast=True)
    else:
        begin = begin.to(gl.int32)
    begin = gl.convert_layout(gl.where(column % 2 == 0, 0, begin), gl.SliceLayout(0, MMA))
    narrow = gl.where((column % 2)[None, :] == 0, (fixed + 128) >> 8, fixed).to(gl.int8)
    unit = gl.convert_layout(gl.max(gl.reshape(unit, [HEADS, 2]), 1) * (scale * QUERY), HEAD)
    # MMA adds to four neighbouring registers. They stay in place if two of them differ from the others, by `zero`, and
    # all tiles of 16 tokens share them; else each MMA would copy them.
    row = gl.arange(0, 16, gl.SliceLayout(1, MMA))
    rows = begin[None, :] + (row // 8 * zero)[:, None]
    rows = gl.reshape(gl.permute(joined((rows, rows, rows, rows)), [2, 3, 0, 1]), [64, 2 * HEADS])
    return narrow, gl.convert_layout(rows, MMA, assert_trivial=True), unit


@gluon.jit
def _add_values(shifts, out, weight, factors, values, stage, KEY: gl.constexpr, VALUE: gl.constexpr,
                HEADS: gl.constexpr, COLUMNS: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Sums of weights and outputs [coordinate, column] of all segments, with those of a tile."""
    weighted, new_shifts, new_out = (), (), ()
    for i in gl.static_range(len(out)):
        weighted += (_flushed_product(weight, factors[KEY.segments + i]),)
    operands = _operands(weighted, VALUE, HEADS, COLUMNS, MMA)
    for i in gl.static_range(len(out)):
        v = value_operand(read_values(values[i].index(stage), of(VALUE, i)), of(VALUE, i), dims_of(of(VALUE, i)), MMA)
        new_shifts += (shifts[i] + gl.sum(weighted[i], 0),)
        new_out += (mma_v2(v, operands[i], out[i]),)
    return new_shifts, new_out


@gluon.jit
def _operands(weighted, VALUE: gl.constexpr, HEADS: gl.constexpr, COLUMNS: gl.constexpr, MMA: gl.constexpr):
    """Weights [place, run, head] per segment of values -> the second operand of its outputs, [token, column].

    Four heads have a column for either segment. More heads have as many columns per segment.
    """
    if VALUE.segments == 1:
        return (weights_operand(weighted[0], weighted[0], VALUE, HEADS, COLUMNS, MMA),)
    elif HEADS == 4:
        both = weights_operand(weighted[0], weighted[1], VALUE, HEADS, COLUMNS, MMA)
        return both, both
    else:
        first = weights_operand(weighted[0], weighted[0], VALUE, HEADS, COLUMNS, MMA)
        return first, weights_operand(weighted[1], weighted[1], VALUE, HEADS, COLUMNS, MMA)


@gluon.jit
def _faded(shifts, out, fade, HEADS: gl.constexpr, MMA: gl.constexpr):
    """Sums and outputs [coordinate, column] of all segments so far, times the `fade` of their head."""
    new_shifts, new_out = (), ()
    for i in gl.static_range(len(out)):
        new_shifts += (shifts[i] * fade[None, :],)
        new_out += (_faded_segment(out[i], fade, i, HEADS, MMA),)
    return new_shifts, new_out


@gluon.jit
def _faded_segment(out, fade, NUMBER: gl.constexpr, HEADS: gl.constexpr, MMA: gl.constexpr):
    if HEADS == 4:
        first, second = gl.split(gl.reshape(out, [out.shape[0], HEADS, 2]))
        by = gl.convert_layout(fade, gl.SliceLayout(0, first.type.layout), assert_trivial=True)[None, :]
        if NUMBER == 0:
            first = first * by
        else:
            second = second * by
        out = gl.convert_layout(gl.reshape(gl.join(first, second), out.shape), MMA, assert_trivial=True)
    else:
        out = out * gl.convert_layout(in_columns(fade), gl.SliceLayout(0, MMA), assert_trivial=True)[None, :]
    return out


@gluon.jit
def _store_segment(part, out, total, shift, live, stride, NUMBER: gl.constexpr, SEGMENT: gl.constexpr,
                   DIMS: gl.constexpr, RATIO: gl.constexpr, QUERIES: gl.constexpr, HEADS: gl.constexpr,
                   COLUMNS: gl.constexpr):  # fmt: skip
    """Store outputs [coordinate, column] of a segment as means over this CTA's tokens, float32[RATIO, DIMS] per
    query."""
    SIZE: gl.constexpr = dims_of(SEGMENT)
    out = codes_alone(out, SEGMENT, SIZE, COLUMNS)
    if HEADS == 4:
        first, second = gl.split(gl.reshape(out, [SIZE, HEADS, 2]))
        out = first if NUMBER == 0 else second
    else:
        total, shift = in_columns(total), in_columns(shift)
    LAYOUT: gl.constexpr = out.type.layout
    total = gl.convert_layout(total, gl.SliceLayout(0, LAYOUT), assert_trivial=True)
    shift = gl.convert_layout(shift, gl.SliceLayout(0, LAYOUT), assert_trivial=True)
    index = gl.arange(0, SIZE, gl.SliceLayout(1, LAYOUT))
    head = gl.arange(0, HEADS, gl.SliceLayout(0, LAYOUT))
    if HEADS > 4:
        head = head_in(head, HEADS)
    # the code that `value_operand` puts at this index; from the low bits up: half of a row, row, code of the byte, byte
    LINES: gl.constexpr = SEGMENT.per_token // 4
    CODES: gl.constexpr = 8 // SEGMENT.bits
    code, half = (index >> 3) // LINES % CODES, (index >> 3) % LINES * 8 + (index & 7)
    coordinate = 2 * half + (index >> 3) // (LINES * CODES) + code * (4 * SEGMENT.per_token)
    back = UNIT / (1 << (code * SEGMENT.bits)).to(gl.float32)
    MIDDLE: gl.constexpr = (2**SEGMENT.bits - 1) / 2
    mean = out * back[:, None] - (shift * MIDDLE)[None, :]
    mean = mean * (gl.where(total > 0.0, 1.0 / total, 0.0) * BACK)[None, :]
    at = row_of(head, stride * DIMS, RATIO, QUERIES, DIMS)
    gl.store(part + (at[None, :] + coordinate[:, None]), mean, mask=(head < live)[None, :])


# --- from words to operands


@gluon.jit
def _keys(k, SEGMENT: gl.constexpr, MMA: gl.constexpr):
    """Words [run, place, word] of a segment -> the first operand of its logits, int8[token, coordinate]."""
    WORDS: gl.constexpr = SEGMENT.per_token
    SHARING: gl.constexpr = sharing(WORDS)
    OUT: gl.constexpr = 4 * codes_per_lane(SEGMENT.bits, WORDS)
    LAYOUT: gl.constexpr = sharing_layout(WORDS)
    k = gl.convert_layout(k, gl.SliceLayout(3, LAYOUT), assert_trivial=True)[:, :, :, None]
    by = gl.arange(0, SHARING, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))) * (8 // SHARING)
    by = by[None, :][None, :, :][None, :, :, :]
    codes = gl.inline_asm_elementwise(
        unpack_shared_bytes(SEGMENT.bits, SHARING), registers(OUT, 8), [k, by], dtype=repeated(gl.int8, OUT),
        is_pure=True, pack=4,
    )  # fmt: skip
    codes = gl.reshape(joined(codes), with_bits((8, 2, 4, 4, max(1, WORDS // 4)), OUT).value)
    codes = gl.permute(codes, around_bits((1, 6, 5, 0), 7, OUT // 4, (4, 3, 2)).value)
    codes = gl.reshape(codes, [64, dims_of(SEGMENT)])
    return gl.convert_layout(codes, gl.DotOperandLayout(0, MMA, 4), assert_trivial=True)


@gluon.jit
def _flushed_product(weight, factor):
    """weight·factor, 0 if the factor is subnormal."""
    return gl.inline_asm_elementwise(
        "mul.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [weight, factor], dtype=gl.float32, is_pure=True, pack=1
    )
