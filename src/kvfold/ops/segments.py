"""The segments of a slot as rows of numbers, for kernels."""

from typing import NamedTuple

from kvfold.format.layout import Rule, SlotLayout

RULES: dict[Rule, int] = {"affine": 0, "codebook": 1, "raw": 2, "channel": 3, "even": 4}


class SegmentRow(NamedTuple):
    start: int  # the first coordinate
    dims: int
    stored: int  # codes: as many as dims; for codebooks, padded to whole bytes
    bits: int
    rule: int  # of RULES
    boosted: int  # coordinates with twice the bits
    byte: int  # where its codes begin in a slot's codes
    entry: int  # where its metadata begin in a slot's metadata, in 16-bit entries


def segment_rows(slot: SlotLayout) -> tuple[SegmentRow, ...]:
    return tuple(
        SegmentRow(each.start, each.dims, each.padded_dims, each.bits, RULES[each.rule], each.boosted, *place)
        for each, place in zip(slot.segments, slot.places, strict=True)
    )
