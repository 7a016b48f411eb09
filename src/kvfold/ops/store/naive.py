"""The definition of `store`, in plain PyTorch."""

import torch
from torch import Tensor

from kvfold.codec import to_wide
from kvfold.ops.pages import LayerPages
from kvfold.quantizers import channelwise


def store(pages: LayerPages, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """Pack the step's tokens k, v [sequences, n, kv_heads, d] into their slots, and into the shadows of their pages.

    Returns them transformed and in 16 bits, which is what queries of the same step read inside their windows, or None
    without windows. Everything is computed, and checked, before the first byte is written.
    """
    step = pages.step
    page, shadow, offset = step.slots
    transformed = (pages.key.transform.forward(step.gather(k)), pages.value.transform.forward(step.gather(v)))
    y = torch.stack(transformed, dim=2)  # [tokens, kv_heads, 2, d]
    wide = to_wide(y, pages.shadows.dtype) if pages.windows else None
    packed: list[tuple[list[Tensor], tuple[Tensor, ...], tuple[Tensor, Tensor]]] = []
    for sides, *views in pages.sides:
        codec = pages.codec(sides)
        if codec.layout.per_page:
            assert wide is not None
            # what the page could not hold when it is full is refused now, and not with some later token
            channelwise.check(wide[:, :, sides], codec.layout.segments[0].bits)
            filled, tokens = _filled(pages, step.scatter(wide[:, :, sides]), sides)
            packed.append((views, (filled,), codec.quantize(tokens.float())))
        else:
            packed.append((views, (page, offset), codec.quantize(y[:, :, sides])))

    for (codes, meta), index, (new_codes, new_meta) in packed:
        codes[index] = new_codes
        # as integers: names in metadata may be NaN, whose bits deterministic algorithms change on GPUs
        meta.view(torch.int16)[index] = new_meta.view(torch.int16)
    if wide is None:
        return None
    kept = shadow >= 0
    pages.shadows[shadow[kept], :, :, offset[kept]] = wide[kept]
    return step.scatter(wide[:, :, 0]), step.scatter(wide[:, :, 1])


def _filled(pages: LayerPages, new: Tensor, sides: slice) -> tuple[Tensor, Tensor]:
    """The pages that this step fills, and their tokens [pages, page_size, kv_heads, sides, d] in 16 bits: out of the
    step's own `new` [sequences, n, kv_heads, sides, d], the older ones out of shadows.

    Tokens of the sink are never read packed and would only widen a page's ranges: later tokens of the page stand in.
    """
    step = pages.step
    row, page, column = step.filled
    old = pages.shadows[step.shadow_of[step.table[row, page]]][:, :, sides].permute(0, 3, 1, 2, 4)
    full = torch.where((column >= 0)[..., None, None, None], new[row.unsqueeze(1), column], old)
    first = (pages.windows.sink - page * step.page_size).clamp(0, step.page_size - 1).unsqueeze(1)
    token = first + (torch.arange(step.page_size, device=page.device) - first) % (step.page_size - first)
    return step.table[row, page], full[torch.arange(len(page), device=page.device).unsqueeze(1), token]
