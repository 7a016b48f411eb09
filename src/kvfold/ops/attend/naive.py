"""The definition of `attend`: read every token as its query's position demands, then plain softmax attention."""

import torch
from torch import Tensor

from kvfold.ops.pages import LayerPages


def read(pages: LayerPages, row: int, position: int, new: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """The transformed keys and values [position + 1, kv_heads, d] that the query at `position` of sequence `row` sees.

    It depends on the position alone: tokens j < sink, j > position − recent and of a page that is not full yet but is
    quantized as a whole in 16 bits, all others through their packed form, tokens of its own step included. `new` is
    what `store` returned for the step.
    """
    step, windows = pages.step, pages.windows
    tokens = torch.arange(position + 1, device=pages.pool.device)
    page, offset = step.table[row, tokens // step.page_size], tokens % step.page_size
    x = pages.unpack(page, offset)  # [tokens, kv_heads, 2, d]
    for j in range(position + 1):
        unfilled = j >= (position + 1) // windows.group * windows.group
        if new is not None and (j < windows.sink or j > position - windows.recent or unfilled):
            if j >= step.starts[row]:
                x[j] = torch.stack([side[row, j - step.lengths[row]] for side in new], dim=1)
            else:
                x[j] = pages.shadows[step.shadow_of[page[j]], :, :, offset[j]]
    return x[:, :, 0], x[:, :, 1]


def attend(pages: LayerPages, q: Tensor, new: tuple[Tensor, Tensor] | None, scale: float) -> Tensor:
    """Queries [sequences, n, q_heads, d] (left-padded) -> outputs of the same shape, float32; zeros for padding."""
    kv_heads = pages.pool.shape[1]
    out = torch.zeros(q.shape, device=q.device)
    for row, positions in enumerate(pages.step.positions.tolist()):
        for column, position in enumerate(positions):
            if position < pages.step.starts[row]:
                continue
            k, v = read(pages, row, position, new)
            query = pages.key.transform.dual(q[row, column]).double().unflatten(0, (kv_heads, -1))
            weights = torch.softmax(scale * torch.einsum("hgd,jhd->hgj", query, k.double()), dim=-1)
            mixed = torch.einsum("hgj,jhd->hgd", weights, v.double())
            out[row, column] = pages.value.transform.inverse(mixed.float().flatten(0, 1))
    return out
