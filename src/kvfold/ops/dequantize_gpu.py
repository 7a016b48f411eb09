"""Unpack tokens on a GPU. `Codec.dequantize` is the definition.

- `dequantize`: tokens of a sequence, for attention over dense keys and values.
- `restore`: whole pages, into their shadows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.ops.pages import LayerPages
from kvfold.ops.sizes import ceil_div, power_of_two
from kvfold.ops.tiles import AFFINE, EVEN, RAW, key_side, load_scales, middle, pick_codes, value_side
from kvfold.quantizers import lloyd_max


def dequantize(pages: LayerPages, row: int, tokens: range, workspace: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack tokens of a sequence to transformed keys and values [1, kv_heads, tokens, d].

    They lie at the beginning of a flat workspace, and have its dtype.
    """
    layout, (kv_heads, dims) = pages.layout, (pages.pool.shape[1], pages.layout.key.dims)
    count = len(tokens)
    k, v = workspace[: 2 * kv_heads * count * dims].view(2, 1, kv_heads, count, dims)
    tile = max(1, 4096 // power_of_two(dims))
    _dequantize[(ceil_div(count, tile), kv_heads)](
        k,
        v,
        pages.pool,
        pages.pool.view(torch.float16),
        pages.pool.view(pages.key.raw_dtype),
        lloyd_max.level_table(pages.pool.device),
        pages.step.table[row],
        pages.key.unit,
        pages.value.unit,
        tokens.start,
        count,
        KEY=key_side(layout),
        VALUE=value_side(layout),
        PAGE=layout.page_size,
        PAGE_BYTES=layout.page_bytes,
        KV_HEADS=kv_heads,
        TOKENS=tile,
        enable_fp_fusion=False,  # to round as the definition does
    )
    return k, v


def restore(addresses: Tensor, units: Tensor, first: LayerPages, pages: Tensor, shadows: Tensor, count: Tensor) -> None:
    """`Restore.__call__` for layers with the layout of `first`. `addresses` int64[layers, 2]: pools and shadows.
    `units` float32[layers, 2]: of the scales of keys and values."""
    layout, kv_heads = first.layout, first.pool.shape[1]
    _restore[(len(addresses), kv_heads)](
        addresses,
        units,
        lloyd_max.level_table(first.pool.device),
        pages,
        shadows,
        count,
        first.pool,
        first.shadows,
        KEY=key_side(layout),
        VALUE=value_side(layout),
        PAGE=layout.page_size,
        PAGE_BYTES=layout.page_bytes,
        KV_HEADS=kv_heads,
        TOKENS=power_of_two(layout.page_size),
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["start", "count"], do_not_specialize_on_alignment=["table"])
def _dequantize(
    k,
    v,
    pool,
    pool_meta,  # the pool as float16
    pool_raw,  # the pool in the 16-bit dtype of raw segments
    levels,
    table,
    key_unit,  # of 8-bit scales
    value_unit,
    start,
    count,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = place < count
    page = tl.load(table + (start + place) // PAGE, mask=exists, other=0).to(tl.int64) * KV_HEADS + head
    offset = (start + place) % PAGE
    row = head * count + place
    x = k + row * KEY.head_dim
    _write(x, pool, pool_meta, pool_raw, levels, key_unit, page, offset, exists, KEY, PAGE_BYTES)
    x = v + row * VALUE.head_dim
    _write(x, pool, pool_meta, pool_raw, levels, value_unit, page, offset, exists, VALUE, PAGE_BYTES)


@triton.jit
def _restore(
    addresses,  # of pool and shadows, per layer
    units,  # of 8-bit scales of keys and values, per layer
    levels,
    pages,
    shadows,
    count,
    any_pool,  # the pool and the shadows of one layer, for their dtypes
    any_shadows,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    layer, head = tl.program_id(0), tl.program_id(1)
    pool = tl.load(addresses + 2 * layer)
    codes, meta = pool.to(any_pool.dtype), pool.to(tl.pointer_type(tl.float16))
    layer_shadows, raw = tl.load(addresses + 2 * layer + 1).to(any_shadows.dtype), pool.to(any_shadows.dtype)
    key_unit, value_unit = tl.load(units + 2 * layer), tl.load(units + 2 * layer + 1)
    token = tl.arange(0, TOKENS)
    for i in range(tl.load(count)):
        page = tl.load(pages + i).to(tl.int64) * KV_HEADS + head + tl.zeros([TOKENS], tl.int64)
        shadow = tl.load(shadows + i).to(tl.int64) * KV_HEADS + head
        to = layer_shadows + shadow * (PAGE * (KEY.head_dim + VALUE.head_dim)) + token * KEY.head_dim
        _write(to, codes, meta, raw, levels, key_unit, page, token, token < PAGE, KEY, PAGE_BYTES)
        to += PAGE * KEY.head_dim + token * (VALUE.head_dim - KEY.head_dim)
        _write(to, codes, meta, raw, levels, value_unit, page, token, token < PAGE, VALUE, PAGE_BYTES)


@triton.jit
def _write(
    x, pool, pool_meta, pool_raw, levels, unit, page, offset, exists, SIDE: tl.constexpr, PAGE_BYTES: tl.constexpr
):
    """Write the keys or the values of tokens to pointers `x`."""
    for i in tl.static_range(len(SIDE.parts)):
        _segment(x, pool, pool_meta, pool_raw, levels, unit, page, offset, exists, SIDE, i, PAGE_BYTES)


@triton.jit
def _segment(
    x, pool, pool_meta, pool_raw, levels, unit, page, offset, exists,
    SIDE: tl.constexpr, SEGMENT: tl.constexpr, PAGE_BYTES: tl.constexpr,
):  # fmt: skip
    """Write a segment of tokens to pointers `x`.

    Unlike in tiles.py, columns are coordinates in order. So stores are coalesced.
    """
    WIDTH: tl.constexpr = SIDE.parts[SEGMENT] * SIDE.width[SEGMENT]
    BITS: tl.constexpr = SIDE.bits[SEGMENT]
    coordinate = tl.arange(0, WIDTH)
    mask = exists[:, None] & (coordinate < SIDE.dims[SEGMENT])[None, :]
    byte = page * PAGE_BYTES + SIDE.codes[SEGMENT] + offset * SIDE.code_stride[SEGMENT]
    if SIDE.rule[SEGMENT] == RAW:
        y = tl.load(pool_raw + (byte // 2)[:, None] + coordinate[None, :], mask=mask, other=0.0).to(tl.float32)
    elif SIDE.rule[SEGMENT] == EVEN:
        codes = pick_codes(pool + byte, mask, coordinate, BITS, SIDE.eighth[SEGMENT])
        scale = load_scales(pool + page * PAGE_BYTES, offset, exists, SIDE, SEGMENT) * unit
        y = (codes.to(tl.float32) - middle(BITS)) * scale[:, None]
    else:
        codes = pick_codes(pool + byte, mask, coordinate, BITS, SIDE.eighth[SEGMENT])
        meta = (
            pool_meta + page * (PAGE_BYTES // 2) + SIDE.meta[SEGMENT] // 2 + offset * (SIDE.meta_stride[SEGMENT] // 2)
        )
        factor = tl.load(meta, mask=exists, other=0.0).to(tl.float32)[:, None]
        if SIDE.rule[SEGMENT] == AFFINE:
            y = codes.to(tl.float32) * factor + tl.load(meta + 1, mask=exists, other=0.0).to(tl.float32)[:, None]
        else:
            y = tl.load(levels + (1 << BITS) + codes) * factor
    tl.store(x[:, None] + (SIDE.start[SEGMENT] + coordinate)[None, :], y.to(x.dtype.element_ty), mask=mask)
