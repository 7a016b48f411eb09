"""How evenly spaced levels get from pages to shared memory, and from there to lanes.

A segment is [run, word of its tokens] in shared memory. The scales of all segments are [run, segment, word].
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from kvfold.format.layout import PageLayout
from kvfold.ops.attend.gluon.decode_tiles import joined, wait_for_stored
from kvfold.ops.attend.gluon.even_layouts import copied_scales, scale_layout, unpack_scales
from kvfold.ops.attend.gluon.integer_decode import IntegerWords, async_load, page_row
from kvfold.ops.attend.gluon.integer_layouts import copy_layout, flat, key_layout, repeated


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


@gluon.jit
def tile_pages(table, tile, table_pages, kv_heads, KEY: gl.constexpr, VALUE: gl.constexpr, TILES: gl.constexpr,
           PAGE: gl.constexpr):  # fmt: skip
    """Where in the pool the pages of tiles are, in rows of KV head 0: per tile, for keys, values and scales."""
    SEGMENTS: gl.constexpr = KEY.segments + VALUE.segments
    tiles = ()
    for j in gl.static_range(TILES):
        pages = ()
        for i in gl.static_range(len(KEY.each)):
            pages += (page_row(table, tile + j, table_pages, kv_heads, KEY.each[i].per_token, PAGE),)
        for i in gl.static_range(len(VALUE.each)):
            pages += (page_row(table, tile + j, table_pages, kv_heads, VALUE.each[i].per_token, PAGE),)
        pages += (_scale_page(table, tile + j, table_pages, kv_heads, SEGMENTS, PAGE),)
        tiles += (pages,)
    return tiles


@gluon.jit
def _scale_page(table, tile, table_pages, kv_heads, SEGMENTS: gl.constexpr, PAGE: gl.constexpr):
    """`page_row` in the layout of scales."""
    if PAGE % 64 == 0:
        page = gl.load(table + gl.minimum(tile * 64 // PAGE, table_pages - 1))
    else:
        run = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, copied_scales(scale_rows(SEGMENTS)))))
        page = gl.load(table + gl.minimum((tile * 64 + run * 8) // PAGE, table_pages - 1))
    return page.to(gl.int32) * kv_heads


@gluon.jit
def copy_tiles(shared, stage, pool, pages, tile, last, newest, KEY: gl.constexpr, VALUE: gl.constexpr,
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
def read_keys(shared, SEGMENT: gl.constexpr):
    """The words of a segment of a tile's keys, [run, place, word]."""
    LAYOUT: gl.constexpr = key_layout(SEGMENT.per_token, 1)
    words = gl.reshape(shared.load(flat(LAYOUT)), [8, 8, SEGMENT.per_token])
    return gl.convert_layout(words, LAYOUT, assert_trivial=True)


@gluon.jit
def read_scales(shared, ROWS: gl.constexpr, LOGITS: gl.constexpr):
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
