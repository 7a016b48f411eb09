"""Where every byte of a packed cache lies. All sizes and offsets are computed here, once.

A *slot* holds the key or the value of one token and KV head: the codes of its segments, then their metadata.
A *page* holds `page_size` tokens of one KV head, keys and values together, as a structure of arrays: an array of all
codes of a side, and one of its metadata. Segments with evenly spaced levels have arrays of their own, so that kernels
load whole words of any width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvfold.format.packing import packed_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

META_BYTES = 2  # of a metadata entry, except for the scales of evenly spaced levels
SCALE_BYTES = 1  # of these
ODD_BYTES = "numbers of 16 bits lie at odd bytes"
EVEN_WIDTHS = (1, 2, 4, 8)  # bits of evenly spaced levels: kernels multiply codes as they lie in their bytes
ALIGNMENT = 16  # bytes, for 16-byte loads of arrays inside a page: they fit if a page has a multiple of as many tokens

Rule = Literal["affine", "codebook", "even", "channel", "raw"]


@dataclass(frozen=True)
class Segment:
    """A contiguous range of transformed coordinates with one bit width and one decode rule.

    - affine: scale·code + offset, with one scale and offset per token;
    - codebook: norm·level[code], with the levels of a normal distribution and one norm per token;
    - even: scale·(code − middle), with one 8-bit scale per token (see quantizers/even.py);
    - channel: scale·code + offset, with one scale and offset per page and coordinate. `boosted` coordinates have twice
      the bits; every page chooses its own;
    - raw: 16-bit floats.
    """

    start: int
    stop: int
    bits: int
    rule: Rule = "affine"
    boosted: int = 0

    def __post_init__(self) -> None:
        if self.boosted and self.dims > 256:
            raise ValueError(f"boosted channels are numbered in a byte, which takes at most 256 dims, not {self.dims}")

    @property
    def dims(self) -> int:
        return self.stop - self.start

    @property
    def code_bytes(self) -> int:
        if self.rule == "raw":
            return 2 * self.dims
        boosted = packed_bytes(self.boosted, self.bits) if self.boosted else 0
        return packed_bytes(self.padded_dims, self.bits) + boosted

    @property
    def padded_dims(self) -> int:
        """Stored codes. Calibration decides the size of codebook segments, so these are padded to whole bytes."""
        return -(-self.dims // 8) * 8 if self.rule == "codebook" else self.dims

    @property
    def meta_entries(self) -> int:
        """Per token; for `channel` per page: scales, offsets, and the boosted coordinates in a byte each."""
        if self.rule == "channel":
            return 2 * self.dims + -(-self.boosted // META_BYTES)
        return {"affine": 2, "codebook": 1, "even": 1, "raw": 0}[self.rule]


@dataclass(frozen=True)
class SlotLayout:
    """The bytes of a slot: the codes of its segments in order, then their metadata in order. With centroids, the number
    of the subtracted centroid follows.

    If every KV head has a layout of its own, `heads` has these layouts. Then all slots have the size of the largest.
    """

    segments: tuple[Segment, ...]
    centroid: bool = False
    heads: tuple[SlotLayout, ...] = ()

    def __post_init__(self) -> None:
        starts = [0, *(segment.stop for segment in self.segments)]
        if any(segment.start != start for segment, start in zip(self.segments, starts, strict=False)):
            raise ValueError(f"segments must follow each other from coordinate 0: {self.segments}")
        if self.code_bytes <= 0:
            raise ValueError("a slot needs at least one segment")
        if self.per_page and len(self.segments) > 1:
            raise ValueError("a slot with metadata for whole pages has a single segment")
        if self.even and (self.centroid or self.heads or any(segment.rule != "even" for segment in self.segments)):
            raise ValueError(f"evenly spaced levels mix with no other rule: {self.segments}")

    @cached_property
    def dims(self) -> int:
        return self.segments[-1].stop

    def of_head(self, head: int) -> SlotLayout:
        """The layout of a KV head."""
        return self.heads[head] if self.heads else self

    @cached_property
    def code_bytes(self) -> int:
        if self.heads:
            return max(head.code_bytes for head in self.heads)
        return sum(segment.code_bytes for segment in self.segments)

    @cached_property
    def meta_entries(self) -> int:
        if self.heads:
            return max(head.meta_entries for head in self.heads)
        return sum(segment.meta_entries for segment in self.segments) + self.centroid

    @cached_property
    def meta_numbers(self) -> int:
        """Metadata entries that are numbers. The entries behind them name boosted coordinates or a centroid."""
        return 2 * self.dims if self.per_page else self.meta_entries - self.centroid

    @cached_property
    def per_page(self) -> bool:
        """Whether metadata belong to a page, not to a token. Then a page is quantized when it is full."""
        return any(segment.rule == "channel" for segment in self.segments)

    @cached_property
    def even(self) -> bool:
        """Whether levels are evenly spaced. Then every segment has an array of codes and one of scales in a page."""
        return any(segment.rule == "even" for segment in self.segments)

    @property
    def arrays(self) -> list[tuple[int, int]]:
        """Per array of codes in a page, the bytes of a token's codes in it and of their metadata."""
        if self.even:
            return [(segment.code_bytes, SCALE_BYTES) for segment in self.segments]
        return [(self.code_bytes, self.meta_bytes)]

    @cached_property
    def has_raw(self) -> bool:
        return any(segment.rule == "raw" for segment in self.segments)

    @property
    def more_than_a_token(self) -> str | None:
        """Why the segments of one token and KV head do not define a slot, or None if they do."""
        if self.per_page:
            return "whole pages are quantized together"
        if self.heads:
            return "KV heads have layouts of their own"
        return "slots name a centroid" if self.centroid else None

    @property
    def misaligned(self) -> str | None:
        """Why 16-bit loads cannot read the numbers of a slot, or None if they can."""
        odd = any(segment.code_bytes % META_BYTES for segment in self.segments)
        return ODD_BYTES if self.has_raw and odd else None

    @property
    def places(self) -> list[tuple[int, int]]:
        """Per segment: its first byte in the codes and its first entry in the metadata."""
        codes = accumulate((segment.code_bytes for segment in self.segments), initial=0)
        meta = accumulate((segment.meta_entries for segment in self.segments), initial=0)
        return list(zip(codes, meta, strict=True))[:-1]

    @property
    def meta_bytes(self) -> int:
        """Per token, or per page if metadata belong to pages."""
        return (SCALE_BYTES if self.even else META_BYTES) * self.meta_entries

    @property
    def slot_bytes(self) -> int:
        """Per token, without metadata that belong to a page."""
        return self.code_bytes + (0 if self.per_page else self.meta_bytes)

    def split(self, codes: Tensor, meta: Tensor) -> Sequence[tuple[Segment, Tensor, Tensor]]:
        """Each segment with its part of the codes uint8[..., code_bytes] and of the metadata [..., entries]."""
        if len(self.segments) == 1:
            return [(self.segments[0], codes, meta[..., :-1] if self.centroid else meta)]
        code_parts = codes.split([segment.code_bytes for segment in self.segments], -1)
        meta_parts = meta.split([segment.meta_entries for segment in self.segments] + [1] * self.centroid, -1)
        return list(zip(self.segments, code_parts, meta_parts, strict=False))


def affine_slot(dims: int, bits: int, group: int | None = None) -> SlotLayout:
    """`dims` coordinates of `bits` bits in groups of `group` (default: all), each with a scale and an offset."""
    group = dims if group is None else group
    if group <= 0 or dims % group:
        raise ValueError(f"group={group} does not divide the head dimension {dims}")
    if group * bits % 8:
        raise ValueError(f"group={group}: {group} codes of {bits} bits do not fill whole bytes")
    return SlotLayout(tuple(Segment(start, start + group, bits) for start in range(0, dims, group)))


def codebook_slot(widths: Sequence[tuple[int, int]]) -> SlotLayout:
    """Segments of (dims, bits), each with a norm."""
    ends = accumulate(dims for dims, _ in widths)
    return SlotLayout(
        tuple(Segment(end - dims, end, bits, "codebook") for end, (dims, bits) in zip(ends, widths, strict=True))
    )


def even_slot(widths: Sequence[tuple[int, int]]) -> SlotLayout:
    """Segments of (dims, bits) with evenly spaced levels, each with a scale."""
    if odd := [bits for _, bits in widths if bits not in EVEN_WIDTHS]:
        raise ValueError(f"codes of evenly spaced levels have 1, 2, 4 or 8 bits, not {odd[0]}")
    ends = accumulate(dims for dims, _ in widths)
    return SlotLayout(
        tuple(Segment(end - dims, end, bits, "even") for end, (dims, bits) in zip(ends, widths, strict=True))
    )


def mixed_slot(heads: Sequence[SlotLayout]) -> SlotLayout:
    """One layout per KV head, in slots of one size."""
    return SlotLayout(heads[0].segments, heads=tuple(heads))


def channel_slot(dims: int, bits: int, boosted: int = 0) -> SlotLayout:
    """`dims` coordinates of `bits` bits, with scales and offsets per page. `boosted` of them have twice the bits."""
    return SlotLayout((Segment(0, dims, bits, "channel", boosted=boosted),))


def raw_slot(dims: int) -> SlotLayout:
    """16-bit floats."""
    return SlotLayout((Segment(0, dims, 16, "raw"),))


class SegmentPlace(NamedTuple):
    """Where the codes and the metadata of a segment lie in a page, in bytes: those of its first token, and how far it
    is from token to token. Metadata for whole pages have no stride."""

    codes: int
    code_stride: int
    meta: int
    meta_stride: int


class Views(NamedTuple):
    """Views of a pool: codes and metadata [pages, page_size, kv_heads, sides, …] of keys, of values or of both. There
    is a view per array; rows of all arrays together are the codes, and the metadata, of a token."""

    sides: slice  # 0: keys, 1: values
    codes: tuple[Tensor, ...]
    meta: tuple[Tensor, ...]

    def read(self, page: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        """The codes and metadata of these tokens."""
        import torch

        codes = torch.cat([view[page, offset] for view in self.codes], dim=-1)
        return codes, torch.cat([view[page, offset % view.shape[1]] for view in self.meta], dim=-1)

    def write(self, index: tuple[Tensor, ...], codes: Tensor, meta: Tensor) -> None:
        """Metadata are copied as integers: ids in them may read as NaN, whose bits deterministic algorithms change on
        GPUs."""
        import torch

        for views, rows in ((self.codes, codes), (self.meta, meta)):
            kind = torch.int16 if rows.dtype == torch.float16 else rows.dtype
            parts = rows.view(kind).split([view.shape[-1] for view in views], dim=-1)
            for view, part in zip(views, parts, strict=True):
                view.view(kind)[index] = part


@dataclass(frozen=True)
class PageLayout:
    """The bytes of a page: K codes, V codes, K metadata, V metadata, each for all tokens of the page. Each of the four
    is one array, or one per segment."""

    key: SlotLayout
    value: SlotLayout
    page_size: int

    def __post_init__(self) -> None:
        if self.page_size <= 0:
            raise ValueError(f"a page holds at least one token, not {self.page_size}")
        if self.page_size < 2 and self.per_page:
            raise ValueError(
                f"where a page is quantized as a whole it needs at least 2 tokens, not page_size={self.page_size}"
            )

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where K codes, V codes, K metadata and V metadata begin, and where the page ends."""
        slots = self.key, self.value
        sizes = [sum(self._aligned(self.page_size * codes) for codes, _ in slot.arrays) for slot in slots]
        sizes += [sum(self._aligned(self._meta_rows(slot) * meta) for _, meta in slot.arrays) for slot in slots]
        return tuple(accumulate(sizes, initial=0))

    def places(self, side: int, head: int = 0) -> tuple[SegmentPlace, ...]:
        """Per segment of keys (0) or values (1) of a KV head, where it lies in a page."""
        slot, codes, meta = (self.key, self.value)[side], self.offsets[side], self.offsets[2 + side]
        if slot.even:
            places = []
            for segment in slot.segments:
                places.append(SegmentPlace(codes, segment.code_bytes, meta, SCALE_BYTES))
                codes += self._aligned(self.page_size * segment.code_bytes)
                meta += self._aligned(self.page_size * SCALE_BYTES)
            return tuple(places)
        strides = slot.code_bytes, 0 if slot.per_page else slot.meta_bytes
        return tuple(
            SegmentPlace(codes + byte, strides[0], meta + META_BYTES * entry, strides[1])
            for byte, entry in slot.of_head(head).places
        )

    def _aligned(self, size: int) -> int:
        return -(-size // ALIGNMENT) * ALIGNMENT

    def _meta_rows(self, slot: SlotLayout) -> int:
        return 1 if slot.per_page else self.page_size

    @property
    def page_bytes(self) -> int:
        return self.offsets[-1]

    @property
    def side_bits(self) -> tuple[float, float]:
        """Bits that a page takes for each number of keys, and of values."""
        codes, value_codes, meta, value_meta, end = self.offsets
        key_bytes, value_bytes = value_codes - codes + value_meta - meta, meta - value_codes + end - value_meta
        return 8 * key_bytes / (self.page_size * self.key.dims), 8 * value_bytes / (self.page_size * self.value.dims)

    @property
    def per_page(self) -> bool:
        """Whether keys or values have metadata for whole pages."""
        return self.key.per_page or self.value.per_page

    @property
    def for_evaluation(self) -> str | None:
        """Why no kernel of any device stores these pages, or None if one does. PyTorch's operators store them, which is
        fast enough to evaluate a recipe, but not to serve it."""
        return self.key.more_than_a_token or self.value.more_than_a_token

    @property
    def is_raw(self) -> bool:
        """Whether keys and values are stored raw."""
        return all(segment.rule == "raw" for slot in (self.key, self.value) for segment in slot.segments)

    def block(self, block: int) -> int:
        """The open block of a layer with this layout. A raw layer has none. Where whole pages are quantized, it is made
        of whole pages."""
        if self.is_raw:
            return 0
        return math.lcm(block or self.page_size, self.page_size) if self.per_page else block

    def allocate(self, pages: int, kv_heads: int, device: torch.device | str = "cpu") -> Tensor:
        """An uninitialised pool of `pages` pages: uint8[pages, kv_heads, page_bytes]."""
        import torch

        return torch.empty(pages, kv_heads, self.page_bytes, dtype=torch.uint8, device=device)

    @property
    def raw_numbers(self) -> int:
        """Numbers of the raw key and value of a token, per KV head."""
        return self.key.dims + self.value.dims

    def allocate_ring(
        self, rings: int, tokens: int, kv_heads: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Tensor:
        """`rings` uninitialised rings of `tokens` tokens: 16-bit [rings, kv_heads, numbers]."""
        import torch

        return torch.empty(rings, kv_heads, tokens * self.raw_numbers, dtype=dtype, device=device)

    def ring_sides(self, ring: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks of rings [..., numbers] -> views of their keys and values [..., tokens, d]: the raw keys of all tokens
        that fit, then their raw values."""
        tokens = ring.shape[-1] // self.raw_numbers
        k, v, _ = ring.split(
            [tokens * self.key.dims, tokens * self.value.dims, ring.shape[-1] - tokens * self.raw_numbers], dim=-1
        )
        return k.unflatten(-1, (tokens, -1)), v.unflatten(-1, (tokens, -1))

    def views(self, pool: Tensor, together: bool) -> list[Views]:
        """The views of a pool uint8[pages, kv_heads, page_bytes].

        `together`: one view for both sides. They need the same layout, in one array. Otherwise one per side.
        """
        import torch

        if together:
            middle, end = self.offsets[2], self.offsets[4]
            codes = pool[..., :middle].unflatten(-1, (2, middle // 2))
            entries = pool.view(torch.float16)[..., middle // META_BYTES :]
            meta = entries.unflatten(-1, (2, (end - middle) // META_BYTES // 2))
            rows = _rows(codes, self.page_size, self.key.code_bytes)
            sides: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = [
                ((rows,), (_rows(meta, self._meta_rows(self.key), self.key.meta_entries),))
            ]
        else:
            sides = [
                (tuple(array.unsqueeze(2) for array in codes), tuple(array.unsqueeze(2) for array in meta))
                for codes, meta in (self._arrays(pool, side) for side in range(2))
            ]
        width = 2 // len(sides)
        return [
            Views(
                slice(i, i + width),
                tuple(array.permute(0, 3, 1, 2, 4) for array in codes),
                tuple(array.permute(0, 3, 1, 2, 4) for array in meta),
            )
            for i, (codes, meta) in enumerate(sides)
        ]

    def _arrays(self, pages: Tensor, side: int) -> tuple[list[Tensor], list[Tensor]]:
        """Views of the codes and metadata of a side of pages uint8[..., page_bytes], array by array: [..., rows, …]."""
        import torch

        slot = (self.key, self.value)[side]
        codes, meta = [], []
        places = self.places(side) if slot.even else self.places(side)[:1]
        for (code_bytes, meta_bytes), place in zip(slot.arrays, places, strict=True):
            codes.append(_rows(pages[..., place.codes :], self.page_size, code_bytes))
            of_array = pages[..., place.meta :] if slot.even else pages[..., place.meta :].view(torch.float16)
            meta.append(_rows(of_array, self._meta_rows(slot), meta_bytes // (1 if slot.even else META_BYTES)))
        return codes, meta


def _rows(array: Tensor, rows: int, width: int) -> Tensor:
    """The first rows · width entries of an array: [..., rows, width]."""
    return array[..., : rows * width].unflatten(-1, (rows, width))
