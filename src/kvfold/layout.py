"""Where every byte of a packed cache lies. All sizes and offsets are computed here, once.

A *slot* is what one (token, KV head) occupies for keys or for values: the codes of its segments, then their metadata.
A *page* is what `page_size` tokens of one KV head occupy, keys and values together, as a structure of arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from kvfold.packing import packed_bytes

META_BYTES = 2  # every metadata entry is 16 bits wide
ALIGNMENT = 16  # arrays inside a page start where a 16-byte load may

Rule = Literal["affine", "raw"]
META_ENTRIES: dict[Rule, int] = {"affine": 2, "raw": 0}  # affine: scale and offset; raw: 16-bit floats as they are


@dataclass(frozen=True)
class Segment:
    """A contiguous range of transformed coordinates with one bit width and one decode rule."""

    start: int
    stop: int
    bits: int
    rule: Rule = "affine"

    @property
    def dims(self) -> int:
        return self.stop - self.start

    @property
    def code_bytes(self) -> int:
        return 2 * self.dims if self.rule == "raw" else packed_bytes(self.dims, self.bits)

    @property
    def meta_entries(self) -> int:
        return META_ENTRIES[self.rule]


@dataclass(frozen=True)
class SlotLayout:
    """What one (token, KV head) occupies: its segments' codes in order, then their metadata in order."""

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        starts = [0, *(segment.stop for segment in self.segments)]
        if any(segment.start != start for segment, start in zip(self.segments, starts, strict=False)):
            raise ValueError(f"segments must follow each other from coordinate 0: {self.segments}")
        if self.code_bytes <= 0:
            raise ValueError("a slot needs at least one segment")

    @cached_property
    def dims(self) -> int:
        return self.segments[-1].stop

    @cached_property
    def code_bytes(self) -> int:
        return sum(segment.code_bytes for segment in self.segments)

    @cached_property
    def meta_bytes(self) -> int:
        return sum(segment.meta_entries for segment in self.segments) * META_BYTES

    @property
    def slot_bytes(self) -> int:
        return self.code_bytes + self.meta_bytes

    def split(self, codes: Tensor, meta: Tensor) -> Sequence[tuple[Segment, Tensor, Tensor]]:
        """Each segment with its part of uint8[..., code_bytes] codes and of float16[..., entries] metadata."""
        if len(self.segments) == 1:
            return [(self.segments[0], codes, meta)]
        code_parts = codes.split([segment.code_bytes for segment in self.segments], -1)
        meta_parts = meta.split([segment.meta_entries for segment in self.segments], -1)
        return list(zip(self.segments, code_parts, meta_parts, strict=True))


def affine_slot(dims: int, bits: int, group: int | None = None) -> SlotLayout:
    """`dims` coordinates of `bits` bits in groups of `group` (default: all), each with a scale and an offset."""
    group = dims if group is None else group
    if group <= 0 or dims % group:
        raise ValueError(f"group={group} does not divide the head dimension {dims}")
    return SlotLayout(tuple(Segment(start, start + group, bits) for start in range(0, dims, group)))


def raw_slot(dims: int) -> SlotLayout:
    """16-bit floats, unpacked."""
    return SlotLayout((Segment(0, dims, 16, "raw"),))


@dataclass(frozen=True)
class PageLayout:
    """What one (page, KV head) occupies: K codes, V codes, K metadata, V metadata, each for all tokens of the page."""

    key: SlotLayout
    value: SlotLayout
    page_size: int

    def __post_init__(self) -> None:
        if self.page_size <= 0:
            raise ValueError(f"a page holds at least one token, not {self.page_size}")

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        """Where K codes, V codes, K metadata and V metadata begin, and where the page ends."""
        offsets = [0]
        for width in (self.key.code_bytes, self.value.code_bytes, self.key.meta_bytes, self.value.meta_bytes):
            offsets.append(offsets[-1] + -(-self.page_size * width // ALIGNMENT) * ALIGNMENT)
        return tuple(offsets)

    @property
    def page_bytes(self) -> int:
        return self._offsets[-1]

    @property
    def is_raw(self) -> bool:
        """Whether everything is stored in 16 bits as it is."""
        return all(segment.rule == "raw" for slot in (self.key, self.value) for segment in slot.segments)

    def allocate(self, pages: int, kv_heads: int, device: torch.device | str = "cpu") -> Tensor:
        """An uninitialised pool of `pages` pages: uint8[pages, kv_heads, page_bytes]."""
        return torch.empty(pages, kv_heads, self.page_bytes, dtype=torch.uint8, device=device)

    def key_views(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Pages uint8[..., page_bytes] -> views of their K codes uint8[..., page_size, code_bytes] and K metadata
        float16[..., page_size, entries]."""
        return self._codes(pages, self.key, 0), self._meta(pages, self.key, 2)

    def value_views(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """The same for values."""
        return self._codes(pages, self.value, 1), self._meta(pages, self.value, 3)

    def sides(self, pool: Tensor) -> list[tuple[slice, Tensor, Tensor]]:
        """Pool uint8[pages, kv_heads, page_bytes] -> views of codes and metadata [pages, page_size, kv_heads, sides, …]

        Both sides (0: keys, 1: values) together where they have the same layout, else each alone; the slice says which.
        """
        if self.key == self.value:
            middle, end = self._offsets[2], self._offsets[4]
            codes = pool[..., :middle].unflatten(-1, (2, middle // 2))
            entries = pool.view(torch.float16)[..., middle // META_BYTES :]
            meta = entries.unflatten(-1, (2, (end - middle) // META_BYTES // 2))
            views = [(self._split(codes, self.key.code_bytes), self._split(meta, self.key.meta_bytes // META_BYTES))]
        else:
            apart = (self.key_views(pool), self.value_views(pool))
            views = [(codes.unsqueeze(2), meta.unsqueeze(2)) for codes, meta in apart]
        width = 2 // len(views)
        return [
            (slice(i, i + width), codes.permute(0, 3, 1, 2, 4), meta.permute(0, 3, 1, 2, 4))
            for i, (codes, meta) in enumerate(views)
        ]

    def _codes(self, pages: Tensor, slot: SlotLayout, array: int) -> Tensor:
        return self._split(pages[..., self._offsets[array] :], slot.code_bytes)

    def _meta(self, pages: Tensor, slot: SlotLayout, array: int) -> Tensor:
        entries = pages.view(torch.float16)[..., self._offsets[array] // META_BYTES :]
        return self._split(entries, slot.meta_bytes // META_BYTES)

    def _split(self, array: Tensor, width: int) -> Tensor:
        """The head of an array inside a page, by token: [..., page_size, width]."""
        return array[..., : self.page_size * width].unflatten(-1, (self.page_size, width))
