"""The definition of `store`, in plain PyTorch."""

import torch
from torch import Tensor

from kvfold.codec import to_wide
from kvfold.ops.pages import LayerPages


def store(pages: LayerPages, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """Pack the step's tokens k, v [sequences, n, kv_heads, d] into their slots, and into the shadows of their pages.

    Returns them transformed and in 16 bits, which is what queries of the same step read inside their windows, or None
    without windows. Everything is computed, and checked, before the first byte is written.
    """
    step = pages.step
    page, shadow, offset = step.slots
    transformed = (pages.key.transform.forward(step.gather(k)), pages.value.transform.forward(step.gather(v)))
    y = torch.stack(transformed, dim=2)  # [tokens, kv_heads, 2, d]
    packed = [pages.codec(sides).quantize(y[:, :, sides]) for sides, _, _ in pages.sides]
    wide = to_wide(y, pages.shadows.dtype) if pages.windows else None

    for (_, code_view, meta_view), (codes, meta) in zip(pages.sides, packed, strict=True):
        code_view[page, offset] = codes
        meta_view[page, offset] = meta
    if wide is None:
        return None
    kept = shadow >= 0
    pages.shadows[shadow[kept], :, :, offset[kept]] = wide[kept]
    return step.scatter(wide[:, :, 0]), step.scatter(wide[:, :, 1])
