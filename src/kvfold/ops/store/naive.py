"""The definition of `store`, in plain PyTorch."""

import torch
from torch import Tensor

from kvfold.ops.pages import LayerPages
from kvfold.quantizers import channelwise


def store(pages: LayerPages, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """Pack the step's tokens k, v [sequences, n, kv_heads, d] into their slots, and into the shadows of their pages.

    Returns them transformed and in 16 bits, which is what queries of the same step read inside their windows, or None
    without windows.

    NaN, Inf and numbers beyond the range of 16-bit floats cannot be stored. Where the key or value of a token in a KV
    head has one, so that its slot or its 16-bit copy cannot hold it, both are zero, which is the mean, and
    `pages.faults` becomes 1 at the slot of the token. Who owns the pages decides what follows from that.
    """
    step = pages.step
    page, shadow, offset = step.slots
    transformed = (pages.key.transform.forward(step.gather(k)), pages.value.transform.forward(step.gather(v)))
    y = torch.stack(transformed, dim=2)  # [tokens, kv_heads, 2, d]
    wide = y.to(pages.shadows.dtype) if pages.windows else None
    lost = _lost_copies(pages, y, wide)
    y = y.masked_fill(lost.unsqueeze(-1), 0)
    for sides, codes, meta in pages.sides:
        codec = pages.codec(sides)
        index: tuple[Tensor, ...] = (page, offset)
        if codec.layout.per_page:
            filled, tokens = _filled(pages, step.scatter(y[:, :, sides].to(pages.shadows.dtype)), sides)
            index = (filled,)
            new_codes, new_meta = codec.quantize(tokens.float())
        else:
            new_codes, new_meta, refused = codec.quantize_or_zero(y[:, :, sides])
            lost[:, :, sides] |= refused
        codes[index] = new_codes
        # as integers: names in metadata may be NaN, whose bits deterministic algorithms change on GPUs
        meta.view(torch.int16)[index] = new_meta.view(torch.int16)
    if lost.any():
        pages.faults[(page * step.page_size + offset)[lost.flatten(1).any(dim=1)]] = 1
    if wide is None:
        return None
    wide = wide.masked_fill(lost.unsqueeze(-1), 0)
    kept = shadow >= 0
    pages.shadows[shadow[kept], :, :, offset[kept]] = wide[kept]
    return step.scatter(wide[:, :, 0]), step.scatter(wide[:, :, 1])


def _lost_copies(pages: LayerPages, y: Tensor, wide: Tensor | None) -> Tensor:
    """bool[tokens, kv_heads, 2]: which vectors y [tokens, kv_heads, 2, d] their 16-bit copies cannot hold; or their
    page could not, once it is full and quantized as a whole."""
    if wide is None:
        return torch.zeros(y.shape[:-1], dtype=torch.bool, device=y.device)
    lost = ~wide.isfinite().all(dim=-1)
    for sides, *_ in pages.sides:
        layout = pages.codec(sides).layout
        if layout.per_page:
            lost[:, :, sides] |= ~channelwise.storable(wide[:, :, sides], layout.segments[0].bits)
    return lost


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
