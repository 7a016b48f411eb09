"""Decode attention for Hopper in Gluon: one warp a program, and every load lands where tensor cores want it.

A tile is 64 tokens, 8 runs of 8. For logits, tokens are the rows of K and the columns of q are query heads; for
outputs, coordinates are the rows of Vᵀ. The order of coordinates in the first product and of tokens in the second is
free, so each lane unpacks the words that it loaded, and nothing moves between lanes but the weights (`movmatrix`).

A code c becomes an operand by a single AND: its bits, wherever they lie in a 16-bit half, are a subnormal float16
c·2^(place − 24), which tensor cores multiply exactly. Queries and the epilogue take these powers of two away. Scales
and offsets, of which each segment of a token has its own, go into logits and weights; two segments take two columns for
each head, where there is room for 8 columns and few models have 8 query heads for each KV head.
"""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kvfold.layout import PageLayout, SlotLayout
from kvfold.ops.attend import windows
from kvfold.ops.attend.parts import empty, merge
from kvfold.ops.pages import LayerPages
from kvfold.ops.rotate import dual, inverse

TILE = 64
UNSEEN = gl.constexpr(-1e30)
UNIT = gl.constexpr(2.0**24)  # of subnormal float16 numbers


class Words(NamedTuple):
    """The keys or the values of a page as 32-bit words: `segments` equal ones, codes of `bits` bits."""

    bits: int
    segments: int
    per_token: int  # words of a token's codes
    codes: int  # the word of a page at which codes begin
    meta: int  # and the metadata, a word for each segment of a token


def unsupported(layout: PageLayout, ratio: int) -> str | None:
    """Why there is no fast path for pages of this layout and `ratio` query heads for each KV head, or None."""
    for side, slot in (("keys", layout.key), ("values", layout.value)):
        kinds = {(segment.rule, segment.bits, segment.dims) for segment in slot.segments}
        rule, bits, _ = next(iter(kinds))
        if len(kinds) > 1 or rule != "affine" or slot.centroid or slot.heads or bits not in (2, 4, 8):
            return f"{side} are not affine integers of 2, 4 or 8 bits"
        if len(slot.segments) > 2:
            return f"{side} have {len(slot.segments)} groups, not 1 or 2"
        if slot.dims not in (64, 128, 256) or slot.code_bytes < 32:
            return f"{side} of {slot.dims} coordinates have {slot.code_bytes} bytes of codes"
    if layout.page_size % 16:
        return f"pages of {layout.page_size} tokens are no multiple of 16"
    return f"{ratio} query heads share a KV head, not 1 to 8" if ratio > 8 else None


def attend(pages: LayerPages, q: Tensor, new: tuple[Tensor, Tensor] | None, scale: float) -> Tensor:
    """Queries [sequences, 1, q_heads, d] -> outputs of the same shape, float32.

    `new` is what `store` returned for the same step.
    """
    batch, layout = pages.step.batch, pages.layout
    # each kernel begins before the one before it ends: decoding waits for rotated queries, or does not wait for windows
    rotated = dual(pages.key.transform, q.flatten(0, 1), early=new is None).contiguous()
    sequences, q_heads, dims = rotated.shape
    kv_heads = pages.pool.shape[1]
    ratio = q_heads // kv_heads
    tiles = triton.cdiv(batch.table.shape[1] * layout.page_size, TILE)
    splits = _splits(sequences * kv_heads, tiles, q.device)
    outs, weights = empty(splits + (0 if new is None else windows.splits(pages, rotated)), rotated)
    if new is not None:
        flat = (new[0].flatten(0, 1), new[1].flatten(0, 1))
        windows.attend(pages, rotated, flat, scale, outs[splits:], weights[splits:], early=True)
    key, value = words(layout.key, layout.offsets[0], layout.offsets[2]), words(layout.value, *layout.offsets[1:4:2])
    paired = ratio <= 4 or key.segments == 2 or value.segments == 2
    heads = 4 if ratio <= 4 else 8
    _decode[(splits, kv_heads, sequences)](
        rotated,
        outs,
        weights,
        pages.pool.view(torch.int32),
        batch.table,
        batch.lengths,
        scale * math.log2(math.e),
        pages.windows.sink,
        pages.windows.recent,
        batch.table.stride(0),
        batch.table.shape[1],
        KEY=key,
        VALUE=value,
        DIMS=dims,
        PAGE=layout.page_size,
        PAGE_WORDS=layout.page_bytes // 4,
        RATIO=ratio,
        HEADS=heads,
        COLUMNS=heads * (2 if paired else 1),
        LATE=new is not None,
        num_warps=1,
        launch_pdl=new is not None or pages.key.transform.rotation is not None,
    )
    return inverse(pages.value.transform, merge(outs, weights, early=True)).view(q.shape)


def _splits(programs: int, tiles: int, device: torch.device) -> int:
    """Over how many programs the tokens of a sequence are split: about 8 warps for each processor."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(8 * processors // programs, tiles, 128))


def words(slot: SlotLayout, codes: int, meta: int) -> Words:
    return Words(slot.segments[0].bits, len(slot.segments), slot.code_bytes // 4, codes // 4, meta // 4)


@gluon.jit(do_not_specialize=["sink", "recent"])
def _decode(
    q,  # [sequences, q_heads, DIMS]
    outs,
    weights,
    pool,
    table,
    lengths,
    scale,  # of the logits, times log2(e)
    sink,
    recent,
    table_stride,
    table_pages,
    KEY: gl.constexpr,
    VALUE: gl.constexpr,
    DIMS: gl.constexpr,
    PAGE: gl.constexpr,
    PAGE_WORDS: gl.constexpr,
    RATIO: gl.constexpr,  # query heads of a KV head
    HEADS: gl.constexpr,  # and up to 4 or 8
    COLUMNS: gl.constexpr,  # one or two for each of them
    LATE: gl.constexpr,  # whether the kernel before is waited for at the end
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    LOGITS: gl.constexpr = logits_layout(HEADS, COLUMNS)
    HEAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, LOGITS))
    split, head, sequence = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    splits, kv_heads, sequences = gl.num_programs(0), gl.num_programs(1), gl.num_programs(2)
    table += sequence.to(gl.int64) * table_stride
    length = gl.load(lengths + sequence)

    # this program's tiles; of the first and the last, some tokens may be another's or nobody's
    begin, end = sink, length - recent
    first = sink // 64
    tiles = gl.maximum((end + 63) // 64 - first, 0)
    share = (tiles + splits - 1) // splits
    first += split * share
    last = gl.minimum(first + share, (end + 63) // 64) - 1
    final = gl.maximum(first, last)  # what there is to prefetch, even where there is nothing to read
    pool += head.to(gl.int64) * PAGE_WORDS
    final_page = table_pages - 1

    # loads of the first tile go out before the queries are there
    k_page, v_page = _page(table, first, final_page, kv_heads, PAGE)
    k = _load_keys(pool, k_page, first, KEY, PAGE, PAGE_WORDS)
    k_meta = _load_meta(pool, k_page, first, KEY, PAGE, PAGE_WORDS)
    v_meta = _load_meta(pool, k_page, first, VALUE, PAGE, PAGE_WORDS)
    va, vb = _load_values(pool, v_page, first, VALUE, PAGE, PAGE_WORDS)
    k_page, v_page = _page(table, gl.minimum(first + 1, final), final_page, kv_heads, PAGE)

    if not LATE:
        _control("griddepcontrol.wait")
    row = (sequence * kv_heads + head) * RATIO
    queries, sum0, sum1 = _queries(q + row.to(gl.int64) * DIMS, KEY, DIMS, RATIO, HEADS, COLUMNS, MMA)
    sum0, sum1 = gl.convert_layout(sum0 * scale, HEAD), gl.convert_layout(sum1 * scale, HEAD)

    highest = gl.full([HEADS], UNSEEN, gl.float32, HEAD)
    total = gl.zeros([8, HEADS], gl.float32, gl.SliceLayout(0, LOGITS))
    shift0 = gl.zeros([8, HEADS], gl.float32, gl.SliceLayout(0, LOGITS))
    shift1 = gl.zeros([8, HEADS], gl.float32, gl.SliceLayout(0, LOGITS))
    out = gl.zeros([DIMS, COLUMNS], gl.float32, MMA)
    for tile in range(first, last + 1):
        following = gl.minimum(tile + 1, final)
        next_k = _load_keys(pool, k_page, following, KEY, PAGE, PAGE_WORDS)
        next_k_meta = _load_meta(pool, k_page, following, KEY, PAGE, PAGE_WORDS)
        next_v_meta = _load_meta(pool, k_page, following, VALUE, PAGE, PAGE_WORDS)
        next_va, next_vb = _load_values(pool, v_page, following, VALUE, PAGE, PAGE_WORDS)
        k_page, v_page = _page(table, gl.minimum(tile + 2, final), final_page, kv_heads, PAGE)

        logits = _logits(k, k_meta, queries, sum0, sum1, scale, KEY, DIMS, HEADS, COLUMNS, MMA)
        scale0, offset0, scale1, offset1 = _scales(v_meta, VALUE, LOGITS)
        if (tile * 64 < begin) | (tile * 64 + 64 > end):
            run = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, LOGITS)))
            place = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, LOGITS)))
            token = tile * 64 + run[None, :] * 8 + place[:, None]
            seen = ((token >= begin) & (token < end))[:, :, None]
            logits = gl.where(seen, logits, UNSEEN)
            scale0, offset0 = gl.where(seen, scale0, 0.0), gl.where(seen, offset0, 0.0)
            scale1, offset1 = gl.where(seen, scale1, 0.0), gl.where(seen, offset1, 0.0)
        now = gl.maximum(highest, gl.max(gl.max(logits, 0), 0))
        fade = _exp2(highest - now)
        highest = now
        weight = _exp2(logits - now[None, :][None, :, :])
        total = total * fade[None, :] + gl.sum(weight, 0)
        shift0 = shift0 * fade[None, :] + gl.sum(weight * offset0, 0)
        if VALUE.segments == 2:
            shift1 = shift1 * fade[None, :] + gl.sum(weight * offset1, 0)
        scaled = _weights(weight * scale0, weight * scale1, VALUE, HEADS, COLUMNS, MMA)
        out = mma_v2(_values(va, vb, VALUE, DIMS, MMA), scaled, _faded(out, fade, VALUE, DIMS, HEADS, COLUMNS, MMA))
        k, va, vb, k_meta, v_meta = next_k, next_va, next_vb, next_k_meta, next_v_meta

    if LATE:
        _control("griddepcontrol.wait")
    _control("griddepcontrol.launch_dependents")
    total, shift0, shift1 = gl.sum(total, 0), gl.sum(shift0, 0), gl.sum(shift1, 0)
    place = (split.to(gl.int64) * sequences * kv_heads * RATIO) + row
    _store_part(outs + place * DIMS, out, total, shift0, shift1, VALUE, DIMS, RATIO, HEADS, COLUMNS)
    number = gl.arange(0, HEADS, HEAD)
    weight = gl.where(total > 0.0, highest + gl.log2(total), UNSEEN)
    gl.store(weights + place + number, weight, mask=number < RATIO)


# --- the two products


@gluon.jit
def _logits(k, meta, queries, sum0, sum1, scale, KEY: gl.constexpr, DIMS: gl.constexpr, HEADS: gl.constexpr,
            COLUMNS: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """[place in a run, run, head]"""
    LOGITS: gl.constexpr = logits_layout(HEADS, COLUMNS)
    products = mma_v2(_keys(k, KEY, DIMS, MMA), queries, gl.zeros([64, COLUMNS], gl.float32, MMA))
    scale0, offset0, scale1, offset1 = _scales(meta, KEY, LOGITS)
    if COLUMNS == 2 * HEADS:
        first, second = gl.split(gl.reshape(products, [8, 8, HEADS, 2]))
        first = gl.convert_layout(first, LOGITS, assert_trivial=True)
        logits = first * (scale0 * (scale * UNIT)) + offset0 * sum0[None, :][None, :, :]
        if KEY.segments == 2:
            second = gl.convert_layout(second, LOGITS, assert_trivial=True)
            logits += second * (scale1 * (scale * UNIT)) + offset1 * sum1[None, :][None, :, :]
    else:
        first = gl.convert_layout(gl.reshape(products, [8, 8, HEADS]), LOGITS, assert_trivial=True)
        logits = first * (scale0 * (scale * UNIT)) + offset0 * sum0[None, :][None, :, :]
    return logits


@gluon.jit
def _queries(q, KEY: gl.constexpr, DIMS: gl.constexpr, RATIO: gl.constexpr, HEADS: gl.constexpr, COLUMNS: gl.constexpr,
             MMA: gl.constexpr):  # fmt: skip
    """The second operand of the logits, and the sum of each head's query over either segment."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    index = gl.arange(0, DIMS, gl.SliceLayout(1, OPERAND))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, OPERAND))
    # which code `_keys` puts at an index: from the low bits up half, lane, pair of words, mask, byte, word of the pair
    BITS: gl.constexpr = KEY.bits
    half, lane, rest = index & 1, (index >> 1) & 3, index >> 3
    mask = rest // (KEY.per_token // 8)
    word = lane * (KEY.per_token // 4) + rest % (KEY.per_token // 8) * 2 + mask // (16 // BITS)
    byte = 4 * word + mask // (8 // BITS) % 2 + 2 * half
    coordinate, segment, place = _coordinate(byte, mask % (8 // BITS), KEY, DIMS)
    if COLUMNS == 2 * HEADS:
        head, mine = column // 2, segment[:, None] == (column % 2)[None, :]
    else:
        head, mine = column, segment[:, None] == 0
    x = gl.load(q + head[None, :] * DIMS + coordinate[:, None], mask=(head < RATIO)[None, :] & mine, other=0.0).to(
        gl.float32
    )
    narrow = (x / place[:, None]).to(gl.float16)
    sums = gl.sum(narrow.to(gl.float32) * place[:, None], 0)
    if COLUMNS == 2 * HEADS:
        sum0 = gl.sum(gl.reshape(gl.where(column % 2 == 0, sums, 0.0), [HEADS, 2]), 1)
        sum1 = gl.sum(gl.reshape(gl.where(column % 2 == 1, sums, 0.0), [HEADS, 2]), 1)
    else:
        sum0, sum1 = sums, sums
    return narrow, sum0, sum1


@gluon.jit
def _weights(first, second, VALUE: gl.constexpr, HEADS: gl.constexpr, COLUMNS: gl.constexpr, MMA: gl.constexpr):
    """[place, run, head] for either segment -> the second operand of the outputs, [token, column]."""
    narrow = first.to(gl.float16)
    if COLUMNS == 2 * HEADS:
        other = second.to(gl.float16) if VALUE.segments == 2 else gl.zeros_like(narrow)
        narrow = gl.reshape(gl.join(narrow, other), [8, 8, COLUMNS])
    narrow = gl.convert_layout(narrow, weights_layout(COLUMNS), assert_trivial=True)
    turned = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [narrow], dtype=gl.float16, is_pure=True, pack=2
    )
    if COLUMNS == 8:
        turned = gl.permute(turned, [0, 2, 1])
    else:
        turned = gl.permute(gl.reshape(turned, [8, 8, 2, 8]), [0, 3, 2, 1])
    return gl.convert_layout(gl.reshape(turned, [64, COLUMNS]), gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)


@gluon.jit
def _faded(out, fade, VALUE: gl.constexpr, DIMS: gl.constexpr, HEADS: gl.constexpr, COLUMNS: gl.constexpr,
           MMA: gl.constexpr):  # fmt: skip
    """Outputs so far [coordinate, column], times `fade` of their head."""
    if COLUMNS == 2 * HEADS:
        first, second = gl.split(gl.reshape(out, [DIMS, HEADS, 2]))
        by = gl.convert_layout(fade, gl.SliceLayout(0, first.type.layout), assert_trivial=True)[None, :]
        if VALUE.segments == 2:
            second = second * by
        out = gl.convert_layout(gl.reshape(gl.join(first * by, second), [DIMS, COLUMNS]), MMA, assert_trivial=True)
    else:
        out = out * gl.convert_layout(fade, gl.SliceLayout(0, MMA), assert_trivial=True)[None, :]
    return out


@gluon.jit
def _store_part(part, out, total, shift0, shift1, VALUE: gl.constexpr, DIMS: gl.constexpr, RATIO: gl.constexpr,
                HEADS: gl.constexpr, COLUMNS: gl.constexpr):  # fmt: skip
    """Outputs [coordinate, column] as means over this program's tokens, float32[RATIO, DIMS]."""
    if COLUMNS == 2 * HEADS:
        first, second = gl.split(gl.reshape(out, [DIMS, HEADS, 2]))
    else:
        first, second = out, out
    LAYOUT: gl.constexpr = first.type.layout
    index = gl.arange(0, DIMS, gl.SliceLayout(1, LAYOUT))
    head = gl.arange(0, HEADS, gl.SliceLayout(0, LAYOUT))
    # which code `_values` puts at this index: from the low bits up lane, word of the lane, mask, byte
    BITS: gl.constexpr = VALUE.bits
    WORDS: gl.constexpr = VALUE.per_token // 8
    mask = (index >> 3) // WORDS
    byte = 4 * ((index & 7) * WORDS + (index >> 3) % WORDS) + mask // (8 // BITS)
    coordinate, segment, place = _coordinate(byte, mask % (8 // BITS), VALUE, DIMS)
    total = gl.convert_layout(total, gl.SliceLayout(0, LAYOUT), assert_trivial=True)
    shift0 = gl.convert_layout(shift0, gl.SliceLayout(0, LAYOUT), assert_trivial=True)
    mean = first * (UNIT / place)[:, None] + shift0[None, :]
    if VALUE.segments == 2:
        shift1 = gl.convert_layout(shift1, gl.SliceLayout(0, LAYOUT), assert_trivial=True)
        mean = gl.where((segment == 0)[:, None], mean, second * (UNIT / place)[:, None] + shift1[None, :])
    mean = mean * gl.where(total > 0.0, 1.0 / total, 0.0)[None, :]
    gl.store(part + head[None, :] * DIMS + coordinate[:, None], mean, mask=(head < RATIO)[None, :])


@gluon.jit
def _coordinate(byte, code, SIDE: gl.constexpr, DIMS: gl.constexpr):
    """The coordinate of the `code`-th code of a byte, its segment, and the power of two it is multiplied by there."""
    BYTES: gl.constexpr = 4 * SIDE.per_token // SIDE.segments
    segment = byte // BYTES
    coordinate = segment * (DIMS // SIDE.segments) + byte % BYTES + code * BYTES
    return coordinate, segment, (1 << (code * SIDE.bits)).to(gl.float32)


# --- from words to operands


@gluon.jit
def _keys(k, KEY: gl.constexpr, DIMS: gl.constexpr, MMA: gl.constexpr):
    """Words [run, place, word] -> the first operand of the logits, [token, coordinate]."""
    BITS: gl.constexpr = KEY.bits
    halves = gl.inline_asm_elementwise(
        unpack_pair(BITS), registers(32 // BITS), [k], dtype=float16s(32 // BITS), is_pure=True, pack=2
    )
    codes = gl.reshape(_joined(halves), with_bits((8, 8, 4, KEY.per_token // 8, 2), 32 // BITS).value)
    codes = gl.permute(codes, bits_before((1, 0), (3, 2, 4), 32 // BITS).value)
    return gl.convert_layout(gl.reshape(codes, [64, DIMS]), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _values(even, odd, VALUE: gl.constexpr, DIMS: gl.constexpr, MMA: gl.constexpr):
    """Words [lane, place, word] of even and odd runs -> the first operand of the outputs, [coordinate, token]."""
    BITS: gl.constexpr = VALUE.bits
    halves = gl.inline_asm_elementwise(
        unpack_across(BITS), registers(32 // BITS), [gl.join(even, odd)], dtype=float16s(32 // BITS), is_pure=True,
        pack=2,
    )  # fmt: skip
    codes = gl.reshape(_joined(halves), with_bits((4, 8, 8, VALUE.per_token // 8, 2), 32 // BITS).value)
    codes = gl.permute(codes, bits_before((), (3, 2, 1, 0, 4), 32 // BITS).value)
    return gl.convert_layout(gl.reshape(codes, [DIMS, 64]), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _joined(halves):
    """Tensors as one with a trailing dimension for each bit of their number, the lowest first."""
    for _ in gl.static_range(4):
        if len(halves) > 1:
            pairs = ()
            for i in gl.static_range(len(halves) // 2):
                pairs += (gl.join(halves[2 * i], halves[2 * i + 1]),)
            halves = pairs
    return halves[0]


@gluon.jit
def _scales(meta, SIDE: gl.constexpr, LOGITS: gl.constexpr):
    """Metadata words [run, place(, segment)] -> scale and offset of either segment, [place, run, 1]."""
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
    scale, offset = gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
        "=f,=f,r", [meta], dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip
    scale = gl.convert_layout(gl.permute(scale, [1, 0]), gl.SliceLayout(2, LOGITS), assert_trivial=True)
    offset = gl.convert_layout(gl.permute(offset, [1, 0]), gl.SliceLayout(2, LOGITS), assert_trivial=True)
    return scale[:, :, None], offset[:, :, None]


@gluon.jit
def _control(INSTRUCTION: gl.constexpr):
    nothing = gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise(
        INSTRUCTION + "; mov.b32 $0, $1;", "=r,r", [nothing], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


# --- loads


@gluon.jit
def _page(table, tile, final_page, kv_heads, PAGE: gl.constexpr):
    """The rows of the pool, for head 0, of a tile's pages: one where it lies in a page, else one for each run, and for
    the runs 2·t and 2·t + 1 of lane t. Beyond the table, its last page is as good as any."""
    if PAGE % 64 == 0:
        page = gl.load(table + gl.minimum(tile * 64 // PAGE, final_page)).to(gl.int64) * kv_heads
        pages = page
    else:
        run = gl.arange(0, 8, gl.SliceLayout(1, meta_layout(1)))
        page = gl.load(table + gl.minimum((tile * 64 + run * 8) // PAGE, final_page)).to(gl.int64) * kv_heads
        lane = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, value_layout(8))))
        pages = gl.load(table + gl.minimum((tile * 64 + lane * 16) // PAGE, final_page)).to(gl.int64) * kv_heads
    return page, pages


@gluon.jit
def _load_keys(pool, page, tile, KEY: gl.constexpr, PAGE: gl.constexpr, PAGE_WORDS: gl.constexpr):
    """The words of a tile's keys, [run, place, word]."""
    LAYOUT: gl.constexpr = key_layout(KEY.per_token)
    RUN: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    COUNT: gl.constexpr = KEY.per_token
    run = gl.arange(0, 8, RUN)
    place = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    word = gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    within = place[None, :, None] * COUNT + word[None, None, :]
    if PAGE % 64 == 0:
        start = pool + page * PAGE_WORDS + KEY.codes + gl.multiple_of(tile * 64 % PAGE, 64) * COUNT
        words = gl.load(start + ((run * (8 * COUNT))[:, None, None] + within))
    else:
        at = gl.convert_layout(page, RUN, assert_trivial=True) * PAGE_WORDS + (tile * 64 + run * 8) % PAGE * COUNT
        words = gl.load(pool + KEY.codes + gl.multiple_of(at, 4)[:, None, None] + within)
    return words


@gluon.jit
def _load_values(pool, page, tile, VALUE: gl.constexpr, PAGE: gl.constexpr, PAGE_WORDS: gl.constexpr):
    """The words of a tile's values, [lane, place, word], of run 2·lane and of run 2·lane + 1."""
    LAYOUT: gl.constexpr = value_layout(VALUE.per_token)
    LANE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    COUNT: gl.constexpr = VALUE.per_token
    lane = gl.arange(0, 4, LANE)
    place = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    word = gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    within = place[None, :, None] * COUNT + word[None, None, :]
    if PAGE % 64 == 0:
        start = pool + page * PAGE_WORDS + VALUE.codes + gl.multiple_of(tile * 64 % PAGE, 64) * COUNT
        pointers = start + ((lane * (16 * COUNT))[:, None, None] + within)
    else:
        at = gl.convert_layout(page, LANE, assert_trivial=True) * PAGE_WORDS + (tile * 64 + lane * 16) % PAGE * COUNT
        pointers = pool + VALUE.codes + gl.multiple_of(at, 4)[:, None, None] + within
    return gl.load(pointers), gl.load(pointers + 8 * COUNT)


@gluon.jit
def _load_meta(pool, page, tile, SIDE: gl.constexpr, PAGE: gl.constexpr, PAGE_WORDS: gl.constexpr):
    """The scales and offsets of a tile, [run, place(, segment)]."""
    SEGMENTS: gl.constexpr = SIDE.segments
    LAYOUT: gl.constexpr = meta_layout(SEGMENTS)
    FLAT: gl.constexpr = gl.SliceLayout(2, LAYOUT) if SEGMENTS == 2 else LAYOUT
    run = gl.arange(0, 8, gl.SliceLayout(1, FLAT))
    place = gl.arange(0, 8, gl.SliceLayout(0, FLAT))
    if PAGE % 64 == 0:
        start = pool + page * PAGE_WORDS + SIDE.meta + gl.multiple_of(tile * 64 % PAGE, 64) * SEGMENTS
        pointers = start + (run[:, None] * 8 + place[None, :]) * SEGMENTS
    else:
        at = gl.convert_layout(page, gl.SliceLayout(1, FLAT), assert_trivial=True) * PAGE_WORDS
        at += (tile * 64 + run * 8) % PAGE * SEGMENTS
        pointers = pool + SIDE.meta + gl.multiple_of(at, 4)[:, None] + place[None, :] * SEGMENTS
    if SEGMENTS == 2:
        pointers = pointers[:, :, None] + gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    return gl.load(pointers)


# --- layouts: what a lane holds. Lanes are numbered 4·run + lane of the run, as in the fragments of tensor cores.


@gluon.constexpr_function
def key_layout(count):
    """[run, place, word]: lanes of a run share its tokens' words."""
    words = [[0, 0, 1 << i] for i in range(log2(count) - 2)]
    lanes = [[0, 0, count // 4], [0, 0, count // 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout([*words, [0, 1, 0], [0, 2, 0], [0, 4, 0]], lanes, [], [], [8, 8, count])


@gluon.constexpr_function
def value_layout(count):
    """[lane, place, word]: words over runs."""
    words = [[0, 0, 1 << i] for i in range(log2(count) - 3)]
    lanes = [[1, 0, 0], [2, 0, 0], [0, 0, count // 8], [0, 0, count // 4], [0, 0, count // 2]]
    return gl.DistributedLinearLayout([*words, [0, 1, 0], [0, 2, 0], [0, 4, 0]], lanes, [], [], [4, 8, count])


@gluon.constexpr_function
def meta_layout(segments):
    """[run, place(, segment)]: all lanes of a run hold the same."""
    if segments == 2:
        lanes = [[0, 0, 0], [0, 0, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
        return gl.DistributedLinearLayout([[0, 0, 1], [0, 1, 0], [0, 2, 0], [0, 4, 0]], lanes, [], [], [8, 8, 2])
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4]], lanes, [], [], [8, 8])


@gluon.constexpr_function
def logits_layout(heads, columns):
    """[place, run, head]: as tensor cores return [token, column], with the column of a second segment left out."""
    own, lanes = ([], [1, 2]) if columns == 2 * heads else ([1], [2, 4])
    own = own + ([4] if columns == 16 else [])
    registers = [[0, 0, bit] for bit in own] + [[1, 0, 0], [2, 0, 0], [4, 0, 0]]
    lanes = [[0, 0, bit] for bit in lanes] + [[0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [8, 8, heads])


@gluon.constexpr_function
def weights_layout(columns):
    """[place, run, column], as tensor cores return it."""
    high = [[0, 0, 8]] if columns == 16 else []
    lanes = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    registers = [[0, 0, 1], *high, [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [8, 8, columns])


@gluon.constexpr_function
def with_bits(shape, count):
    """A shape with a trailing dimension for each bit of numbers below `count`."""
    return tuple(shape) + (2,) * log2(count)


@gluon.constexpr_function
def bits_before(before, after, count):
    """The permutation that puts those trailing dimensions, the highest bit first, between `before` and `after`."""
    bits = tuple(range(5, 5 + log2(count)))
    return tuple(before) + bits[::-1] + tuple(after)


@gluon.constexpr_function
def log2(n):
    return n.bit_length() - 1


# --- inline assembly: from words to float16 pairs, `count` registers of them


@gluon.constexpr_function
def unpack_pair(bits):
    """Two words of a token -> the pairs (byte 0, byte 2) and (byte 1, byte 3) of each, under every mask."""
    count = 32 // bits
    lines = ["{ .reg .b32 a, b;", f"shr.u32 a, ${count}, 8;", f"shr.u32 b, ${count + 1}, 8;"]
    return "\n".join([*lines, *masked((f"${count}", "a", f"${count + 1}", "b"), bits), "}"])


@gluon.constexpr_function
def unpack_across(bits):
    """A word of each of two tokens -> for each byte the pair (first token, second token), under every mask."""
    count = 32 // bits
    lines = [
        "{ .reg .b32 a, b, c, d;",
        f"prmt.b32 a, ${count}, ${count + 1}, 0x5410;",  # bytes 0 and 1 of both
        f"prmt.b32 c, ${count}, ${count + 1}, 0x7632;",  # bytes 2 and 3
        "shr.u32 b, a, 8;",
        "shr.u32 d, c, 8;",
    ]
    return "\n".join([*lines, *masked("abcd", bits), "}"])


@gluon.constexpr_function
def masked(sources, bits):
    masks = [((2**bits - 1) << (bits * i)) * 0x00010001 for i in range(8 // bits)]
    return [f"and.b32 ${i}, {s}, {m:#x};" for i, (s, m) in enumerate((s, m) for s in sources for m in masks)]


@gluon.constexpr_function
def registers(count):
    return ",".join(["=r"] * count + ["r"] * 2)


@gluon.constexpr_function
def float16s(count):
    return (gl.float16,) * count
