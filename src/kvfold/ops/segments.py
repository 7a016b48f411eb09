"""The segments of a slot as numbers, which is how kernels see them."""

from typing import NamedTuple

from kvfold.layout import Rule, SlotLayout

RULES: dict[Rule, int] = {"affine": 0, "codebook": 1, "raw": 2, "channel": 3}


class SegmentRow(NamedTuple):
    start: int  # the first coordinate
    dims: int
    stored: int  # codes: dims or, for codebooks, as many as fill whole bytes
    bits: int
    rule: int  # of RULES
    boosted: int  # coordinates with twice the bits
    byte: int  # where its codes begin in the codes of a slot
    entry: int  # where its metadata begin in the metadata of a slot


def segment_rows(slot: SlotLayout) -> tuple[SegmentRow, ...]:
    return tuple(
        SegmentRow(each.start, each.dims, each.padded_dims, each.bits, RULES[each.rule], each.boosted, *place)
        for each, place in zip(slot.segments, slot.places, strict=True)
    )
