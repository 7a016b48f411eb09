"""Unpack tokens of a step's sequences on a GPU, for attention over dense keys and values. `Codec.dequantize` is the
definition."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.format.open_block import raw_from
from kvfold.ops.launch import Launcher
from kvfold.ops.pages import LayerPages, Step, on_device
from kvfold.ops.rotate import head_stride
from kvfold.ops.sizes import ceil_div, power_of_two
from kvfold.ops.tiles import (
    AFFINE,
    EVEN,
    RAW,
    key_side,
    load_scales,
    middle,
    pick_codes,
    value_side,
)
from kvfold.ops.tiles import (
    power_of_two as padded,
)
from kvfold.quantizers import lloyd_max
from kvfold.transforms import Transform


class _Tile(NamedTuple):
    """What a CTA takes of one KV head, keys or values."""

    numbers: int
    warps: int


UNROTATED, ROTATED = _Tile(4096, 4), _Tile(8192, 4)
PACKED, FIRST = tl.constexpr(-1), tl.constexpr(-2)  # see `Tokens`


class Span(NamedTuple):
    """Successive tokens of a sequence. Those from `raw_from` on are read raw, from what `store` returned."""

    row: int  # the sequence
    tokens: range
    raw_from: int
    padding: int = 0  # the first token, so many times more


class _Pool(NamedTuple):
    """The bytes of a layer, and what kernels read them as."""

    bytes: Tensor
    meta: Tensor  # as float16
    raw: Tensor  # as the 16-bit dtype of raw segments
    levels: Tensor  # see lloyd_max.py


class Tokens(NamedTuple):
    """Tokens that are unpacked together, of any sequences of a step, in any order."""

    locations: Tensor  # int64[tokens]: page · page_size + offset
    # int32[tokens]: PACKED, or FIRST if it is packed and has position 0, or the token's row in what `store` returned
    sources: Tensor

    @classmethod
    def of(cls, step: Step, block: int, spans: Sequence[Span]) -> Self:
        """The tokens of spans, one span after the other. The host does most of it: launches would take it longer.

        Raw ones must be in what `store` returns: with a block, in steps of more than DRAFTED queries (see `Fresh`).
        """
        starts, lengths = np.array(step.known)
        first = raw_from(starts, block) if block else starts
        begin = np.cumsum(lengths - first) - (lengths - first)  # where sequences begin in it
        sizes = np.array([len(span.tokens) for span in spans])
        counts = sizes + [span.padding for span in spans]
        of = np.repeat(np.arange(len(spans)), counts)  # the span of each token
        place = np.arange(len(of)) - (np.cumsum(counts) - counts)[of]
        rows, firsts, borders = np.array([(span.row, span.tokens.start, span.raw_from) for span in spans]).T
        row, token = rows[of], firsts[of] + np.where(place < sizes[of], place, 0)
        packed = np.where(token == 0, FIRST.value, PACKED.value)
        sources = np.where(token >= borders[of], token - first[row] + begin[row], packed)
        entry = row * step.table.shape[1] + token // step.page_size  # of the table
        # `sources` is first, and so aligned: a kernel reads it
        sources, entry, offset = on_device(np.stack((sources, entry, token % step.page_size)), step.table.device)
        page = step.table.flatten().index_select(0, entry)
        return cls(torch.add(offset, page, alpha=step.page_size), sources)


def dequantize(
    pages: LayerPages,
    tokens: Tokens,
    to: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor] | None = None,
    back: tuple[bool, bool] = (False, False),
    centred: bool = True,
) -> None:
    """Unpack the keys and values of tokens in one launch, into the first rows of `to`: tensors [tokens, kv_heads, d] of
    one dtype.

    `new` is what `store` returned; without it, no token is raw. `back`: whether keys, and values, are rotated back.
    Both stay centred. If not `centred`, values that are rotated back get their mean.
    """
    together, kernel = pages.once(_launcher, back)
    count = tokens.locations.shape[0]
    kernel(
        (ceil_div(count, together), pages.pool.shape[1], 2),
        *to,
        *(new or (None, None)),
        *tokens,
        0.0 if centred else 1.0,
        count,
    )


def _launcher(pages: LayerPages, back: tuple[bool, bool]) -> tuple[int, Launcher]:
    """How many tokens a CTA takes, and the kernel."""
    pool, layout, dims = pages.pool, pages.layout, pages.layout.key.dims
    key, value = (
        codec.transform.once(_inverse, dims, pool.device) if wanted else ()
        for codec, wanted in zip((pages.key, pages.value), back, strict=True)
    )
    tile = ROTATED if key or value else UNROTATED
    together = max(16, tile.numbers // power_of_two(dims))
    words = pool.view(torch.float16), pool.view(pages.key.raw_dtype)
    return together, Launcher(
        _dequantize,
        pool=_Pool(pool, *words, lloyd_max.level_table(pool.device)),
        key_first=pages.key.first,
        key_matrix=key[0] if key else None,
        key_stride=head_stride(key),
        value_matrix=value[0] if value else None,
        value_stride=head_stride(value),
        value_mean=pages.value.transform.mean if back[1] else None,
        KEY=key_side(layout),
        VALUE=value_side(layout),
        PAGE=layout.page_size,
        PAGE_BYTES=layout.page_bytes,
        KV_HEADS=pool.shape[1],
        TOKENS=together,
        enable_fp_fusion=False,  # to round as the definition does
        num_warps=tile.warps,
    )


def _inverse(transform: Transform, dims: int, device: torch.device) -> tuple[Tensor, ...]:
    """The matrix Aᵀ of `Transform.inverse`, [kv_heads or 1, d, d]; nothing without a rotation."""
    if transform.rotation is None:
        return ()
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    return (transform.rotation.dense(dims, device).mT.to(dtype).contiguous(),)


@triton.jit(do_not_specialize=["count"])
def _dequantize(
    k,
    v,
    new_k,  # [tokens, kv_heads, d], as `store` returns them; None: no token is raw
    new_v,
    locations,  # see `Tokens`
    sources,
    times,  # how often `value_mean` is added: one kernel serves both
    count,
    pool,  # `_Pool`
    key_first,  # float32[kv_heads, d]: see `Codec.first`
    key_matrix,  # [kv_heads or 1, d, d], and its stride from KV head to KV head
    key_stride,
    value_matrix,
    value_stride,
    value_mean,  # float32[kv_heads, d]
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    if tl.program_id(2) == 0:
        _dequantize_side(
            k, pool, new_k, locations, sources, key_first, key_matrix, key_stride, None, 0.0, count, KEY,
            PAGE, PAGE_BYTES, KV_HEADS, TOKENS,
        )  # fmt: skip
    else:
        _dequantize_side(
            v, pool, new_v, locations, sources, None, value_matrix, value_stride, value_mean, times, count,
            VALUE, PAGE, PAGE_BYTES, KV_HEADS, TOKENS,
        )  # fmt: skip


@triton.jit
def _dequantize_side(
    x, pool, new, locations, sources, first, matrix, matrix_stride, mean, times, count,
    SIDE: tl.constexpr, PAGE: tl.constexpr, PAGE_BYTES: tl.constexpr, KV_HEADS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write keys or values to x [count, kv_heads, d]."""
    DIMS: tl.constexpr = SIDE.head_dim
    head = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = place < count
    location = tl.load(locations + place, mask=exists, other=0)
    slot, offset = location // PAGE, (location % PAGE).to(tl.int32)
    packed = exists
    if (new is not None) | (first is not None):
        source = tl.load(sources + place, mask=exists, other=PACKED)
    if new is not None:
        packed = exists & (source < 0)
        is_raw = exists & ~packed
        raw = new + (source.to(tl.int64) * KV_HEADS + head) * DIMS
        raw = tl.multiple_of(raw, 16)  # bytes: d is a multiple of 8, which the compiler does not see here
    to, back = x + (place.to(tl.int64) * KV_HEADS + head) * DIMS, tl.zeros([TOKENS, padded(DIMS)], tl.float32)
    for i in tl.static_range(len(SIDE.parts)):
        y, column = _segment(pool, slot * KV_HEADS + head, offset, packed, SIDE, i, PAGE_BYTES), _columns(SIDE, i)
        inside = (column < SIDE.start[i] + SIDE.dims[i])[None, :]
        if first is not None:
            mask = (exists & (source == FIRST))[:, None] & inside
            y += tl.load((first + head * DIMS + column)[None, :], mask=mask, other=0.0)
        if new is not None:
            numbers = tl.load(raw[:, None] + column[None, :], mask=is_raw[:, None] & inside, other=0.0)
            y = tl.where(is_raw[:, None], numbers.to(tl.float32), y)
        if matrix is None:
            if mean is not None:
                real = column < SIDE.start[i] + SIDE.dims[i]
                y += (times * tl.load(mean + head * DIMS + column, mask=real, other=0.0))[None, :]
            tl.store(to[:, None] + column[None, :], y.to(to.dtype.element_ty), mask=exists[:, None] & inside)
        else:
            rows = _matrix_rows(matrix + head * matrix_stride, SIDE, i)
            back = tl.dot(y.to(rows.dtype), rows, back)
    if matrix is not None:
        column = tl.arange(0, padded(DIMS))
        mask = exists[:, None] & (column < DIMS)[None, :]
        if mean is not None:
            back += (times * tl.load(mean + head * DIMS + column, mask=column < DIMS, other=0.0))[None, :]
        tl.store(to[:, None] + column[None, :], back.to(to.dtype.element_ty), mask=mask)


@triton.jit
def _columns(SIDE: tl.constexpr, SEGMENT: tl.constexpr):
    """The coordinates of a segment, in order, up to a power of two."""
    return SIDE.start[SEGMENT] + tl.arange(0, SIDE.parts[SEGMENT] * SIDE.width[SEGMENT])


@triton.jit
def _matrix_rows(matrix, SIDE: tl.constexpr, SEGMENT: tl.constexpr):
    """The rows of a segment in a matrix [d, d]."""
    row, column = _columns(SIDE, SEGMENT)[:, None], tl.arange(0, padded(SIDE.head_dim))[None, :]
    mask = (row < SIDE.start[SEGMENT] + SIDE.dims[SEGMENT]) & (column < SIDE.head_dim)
    return tl.load(matrix + row * SIDE.head_dim + column, mask=mask, other=0.0)


@triton.jit
def _segment(pool, page, offset, exists, SIDE: tl.constexpr, SEGMENT: tl.constexpr, PAGE_BYTES: tl.constexpr):
    """A segment of tokens, float32[tokens, columns].

    Unlike in tiles.py, columns are coordinates in order. So stores are coalesced.
    """
    BITS: tl.constexpr = SIDE.bits[SEGMENT]
    bytes, metas, raws, levels = pool
    coordinate = tl.arange(0, SIDE.parts[SEGMENT] * SIDE.width[SEGMENT])
    mask = exists[:, None] & (coordinate < SIDE.dims[SEGMENT])[None, :]
    byte = page * PAGE_BYTES + SIDE.codes[SEGMENT] + offset * SIDE.code_stride[SEGMENT]
    if SIDE.rule[SEGMENT] == RAW:
        y = tl.load(raws + (byte // 2)[:, None] + coordinate[None, :], mask=mask, other=0.0).to(tl.float32)
    elif SIDE.rule[SEGMENT] == EVEN:
        codes = pick_codes(bytes + byte, mask, coordinate, BITS, SIDE.eighth[SEGMENT])
        scale = load_scales(bytes + page * PAGE_BYTES, offset, exists, SIDE, SEGMENT)
        y = (codes.to(tl.float32) - middle(BITS)) * scale[:, None]
    else:
        codes = pick_codes(bytes + byte, mask, coordinate, BITS, SIDE.eighth[SEGMENT])
        meta = metas + page * (PAGE_BYTES // 2) + SIDE.meta[SEGMENT] // 2
        meta += offset * (SIDE.meta_stride[SEGMENT] // 2)
        factor = tl.load(meta, mask=exists, other=0.0).to(tl.float32)[:, None]
        if SIDE.rule[SEGMENT] == AFFINE:
            y = codes.to(tl.float32) * factor + tl.load(meta + 1, mask=exists, other=0.0).to(tl.float32)[:, None]
        else:
            y = tl.load(levels + (1 << BITS) + codes) * factor
    return y
