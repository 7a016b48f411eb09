"""Views of pages by `PageLayout.offsets`, for slots that are one array of a page."""

import torch
from torch import Tensor

from kvfold.format.layout import PageLayout


def key_views(layout: PageLayout, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Pages uint8[..., page_bytes] -> views of their K codes uint8[..., page_size, code_bytes] and K metadata
    float16[..., page_size or 1, entries]."""
    return _views(layout, pages, 0)


def value_views(layout: PageLayout, pages: Tensor) -> tuple[Tensor, Tensor]:
    """The same for values."""
    return _views(layout, pages, 1)


def _views(layout: PageLayout, pages: Tensor, side: int) -> tuple[Tensor, Tensor]:
    slot, size = (layout.key, layout.value)[side], layout.page_size
    rows = 1 if slot.per_page else size
    codes = pages[..., layout.offsets[side] :][..., : size * slot.code_bytes]
    meta = pages[..., layout.offsets[2 + side] :][..., : rows * slot.meta_bytes].view(torch.float16)
    return codes.unflatten(-1, (size, slot.code_bytes)), meta.unflatten(-1, (rows, slot.meta_bytes // 2))
