"""Decode on Ampere or later: the launches of a step, around a Gluon kernel for integers, evenly spaced levels or
codebooks.

docs/structure.md says which kernels of a step overlap, on cards that can. On others every kernel begins when the
previous one has ended, and so reads all that was written before it.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvfold.format.layout import PageLayout, SlotLayout
from kvfold.ops.attend.gluon import codebook_decode as codebooks
from kvfold.ops.attend.gluon import even_decode as even
from kvfold.ops.attend.gluon import integer_decode as integers
from kvfold.ops.attend.gluon import level_lookup as levels
from kvfold.ops.attend.gluon.decode_tiles import TILE
from kvfold.ops.attend.gluon.even_pages import even_sides
from kvfold.ops.attend.gluon.open_block import RingBlock, raw_parts
from kvfold.ops.attend.parts import LOG2_E, empty, learned_sinks, merge, sms
from kvfold.ops.cards import Card
from kvfold.ops.launch import launcher
from kvfold.ops.pages import LayerPages, Logits
from kvfold.ops.pdl import ALONE, Overlap, Place
from kvfold.ops.rotate import dual
from kvfold.ops.sizes import ceil_div, power_of_two
from kvfold.transforms import Hadamard

MAX_CTAS = 256  # that share the tokens of a sequence, per KV head
QUERIES = 16  # of a sequence in a step, at most
# Per CTA. Before its first tile, a CTA with several queries works as long as for four tiles. So if it has few tiles,
# half as many CTAs are faster.
FEW_TILES = 8
# per thread: with a limit, even the highest, the compiler uses what it needs; else it stops at 168 and may spill
MOST_REGISTERS = 255


def unsupported(layout: PageLayout, ratio: int) -> str | None:
    """Why no kernel reads pages of this layout, with `ratio` query heads per KV head; None: one does."""
    check = _no_codebooks if _has_codebooks(layout) else _no_even if _has_even(layout) else _no_integers
    for side, slot in (("keys", layout.key), ("values", layout.value)):
        if reason := check(slot, side):
            return f"{side} {reason}"
        if slot.dims not in (64, 128, 256):
            return f"{side} have {slot.dims} coordinates, not 64, 128 or 256"
    if layout.key.dims != layout.value.dims:
        return f"keys have {layout.key.dims} coordinates and values {layout.value.dims}, not equally many"
    if layout.page_size % 16:
        return f"pages of {layout.page_size} tokens are no multiple of 16"
    return f"{ratio} query heads share a KV head, not 1 to 8" if ratio > 8 else None


def _has_codebooks(layout: PageLayout) -> bool:
    return any(segment.rule == "codebook" for slot in (layout.key, layout.value) for segment in slot.segments)


def _has_even(layout: PageLayout) -> bool:
    return layout.key.even or layout.value.even


def _no_even(slot: SlotLayout, side: str) -> str | None:
    """Why the kernel for evenly spaced levels does not read these slots."""
    if not slot.even:
        return "are not evenly spaced levels, as both sides must be"
    for segment in slot.segments:
        if segment.dims not in (32, 64, 128, 256):
            return f"have a segment of {segment.dims} coordinates, not 32, 64, 128 or 256"
        if side == "values" and (segment.bits == 1 or segment.code_bytes % 16):
            return f"have {segment.dims} codes of {segment.bits} bits, which do not fill rows of 16 bytes"
    if len(slot.segments) > (6 if side == "keys" else 2):
        return f"have {len(slot.segments)} segments, not at most {6 if side == 'keys' else 2}"
    return None


def _no_integers(slot: SlotLayout, side: str) -> str | None:
    """Why the kernel for integers does not read these slots."""
    kinds = {(segment.rule, segment.bits, segment.dims) for segment in slot.segments}
    rule, bits, _ = next(iter(kinds))
    if len(kinds) > 1 or rule != "affine" or slot.centroid or slot.heads or bits not in (2, 4, 8):
        return "are not affine integers of 2, 4 or 8 bits"
    if len(slot.segments) > 2:
        return f"have {len(slot.segments)} groups, not 1 or 2"
    return None


def _no_codebooks(slot: SlotLayout, side: str) -> str | None:
    """Why the kernel for codebooks does not read these slots."""
    if any(segment.rule != "codebook" for segment in slot.segments) or slot.centroid or slot.heads:
        return "are not codes of one set of codebooks, as both sides must be"
    if many := [segment for segment in slot.segments if segment.bits > levels.MAX_BITS]:
        return f"have codes of {many[0].bits} bits, not 1 to {levels.MAX_BITS}"
    if odd := [segment for segment in slot.segments if segment.dims not in (32, 64, 128, 256)]:
        return f"have a segment of {odd[0].dims} coordinates, not 32, 64, 128 or 256"
    if side == "values" and len(slot.segments) > 1:
        return f"have {len(slot.segments)} segments, not one"
    return None


def attend(
    card: Card,
    pages: LayerPages,
    q: Tensor,
    new: tuple[Tensor, Tensor] | None,
    logits: Logits,
    out: Tensor | None = None,
    stored: bool = True,
) -> Tensor:
    """Queries [tokens, q_heads, d] -> outputs of the same shape, float32 or in `out`. A sequence has 1 to QUERIES.

    Raw tokens are read from rings, not from `new`. `stored`: `store` is the previous kernel. Another one may write the
    queries, so nothing overlaps with it.
    """
    rotation, sinks = pages.key.transform.rotation, learned_sinks(pages, q, logits)
    in_kernel = _kernel(pages.layout, card).rotates and not pages.block
    order = rotation.order if in_kernel and isinstance(rotation, Hadamard) else 1
    # `dual` may overlap with `store`, which does not write queries, but not with a kernel that copies them
    if copied := q.stride()[1:] != (q.shape[-1], 1):
        q = q.contiguous()
    if order == 1:
        q = dual(pages.key.transform, q, overlaps=card.overlaps and stored and not copied)
    # A kernel that wrote the queries has to end first.
    fresh = copied or (order == 1 and rotation is not None)
    wait: Place = ("start" if fresh else "end") if stored else "never"
    overlap = Overlap(wait, "end") if card.overlaps else ALONE

    step, layout = pages.step, pages.layout
    tokens, q_heads, dims = q.shape
    kv_heads, sequences = pages.pool.shape[1], len(step.lengths)
    ratio = q_heads // kv_heads
    several = step.max_queries > 1
    kernel, shape = _kernel(layout, card, several), _shape(layout, ratio, step.max_queries)
    groups = ceil_div(step.max_queries, shape["QUERIES"])
    tiles = ceil_div(step.table.shape[1] * layout.page_size, TILE)
    splits = _splits(sequences * kv_heads * groups, tiles, kernel.warps, q.device)
    if several and tiles <= FEW_TILES * splits:
        splits = _splits(sequences * kv_heads * groups, tiles, max(4, kernel.warps // 2), q.device)
    block = pages.block
    outs, weights = empty(splits + min(splits, raw_parts(block)), q, dims)
    decode = launcher(
        kernel.decode,
        q.device,
        KEY=kernel.key,
        VALUE=kernel.value,
        DIMS=dims,
        PAGE=layout.page_size,
        PAGE_WORDS=layout.page_bytes // 4,
        RATIO=ratio,
        **shape,
        ORDER=order,
        BLOCK=block,
        RING=RingBlock(pages.ring_tokens, pages.ring.shape[2]) if block else None,
        SHARED=card.shared,
        OVERLAP=overlap,
        num_warps=1,
        maxnreg=kernel.registers,
        **overlap.launch,
    )
    decode(
        (splits * groups, kv_heads, sequences),
        q,
        outs,
        weights,
        pages.pool.view(torch.int32),
        step.table,
        step.lengths,
        logits.scale * LOG2_E.value,
        q.stride(0),
        step.table.stride(0),
        step.table.shape[1],
        *((step.query_starts, tokens, groups) if several else (None,) * 3),
        *((pages.ring, step.rings, step.rings.stride(0), step.rings.shape[1]) if block else (None,) * 4),
        step.starts if several and block else None,
        pages.once(_near, order > 1),
    )
    return merge(outs, weights, pages.value.transform, out, overlaps=card.overlaps, sinks=sinks)


def _near(pages: LayerPages, original: bool) -> Tensor | None:
    """`Codec.first`, for transformed queries or for original ones."""
    first, rotation = pages.key.first, pages.key.transform.rotation
    if first is None or rotation is None or not original:
        return first
    return rotation.invert(first)


def _splits(heads: int, tiles: int, warps: int, device: torch.device) -> int:
    """Over how many CTAs the tokens of a sequence are split, per KV head, so that all CTAs run at once."""
    return max(1, min(warps * sms(device) // heads, tiles, MAX_CTAS))


@lru_cache
def _shape(layout: PageLayout, ratio: int, queries: int) -> dict[str, int]:
    """How CTAs share up to `queries` queries of a sequence, in `ratio` query heads per KV head (see decode_tiles.py).

    A CTA takes 8 heads. It takes 16 if their outputs fill no more than a quarter of its registers.
    """
    segments = len(layout.value.segments)
    most = 16 if layout.value.dims * segments <= 128 else 8
    each = min(power_of_two(queries), 1 << (most // ratio).bit_length() - 1)
    heads = max(4, power_of_two(each * ratio))
    return {"QUERIES": each, "HEADS": heads, "COLUMNS": max(8, heads if layout.value.even else heads * segments)}


class Kernel(NamedTuple):
    """The kernel for pages of one layout, and keys and values as it sees them."""

    decode: Any
    key: Any
    value: Any
    rotates: bool  # whether it can rotate queries by Hadamard matrices
    warps: int  # per SM
    registers: int | None  # per thread, at most, so that these warps fit


@lru_cache
def _kernel(layout: PageLayout, card: Card, several: bool = False) -> Kernel:
    """`several`: sequences have several queries, so that a CTA may have more heads."""
    key, value, at = layout.key, layout.value, layout.offsets
    if _has_codebooks(layout):
        # lookups, not loads, take the time: a third warp per scheduler fills the gaps of the other two
        warps, registers = (12, 168) if key.dims <= 128 and not several else (8, MOST_REGISTERS if several else None)
        looked_up = codebooks.key_words(key, at[0], at[2]), codebooks.value_words(value, at[1], at[3])
        return Kernel(codebooks.decode, *looked_up, False, warps, registers)
    if _has_even(layout):
        sides = even_sides(layout)
        return Kernel(even.decode, *sides, False, even.room(*sides, card.shared), MOST_REGISTERS)
    both = integers.integer_words(key, at[0], at[2]), integers.integer_words(value, at[1], at[3])
    registers = MOST_REGISTERS if key.dims > 128 or several else None
    return Kernel(integers.decode, *both, True, integers.room(*both, card.shared), registers)
