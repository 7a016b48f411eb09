"""The definitions of the ops, in plain PyTorch. Faster code is tested against them."""

import torch
from torch import Tensor

from kvfold.format.open_block import raw_from
from kvfold.ops.pages import LayerPages, Logits
from kvfold.quantizers import channelwise


def store(pages: LayerPages, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """Pack the step's keys and values [tokens, kv_heads, d] into their slots, and keep them raw in rings.

    Returns the transformed raw vectors that queries of the same step may read: see `Fresh`. They are contiguous.
    Without an open block, returns None.

    Tokens with a negative location are not stored.

    NaN, Inf and numbers beyond the range of 16-bit floats cannot be stored. If the key or value of a token and KV head
    has one, its slot and its raw vector hold zeros. Zeros decode to the mean. `pages.faults` becomes 1 at the token's
    location. The owner of the pages decides what follows.
    """
    step = pages.step
    page, offset = step.places
    live = torch.nonzero(step.locations >= 0).squeeze(1)
    y = pages.key.transform.forward(k), pages.value.transform.forward(v)
    near = pages.key.without_first(y[0], step.rows[1]), pages.value.without_first(y[1], step.rows[1])
    lost = torch.zeros(*k.shape[:2], 2, dtype=torch.bool, device=k.device)
    if pages.block:
        lost = torch.stack([~x.to(pages.ring.dtype).isfinite().all(dim=-1) for x in y], dim=2)
    for views in pages.views:
        sides, codec = views.sides, pages.codec(views.sides)
        new = torch.stack(_zeroed(near, lost)[sides], dim=2)  # [tokens, kv_heads, sides, d]
        if codec.layout.per_page:
            lost[:, :, sides] |= ~channelwise.storable(new.to(pages.ring.dtype), codec.layout.segments[0].bits)
            continue
        codes, meta, refused = codec.quantize_or_zero(new)
        lost[:, :, sides] |= refused
        views.write((page[live], offset[live]), codes[live], meta[live])
    if lost.any():
        pages.faults[step.locations[live][lost[live].flatten(1).any(dim=1)]] = 1
    if not pages.block:
        return None
    fresh, rows = pages.new_fresh(), pages.fresh.rows
    for side, x in zip(fresh, _zeroed(y, lost), strict=True):
        side[slice(None) if rows is None else rows] = x.to(side.dtype)
    for views in pages.views:
        if (codec := pages.codec(views.sides)).layout.per_page:
            filled, tokens = _filled(pages, fresh, views.sides)
            views.write((filled,), *codec.quantize(tokens.float()))
    kept = torch.nonzero(pages.fresh.kept >= 0).squeeze(1)
    at, of = pages.fresh.kept[kept], kept if rows is None else rows[kept]
    for ring, side in zip(pages.ring_sides, fresh, strict=True):
        ring[at // pages.ring_tokens, :, at % pages.ring_tokens] = side[of]
    return fresh


def _zeroed(y: tuple[Tensor, Tensor], lost: Tensor) -> list[Tensor]:
    """Keys and values [tokens, kv_heads, d], with zeros where bool[tokens, kv_heads, 2] says."""
    return [side.masked_fill(gone.unsqueeze(-1), 0) for side, gone in zip(y, lost.unbind(2), strict=True)]


def _filled(pages: LayerPages, fresh: tuple[Tensor, Tensor], sides: slice) -> tuple[Tensor, Tensor]:
    """The pages that this step fills, and their raw tokens [pages, page_size, kv_heads, sides, d]."""
    step = pages.step
    row, page = step.filled
    token = page.unsqueeze(1) * step.page_size + torch.arange(step.page_size, device=page.device)
    first = pages.fresh.first[row].unsqueeze(1)
    own = (pages.fresh.starts[row].unsqueeze(1) + token - first).clamp_min(0)
    places = step.in_rings(row.unsqueeze(1), token, pages.ring_tokens)
    both = []
    for ring, raw in zip(pages.ring_sides[sides], fresh[sides], strict=True):
        old = ring[places // pages.ring_tokens, :, places % pages.ring_tokens]  # [pages, page_size, kv_heads, d]
        both.append(torch.where((token >= first)[..., None, None], raw[own], old))
    return step.table[row, page], torch.stack(both, dim=3)


def attend(pages: LayerPages, q: Tensor, new: tuple[Tensor, Tensor] | None, logits: Logits) -> Tensor:
    """Plain softmax attention of queries [tokens, q_heads, d] over the tokens each reads: float32[tokens, q_heads, d],
    where d is the dimension of values.

    `new` is what `store` returned for the step. Logits are those of keys that are not centred.
    """
    kv_heads = pages.pool.shape[1]
    out = torch.zeros(*q.shape[:2], pages.layout.value.dims, device=q.device)
    key, value = pages.key.transform, pages.value.transform
    query_rows = iter(range(len(q)))
    for row, (start, length) in enumerate(zip(*pages.step.known, strict=True)):
        for position in range(start, length):
            i = next(query_rows)
            k, v = read(pages, row, position, new)
            query = key.dual(q[i]).double().unflatten(0, (kv_heads, -1))
            x = logits.scale * torch.einsum("hgd,jhd->hgj", query, k.double())
            if key.mean is not None:
                own = q[i].double().unflatten(0, (kv_heads, -1))
                x += logits.scale * torch.einsum("hgd,hd->hg", own, key.mean.double()).unsqueeze(-1)
            if logits.cap is not None:
                x = logits.cap * torch.tanh(x / logits.cap)
            if logits.sinks is not None:
                x = torch.cat((x, logits.sinks.double().view(kv_heads, -1, 1)), dim=-1)
                v = torch.cat((v, value.forward(torch.zeros_like(v[:1]))))
            mixed = torch.einsum("hgj,jhd->hgd", torch.softmax(x, dim=-1), v.double())
            out[i] = value.inverse(mixed.float().flatten(0, 1))
    return out


def read(pages: LayerPages, row: int, position: int, new: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """The transformed keys and values [position + 1, kv_heads, d] that the query at `position` of sequence `row` reads.

    They depend on the position alone: see open_block.py. Tokens of the step may be among those that are read packed.
    """
    step, x = pages.step, read_packed(pages, row, position + 1)
    if new is None:
        return x
    start, first = int(pages.fresh.starts[row]), int(pages.fresh.first[row])
    for j in range(raw_from(position, pages.block), position + 1):
        at = int(step.in_rings(torch.tensor(row), torch.tensor(j), pages.ring_tokens))
        block, offset = divmod(at, pages.ring_tokens)
        for side, raw, ring in zip(x, new, pages.ring_sides, strict=True):
            side[j] = raw[start + j - first] if j >= first else ring[block, :, offset]
    return x


def read_packed(pages: LayerPages, row: int, length: int) -> tuple[Tensor, Tensor]:
    """The transformed keys and values [length, kv_heads, d] of a sequence's first tokens, as their slots hold them."""
    step, tokens = pages.step, torch.arange(length, device=pages.pool.device)
    k, v = pages.unpack(step.table[row, tokens // step.page_size], tokens % step.page_size)
    if pages.key.first is not None:
        k[0] += pages.key.first
    return k, v
