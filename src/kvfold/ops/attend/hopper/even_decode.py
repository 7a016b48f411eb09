"""The Gluon kernel for evenly spaced levels. It is the kernel for integers (see integer_decode.py) with segments of
different widths, each in an array of its own.

- Keys: every segment is a product of its own. Its sum begins at −middle·Σ query, so levels lie around zero without an
  instruction. If a token has fewer words than the four lanes of a run, lanes share a word: each shifts it and takes
  some codes of every byte.
- Values: every segment has outputs of its own. −middle·Σ weight·scale is added to them in the end.
- Scales: a byte shifted to the place of exponent and mantissa is a float32 that is 2^119 times too small. It is
  subnormal, and so flushed to zero, if its exponent is 0. A lane reads the scales of its run at once, for all segments.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kvfold.format.layout import PageLayout
from kvfold.ops.attend.hopper.decode_tiles import (
    UNSEEN,
    exp2,
    in_columns,
    joined,
    log2,
    logits_layout,
    own_tiles,
    release_by,
    seen_tokens,
    store_weights,
    wait_by,
    wait_for_stored,
    weights_operand,
)
from kvfold.ops.attend.hopper.even_layouts import (
    codes_per_lane,
    copied_scales,
    key_coordinate,
    key_middle,
    scale_layout,
    shared_words,
    sharing,
    sharing_layout,
    unpack_scales,
    unpack_shared_bytes,
)
from kvfold.ops.attend.hopper.integer_decode import (
    STAGES,
    UNIT,
    IntegerWords,
    _codes_alone,
    _page,
    _read_values,
    _values,
    async_load,
    ctas,
    meta_stages,
)
from kvfold.ops.attend.hopper.integer_layouts import (
    around_bits,
    copy_layout,
    flat,
    key_layout,
    registers,
    repeated,
    with_bits,
)
from kvfold.ops.store.quantize_tiles import ROUNDER

# Of a scale: what a byte at the place of a float32 lacks, and what brings weights into the middle of float16's range.
KEY_SCALE = gl.constexpr(2.0**119)
VALUE_SCALE = gl.constexpr(2.0**126)
BACK = gl.constexpr(2.0**-7)  # KEY_SCALE / VALUE_SCALE
EXACT = gl.constexpr(2.0**22 - 2.0**12)  # products up to this are the low bits of ROUNDER + product


class EvenSide(NamedTuple):
    """The keys or the values of a page as 32-bit words."""

    segments: int
    words: int  # of codes per token
    each: tuple[IntegerWords, ...]


def even_sides(layout: PageLayout) -> tuple[EvenSide, EvenSide]:
    sides = []
    for side, slot in enumerate((layout.key, layout.value)):
        places = zip(slot.segments, layout.places(side), strict=True)
        words = [IntegerWords(seg.bits, 1, at.code_stride // 4, at.codes // 4, at.meta // 4) for seg, at in places]
        sides.append(EvenSide(len(words), slot.code_bytes // 4, tuple(words)))
    return sides[0], sides[1]


def room(key: EvenSide, value: EvenSide) -> int:
    """How many CTAs an SM takes."""
    words = key.words + value.words + scale_rows(key.segments + value.segments) // 4
    return ctas(tiles_at_once(words) * words)


@gluon.constexpr_function
def tiles_at_once(words):
    """Two, if as many CTAs fit with two: what is done once per loop then counts half. `words`: per token, in shared
    memory."""
    return 2 if ctas(2 * words) == ctas(words) else 1


@gluon.constexpr_function
def scale_rows(segments):
    """How many scales per token shared memory has: those of all segments, up to 4 or 8."""
    return 4 if segments <= 4 else 8


@gluon.constexpr_function
def of(side, number):
    """A segment of a side."""
    return side.each[number]


@gluon.constexpr_function
def dims_of(segment):
    return 32 * segment.per_token // segment.bits


@gluon.constexpr_function
def start_of(side, number):
    """The first coordinate of a segment."""
    return sum(32 * segment.per_token // segment.bits for segment in side.each[:number])


@gluon.jit(
    do_not_specialize=["sink", "recent", "q_stride", "table_stride", "table_pages"],
    do_not_specialize_on_alignment=["table", "lengths"],
)
def decode(
    q,  # [sequences, q_heads, DIMS], sequences q_stride apart, rotated
    outs,
    weights,
    pool,
    table,
    lengths,
    scale,  # of logits, times log2(e) and the unit of keys
    sink,
    recent,
    q_stride,
    table_stride,
    table_pages,
    unit,  # of values
    KEY: gl.constexpr,
    VALUE: gl.constexpr,
    DIMS: gl.constexpr,
    PAGE: gl.constexpr,
    PAGE_WORDS: gl.constexpr,
    RATIO: gl.constexpr,  # query heads per KV head
    HEADS: gl.constexpr,  # RATIO, up to 4 or 8
    COLUMNS: gl.constexpr,
    ORDER: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    LOGITS: gl.constexpr = logits_layout(HEADS)
    HEAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, LOGITS))
    ROWS: gl.constexpr = scale_rows(KEY.segments + VALUE.segments)
    split, head, sequence = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    splits, kv_heads, sequences = gl.num_programs(0), gl.num_programs(1), gl.num_programs(2)
    table += sequence.to(gl.int64) * table_stride
    begin, end, first, last, newest = own_tiles(split, splits, sink, recent, gl.load(lengths + sequence))
    pool += head.to(gl.int64) * PAGE_WORDS

    end = gl.minimum(end, last * 64 + 64)  # the loop may go past the last tile

    WORDS: gl.constexpr = KEY.words + VALUE.words + ROWS // 4
    TILES: gl.constexpr = tiles_at_once(WORDS)
    keys, values = (), ()
    for i in gl.static_range(len(KEY.each)):
        keys += (_allocate(TILES, KEY.each[i].per_token, shared_words(KEY.each[i].per_token)),)
    for i in gl.static_range(len(VALUE.each)):
        values += (_allocate(TILES, VALUE.each[i].per_token, gl.SwizzledSharedLayout(4, 1, 8, [1, 0])),)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    PADDED: gl.constexpr = meta_stages(TILES * (ROWS // 4), TILES * (WORDS - ROWS // 4))
    scales = gl.allocate_shared_memory(gl.int32, [TILES * PADDED, 8, ROWS, 2], FLAT)
    shared = (keys, values, scales)
    pages = _pages(table, first, table_pages, kv_heads, KEY, VALUE, TILES, PAGE)
    _copy_tiles(shared, 0, pool, pages, first, last, newest, KEY, VALUE, PAGE, PAGE_WORDS, OVERLAP)
    pages = _pages(table, first + TILES, table_pages, kv_heads, KEY, VALUE, TILES, PAGE)

    wait_by(OVERLAP, "start")
    release_by(OVERLAP, "start")
    row = (sequence * kv_heads + head) * RATIO
    place = (split.to(gl.int64) * sequences * kv_heads * RATIO) + row
    highest = gl.full([HEADS], UNSEEN, gl.float32, HEAD)
    if (first > last) & (splits > 1):  # nothing to read: free the SM; `merge` ignores the outputs of such a part
        wait_by(OVERLAP, "end")
        release_by(OVERLAP, "end")
        store_weights(weights + place, highest, gl.zeros_like(highest), RATIO, HEADS)
        return
    q += sequence.to(gl.int64) * q_stride + head * (RATIO * DIMS)
    queries = ()
    for i in gl.static_range(len(KEY.each)):
        queries += (_queries(q + start_of(KEY, i), scale, table_pages >> 31, of(KEY, i), DIMS, RATIO, HEADS, MMA),)

    total = gl.zeros([8, HEADS], gl.float32, gl.SliceLayout(0, LOGITS))
    shifts, out = (), ()
    for i in gl.static_range(len(VALUE.each)):
        shifts += (gl.zeros([8, HEADS], gl.float32, gl.SliceLayout(0, LOGITS)),)
        out += (gl.zeros([dims_of(of(VALUE, i)), 8], gl.float32, MMA),)
    for tile in range(first, last + 1, TILES):
        async_copy.wait_group(0)
        stage = (tile - first) % (2 * TILES)
        _copy_tiles(
            shared, TILES - stage, pool, pages, tile + TILES, last, newest, KEY, VALUE, PAGE, PAGE_WORDS, OVERLAP
        )
        pages = _pages(table, tile + 2 * TILES, table_pages, kv_heads, KEY, VALUE, TILES, PAGE)
        logits, factors = (), ()
        for j in gl.static_range(TILES):
            factors += (_read_scales(scales.index(stage + j), ROWS, LOGITS),)
            sums = gl.zeros([8, 8, HEADS], gl.float32, LOGITS)
            for i in gl.static_range(len(KEY.each)):
                k = _read_keys(keys[i].index(stage + j), of(KEY, i))
                sums = _add_logits(sums, k, factors[j][i], queries[i], of(KEY, i), HEADS, MMA)
            logits += (sums,)
        if (tile * 64 < begin) | (tile * 64 + 64 * TILES > end):
            logits = _masked(logits, tile, begin, end, LOGITS)
        weight, fade, highest, total = _softmax(logits, highest, total)
        shifts, out = _faded(shifts, out, fade, HEADS, MMA)
        for j in gl.static_range(TILES):
            weighted = ()
            for i in gl.static_range(len(VALUE.each)):
                weighted += (weight[j] * _flushed(factors[j][KEY.segments + i], VALUE_SCALE),)
            operands = _operands(weighted, VALUE, HEADS, MMA)
            new_shifts, new_out = (), ()
            for i in gl.static_range(len(VALUE.each)):
                new_shifts += (shifts[i] + gl.sum(weighted[i], 0),)
                v = _read_values(values[i].index(stage + j), of(VALUE, i))
                new_out += (mma_v2(_values(v, of(VALUE, i), dims_of(of(VALUE, i)), MMA), operands[i], out[i]),)
            shifts, out = new_shifts, new_out

    wait_by(OVERLAP, "end")
    release_by(OVERLAP, "end")
    total = gl.sum(total, 0)
    for i in gl.static_range(len(VALUE.each)):
        part = outs + (place * DIMS + start_of(VALUE, i))
        _store_segment(part, out[i], total, gl.sum(shifts[i], 0), unit, i, of(VALUE, i), DIMS, RATIO, HEADS)
    store_weights(weights + place, highest, total, RATIO, HEADS)


@gluon.jit
def _allocate(TILES: gl.constexpr, WORDS: gl.constexpr, LAYOUT: gl.constexpr):
    """Shared memory for tiles with WORDS words per token: those that are read, and those that are copied."""
    return gl.allocate_shared_memory(gl.int32, [STAGES * TILES, 8, 8 * WORDS], LAYOUT)


@gluon.jit
def _masked(logits, tile, begin, end, LOGITS: gl.constexpr):
    masked = ()
    for j in gl.static_range(len(logits)):
        masked += (gl.where(seen_tokens(tile + j, begin, end, LOGITS), logits[j], UNSEEN),)
    return masked


@gluon.jit
def _softmax(logits, highest, total):
    """`softmax` of several tiles together."""
    peaks = gl.max(logits[0], 0)
    for j in gl.static_range(1, len(logits)):
        peaks = gl.maximum(peaks, gl.max(logits[j], 0))
    now = gl.maximum(highest, gl.max(peaks, 0))
    fade = exp2(highest - now)
    weights = ()
    total = total * fade[None, :]
    for j in gl.static_range(len(logits)):
        weights += (exp2(logits[j] - now[None, :][None, :, :]),)
        total += gl.sum(weights[j], 0)
    return weights, fade, now, total


# --- the two products


@gluon.jit
def _add_logits(logits, k, factor, query, SEGMENT: gl.constexpr, HEADS: gl.constexpr, MMA: gl.constexpr):
    """Logits [place in a run, run, head] of a tile, with those of a segment."""
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
def _queries(q, scale, zero, SEGMENT: gl.constexpr, DIMS: gl.constexpr, RATIO: gl.constexpr, HEADS: gl.constexpr,
             MMA: gl.constexpr):  # fmt: skip
    """For a segment of keys: the second operand of its logits, what sums begin with, and the unit per head."""
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
    x = gl.load(q + (head * DIMS + coordinate[:, None]), mask=head < RATIO, other=0.0).to(gl.float32)
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
    unit = gl.convert_layout(gl.max(gl.reshape(unit, [HEADS, 2]), 1) * (scale * KEY_SCALE), HEAD)
    row = gl.arange(0, 16, gl.SliceLayout(1, MMA))
    rows = begin[None, :] + (row // 8 * zero)[:, None]
    rows = gl.reshape(gl.permute(joined((rows, rows, rows, rows)), [2, 3, 0, 1]), [64, 2 * HEADS])
    return narrow, gl.convert_layout(rows, MMA, assert_trivial=True), unit


@gluon.jit
def _operands(weighted, VALUE: gl.constexpr, HEADS: gl.constexpr, MMA: gl.constexpr):
    """Weights [place, run, head] per segment of values -> the second operand of its outputs, [token, column].

    Four heads have a column for either segment. Eight heads have eight columns per segment.
    """
    if VALUE.segments == 1:
        return (weights_operand(weighted[0], weighted[0], VALUE, HEADS, 8, MMA),)
    elif HEADS == 4:
        both = weights_operand(weighted[0], weighted[1], VALUE, HEADS, 8, MMA)
        return both, both
    else:
        first = weights_operand(weighted[0], weighted[0], VALUE, HEADS, 8, MMA)
        return first, weights_operand(weighted[1], weighted[1], VALUE, HEADS, 8, MMA)


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
def _store_segment(part, out, total, shift, unit, NUMBER: gl.constexpr, SEGMENT: gl.constexpr, DIMS: gl.constexpr,
                   RATIO: gl.constexpr, HEADS: gl.constexpr):  # fmt: skip
    """Store outputs [coordinate, column] of a segment as means over this CTA's tokens, float32[RATIO, DIMS]."""
    SIZE: gl.constexpr = dims_of(SEGMENT)
    out = _codes_alone(out, SEGMENT, SIZE, 8)
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
    if HEADS == 8:
        head = head // 2 + head % 2 * 4
    # the code that `_values` puts at this index; from the low bits up: half of a row, row, code of the byte, byte
    LINES: gl.constexpr = SEGMENT.per_token // 4
    CODES: gl.constexpr = 8 // SEGMENT.bits
    code, half = (index >> 3) // LINES % CODES, (index >> 3) % LINES * 8 + (index & 7)
    coordinate = 2 * half + (index >> 3) // (LINES * CODES) + code * (4 * SEGMENT.per_token)
    back = UNIT / (1 << (code * SEGMENT.bits)).to(gl.float32)
    MIDDLE: gl.constexpr = (2**SEGMENT.bits - 1) / 2
    mean = out * back[:, None] - (shift * MIDDLE)[None, :]
    mean = mean * (gl.where(total > 0.0, 1.0 / total, 0.0) * (unit * BACK))[None, :]
    gl.store(part + (head[None, :] * DIMS + coordinate[:, None]), mean, mask=(head < RATIO)[None, :])


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
def _flushed(factor, SCALE: gl.constexpr):
    """factor·SCALE, 0 if the factor is subnormal."""
    return gl.inline_asm_elementwise(
        "mul.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [factor, SCALE], dtype=gl.float32, is_pure=True, pack=1
    )


# --- from pages to shared memory, and from there to lanes


@gluon.jit
def _pages(table, tile, table_pages, kv_heads, KEY: gl.constexpr, VALUE: gl.constexpr, TILES: gl.constexpr,
           PAGE: gl.constexpr):  # fmt: skip
    """Where in the pool the pages of tiles are, in rows of KV head 0: per tile, for keys, values and scales."""
    SEGMENTS: gl.constexpr = KEY.segments + VALUE.segments
    tiles = ()
    for j in gl.static_range(TILES):
        pages = ()
        for i in gl.static_range(len(KEY.each)):
            pages += (_page(table, tile + j, table_pages, kv_heads, KEY.each[i].per_token, PAGE),)
        for i in gl.static_range(len(VALUE.each)):
            pages += (_page(table, tile + j, table_pages, kv_heads, VALUE.each[i].per_token, PAGE),)
        tiles += (pages + (_scale_page(table, tile + j, table_pages, kv_heads, SEGMENTS, PAGE),),)
    return tiles


@gluon.jit
def _scale_page(table, tile, table_pages, kv_heads, SEGMENTS: gl.constexpr, PAGE: gl.constexpr):
    """`_page` in the layout of scales."""
    if PAGE % 64 == 0:
        page = gl.load(table + gl.minimum(tile * 64 // PAGE, table_pages - 1))
    else:
        run = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, copied_scales(scale_rows(SEGMENTS)))))
        page = gl.load(table + gl.minimum((tile * 64 + run * 8) // PAGE, table_pages - 1))
    return page.to(gl.int32) * kv_heads


@gluon.jit
def _copy_tiles(shared, stage, pool, pages, tile, last, newest, KEY: gl.constexpr, VALUE: gl.constexpr,
                PAGE: gl.constexpr, PAGE_WORDS: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Prefetch tiles as one group of copies. Nothing is copied past the last tile."""
    for j in gl.static_range(len(pages)):
        if tile + j <= last:
            wait_for_stored(tile + j, newest, OVERLAP)
            _copy_tile(shared, stage + j, pool, pages[j], tile + j, KEY, VALUE, PAGE, PAGE_WORDS)
    async_copy.commit_group()


@gluon.jit
def _copy_tile(shared, stage, pool, pages, tile, KEY: gl.constexpr, VALUE: gl.constexpr, PAGE: gl.constexpr,
               PAGE_WORDS: gl.constexpr):  # fmt: skip
    keys, values, scales = shared
    for i in gl.static_range(len(KEY.each)):
        _copy(keys[i].index(stage), pool, pages[i], tile, of(KEY, i), PAGE, PAGE_WORDS)
    for i in gl.static_range(len(VALUE.each)):
        _copy(values[i].index(stage), pool, pages[KEY.segments + i], tile, of(VALUE, i), PAGE, PAGE_WORDS)
    SEGMENTS: gl.constexpr = KEY.segments + VALUE.segments
    _copy_scales(scales.index(stage), pool, pages[SEGMENTS], tile, KEY.each[0].meta, SEGMENTS, PAGE, PAGE_WORDS)


@gluon.jit
def _copy(to, pool, page, tile, SEGMENT: gl.constexpr, PAGE: gl.constexpr, PAGE_WORDS: gl.constexpr):
    """Prefetch the words of a segment, [run, word of its tokens]."""
    WORDS: gl.constexpr = SEGMENT.per_token
    LAYOUT: gl.constexpr = copy_layout(WORDS, PAGE)
    run = gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
    word = gl.arange(0, 8 * WORDS, gl.SliceLayout(0, LAYOUT)) + SEGMENT.codes
    if PAGE % 64 == 0:  # what all tiles share comes first
        at = page.to(gl.int64) * PAGE_WORDS + gl.multiple_of(tile * 64 % PAGE, 64) * WORDS
        pointers = pool + ((run * (8 * WORDS))[:, None] + word[None, :]) + at
    else:
        at = page.to(gl.int64) * PAGE_WORDS + (tile * 64 + run * 8) % PAGE * WORDS
        pointers = pool + gl.multiple_of(at, 4)[:, None] + word[None, :]
    async_load(to, pointers)


@gluon.jit
def _copy_scales(to, pool, page, tile, META: gl.constexpr, SEGMENTS: gl.constexpr, PAGE: gl.constexpr,
                 PAGE_WORDS: gl.constexpr):  # fmt: skip
    """Prefetch the scales of a tile, [run, segment, word]. In a page, the arrays of all segments follow each other."""
    LAYOUT: gl.constexpr = copied_scales(scale_rows(SEGMENTS))
    run = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    row = gl.arange(0, scale_rows(SEGMENTS), gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    word = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    within = (META + row * (PAGE // 4))[None, :, None] + word[None, None, :]
    if PAGE % 64 == 0:
        at = page.to(gl.int64) * PAGE_WORDS + gl.multiple_of(tile * 64 % PAGE, 64) // 4
        pointers = pool + ((run * 2)[:, None, None] + within) + at
    else:
        at = page.to(gl.int64) * PAGE_WORDS + (tile * 64 + run * 8) % PAGE // 4
        pointers = pool + gl.multiple_of(at, 2)[:, None, None] + within
    async_load(to, pointers, mask=(row < SEGMENTS)[None, :, None])


@gluon.jit
def _read_keys(shared, SEGMENT: gl.constexpr):
    """The words of a segment of a tile's keys, [run, place, word]."""
    LAYOUT: gl.constexpr = key_layout(SEGMENT.per_token, 1)
    words = gl.reshape(shared.load(flat(LAYOUT)), [8, 8, SEGMENT.per_token])
    return gl.convert_layout(words, LAYOUT, assert_trivial=True)


@gluon.jit
def _read_scales(shared, ROWS: gl.constexpr, LOGITS: gl.constexpr):
    """The scales of a tile per segment, [place, run, 1], 2^119 times too small."""
    return _scales(shared.load(scale_layout(ROWS)), ROWS, LOGITS)


@gluon.jit
def _scales(words, ROWS: gl.constexpr, LOGITS: gl.constexpr):
    """Words [run, segment, word] -> scales per segment."""
    if ROWS > 1:
        first, second = gl.split(gl.permute(gl.reshape(words, [8, 2, ROWS // 2, 2]), [0, 2, 3, 1]))
        return _scales(first, ROWS // 2, LOGITS) + _scales(second, ROWS // 2, LOGITS)
    else:
        bytes = gl.inline_asm_elementwise(
            unpack_scales(), "=f,=f,=f,=f,r", [gl.reshape(words, [8, 2])], dtype=repeated(gl.float32, 4), is_pure=True,
            pack=1,
        )  # fmt: skip
        scales = gl.reshape(gl.permute(joined(bytes), [1, 3, 2, 0]), [8, 8])  # [word, high bit, low bit, run]
        return (gl.convert_layout(scales, gl.SliceLayout(2, LOGITS), assert_trivial=True)[:, :, None],)
