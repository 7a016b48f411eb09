"""The segments of a page as rows of numbers, for kernels."""

from typing import NamedTuple

from kvfold.format.layout import PageLayout, Rule

RULES: dict[Rule, int] = {"affine": 0, "codebook": 1, "raw": 2, "channel": 3, "even": 4}


class SegmentRow(NamedTuple):
    start: int  # the first coordinate
    dims: int
    stored: int  # codes: as many as dims; for codebooks, padded to whole bytes
    bits: int
    rule: int  # of RULES
    boosted: int  # coordinates with twice the bits
    codes: int  # where it lies in a page, see `SegmentPlace`
    code_stride: int
    meta: int
    meta_stride: int


def segment_rows(layout: PageLayout, side: int, head: int = 0) -> tuple[SegmentRow, ...]:
    """The segments of keys (0) or values (1) of a KV head."""
    segments = (layout.key, layout.value)[side].of_head(head).segments
    return tuple(
        SegmentRow(each.start, each.dims, each.padded_dims, each.bits, RULES[each.rule], each.boosted, *place)
        for each, place in zip(segments, layout.places(side, head), strict=True)
    )
