"""What ops have to return, in float64 from the bytes that they see, and how far from it they may be: twice as far as
the same maths with all that tensor cores multiply, or that is quantized, rounded to 16 bits."""

import math

import torch
from torch import Tensor

from kvfold.ops.dispatch import New
from kvfold.ops.pages import LayerPages


def attend_error(pages: LayerPages, q: Tensor, new: New, scale: float, outputs: Tensor) -> tuple[float, float]:
    """The relative error of the first and last of outputs [sequences, n, q_heads, d], and the largest allowed."""
    rows = sorted({0, len(q) - 1})
    exact, rounded = (
        torch.stack([attend(pages, q, new, scale, row, dtype) for row in rows]) for dtype in (None, q.dtype)
    )
    # of a single token, whose weight is one, rounding to a type that it has changes nothing
    return relative_error(outputs[rows], exact), 2 * (relative_error(rounded, exact) + torch.finfo(torch.float32).eps)


def attend(pages: LayerPages, q: Tensor, new: New, scale: float, row: int, dtype: torch.dtype | None = None) -> Tensor:
    """What `naive.attend` returns for a sequence without padding, all its queries at once: float32[n, q_heads, d].

    With a `dtype`, transformed queries, keys, values and weights are rounded to it.
    """
    step, windows = pages.step, pages.windows
    position = step.positions[row].unsqueeze(1).to(q.device)
    token = torch.arange(step.lengths[row], device=q.device)
    page, offset = step.table[row, token // step.page_size], token % step.page_size
    parts = [
        pages.codec(sides).dequantize(codes[page, offset], meta[page, offset % meta.shape[1]])
        for sides, codes, meta in pages.sides
    ]
    seen = token <= position  # [n, tokens]
    read = [(torch.cat(parts, dim=2), seen)]  # states [tokens, kv_heads, 2, d], and which query reads them
    if new is not None:
        wide = (token < windows.sink) | (token >= windows.exact_from(position))
        kept = pages.shadows[step.shadow_of[page].clamp_min(0), :, :, offset]
        kept[step.starts[row] :] = torch.stack([side[row] for side in new], dim=2)
        read = [(read[0][0], seen & ~wide), (kept, seen & wide)]
    for states, mask in read:
        states[~mask.any(dim=0)] = 0  # what nobody reads nobody may have written

    def rounded(x: Tensor) -> Tensor:
        return x.double() if dtype is None else x.to(dtype).double()

    queries = rounded(pages.key.transform.dual(q[row])).unflatten(1, (pages.pool.shape[1], -1)).permute(1, 2, 0, 3)
    outs = torch.zeros_like(queries)  # [kv_heads, ratio, n, d]
    for head, query in enumerate(queries):
        logits = query.new_full((), -math.inf)
        for states, mask in read:
            logits = torch.where(mask, scale * query @ rounded(states[:, head, 0]).mT, logits)
        weights = rounded(torch.softmax(logits, dim=-1))
        for states, mask in read:
            outs[head] += (weights * mask) @ rounded(states[:, head, 1])
    return pages.value.transform.inverse(outs.permute(2, 0, 1, 3).flatten(1, 2).float())


def store_error(pages: LayerPages, k: Tensor, v: Tensor, new: New) -> tuple[float, float]:
    """How far what a step stored, and returned as `new`, is from what the codecs store, and how far it may be."""
    step = pages.step
    sides = zip((pages.key, pages.value), (k, v), strict=True)
    y = torch.stack([codec.transform.forward(step.gather(x)) for codec, x in sides], dim=2)
    narrow = y.to(k.dtype)
    page, _, offset = step.slots
    stored, exact, rounded = [], [], []
    for part, codes, meta in pages.sides:
        codec = pages.codec(part)
        stored.append(codec.dequantize(codes[page, offset], meta[page, offset]))
        exact.append(codec.dequantize(*codec.quantize(y[:, :, part])))
        rounded.append(codec.dequantize(*codec.quantize(narrow[:, :, part].float())))
    expected = torch.cat(exact, dim=2)
    error, allowed = (relative_error(torch.cat(parts, dim=2), expected) for parts in (stored, rounded))
    if new is not None:
        error = max(error, relative_error(torch.stack([step.gather(x) for x in new], dim=2), narrow))
    return error, 2 * allowed


def relative_error(x: Tensor, exact: Tensor) -> float:
    """Of all numbers together."""
    return float((x.double() - exact.double()).norm() / exact.double().norm())
