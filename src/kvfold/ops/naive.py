"""The definitions of the ops, in plain PyTorch. Faster code is tested against them."""

import torch
from torch import Tensor

from kvfold.ops.pages import LayerPages, Logits, require_shadows
from kvfold.quantizers import channelwise


def store(pages: LayerPages, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """Pack the step's keys and values [tokens, kv_heads, d] into their slots, and write them raw to shadow pages.

    Returns the transformed raw vectors, which are contiguous: queries of the same step read them inside their windows.
    Without windows, returns None.

    Tokens with a negative location are not stored.

    NaN, Inf and numbers beyond the range of 16-bit floats cannot be stored. If the key or value of a token and KV head
    has one, its slot and its shadow hold zeros. Zeros decode to the mean. `pages.faults` becomes 1 at the token's
    location. The owner of the pages decides what follows.
    """
    step = pages.step
    page, shadow, offset = step.places
    live = torch.nonzero(step.locations >= 0).squeeze(1)
    y = pages.key.transform.forward(k), pages.value.transform.forward(v)
    raw = _sixteen_bits(pages, y) if pages.windows else None
    lost = torch.zeros(*k.shape[:2], 2, dtype=torch.bool, device=k.device) if raw is None else _beyond_raw(pages, raw)
    y = _zeroed(y, lost)
    for views in pages.views:
        sides, codec = views.sides, pages.codec(views.sides)
        new = torch.stack([*y][sides], dim=2)  # [tokens, kv_heads, sides, d]
        if codec.layout.per_page:
            filled, tokens = _filled(pages, new.to(pages.shadows.dtype), sides)
            index: tuple[Tensor, ...] = (filled,)
            new_codes, new_meta = codec.quantize(tokens.float())
        else:
            new_codes, new_meta, refused = codec.quantize_or_zero(new)
            lost[:, :, sides] |= refused
            index, new_codes, new_meta = (page[live], offset[live]), new_codes[live], new_meta[live]
        views.write(index, new_codes, new_meta)
    if lost.any():
        pages.faults[step.locations[live][lost[live].flatten(1).any(dim=1)]] = 1
    if raw is None:
        return None
    raw = _zeroed(raw, lost)
    kept = live[shadow[live] >= 0]
    for shadows, side in zip(pages.shadow_sides, raw, strict=True):
        shadows[shadow[kept], :, offset[kept]] = side[kept]
    return raw


def _sixteen_bits(pages: LayerPages, y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    k, v = (side.to(pages.shadows.dtype).contiguous() for side in y)
    return k, v


def _zeroed(y: tuple[Tensor, Tensor], lost: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [tokens, kv_heads, d], with zeros where bool[tokens, kv_heads, 2] says."""
    k, v = (side.masked_fill(gone.unsqueeze(-1), 0) for side, gone in zip(y, lost.unbind(2), strict=True))
    return k, v


def _beyond_raw(pages: LayerPages, raw: tuple[Tensor, Tensor]) -> Tensor:
    """bool[tokens, kv_heads, 2]: which keys and values [tokens, kv_heads, d] are not finite in 16 bits. If whole pages
    are quantized, also vectors that no page could hold."""
    lost = torch.stack([~side.isfinite().all(dim=-1) for side in raw], dim=2)
    for sides, *_ in pages.views:
        layout = pages.codec(sides).layout
        if layout.per_page:
            lost[:, :, sides] |= ~channelwise.storable(torch.stack([*raw][sides], dim=2), layout.segments[0].bits)
    return lost


def _filled(pages: LayerPages, new: Tensor, sides: slice) -> tuple[Tensor, Tensor]:
    """The pages that this step fills, and their raw tokens [pages, page_size, kv_heads, sides, d]. The step's tokens
    come from `new` [tokens, kv_heads, sides, d], older tokens from shadow pages.

    Tokens of the sink are never read packed, and would only widen the range of numbers in a page. So later tokens of
    the page take their places.
    """
    step = pages.step
    step.once(require_shadows, pages.windows)
    row, page, own = step.filled
    shadow = step.shadow_of[step.table[row, page]]
    old = torch.stack([side[shadow].transpose(1, 2) for side in pages.shadow_sides[sides]], dim=3)
    full = torch.where((own >= 0)[..., None, None, None], new[own], old)
    first = (pages.windows.sink - page * step.page_size).clamp(0, step.page_size - 1).unsqueeze(1)
    token = first + (torch.arange(step.page_size, device=page.device) - first) % (step.page_size - first)
    return step.table[row, page], full[torch.arange(len(page), device=page.device).unsqueeze(1), token]


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

    They depend on the position alone. These tokens j are read raw:
    - j < sink;
    - j > position − recent;
    - j in a page that is quantized as a whole and is not full at `position`.

    All others are read packed, tokens of the step included.
    """
    step, windows = pages.step, pages.windows
    tokens = torch.arange(position + 1, device=pages.pool.device)
    page, offset = step.table[row, tokens // step.page_size], tokens % step.page_size
    x = pages.unpack(page, offset)
    start, after = step.known.starts[row], int(step.query_starts[row + 1]) - step.known.lengths[row]
    for j in range(position + 1):
        unfilled = j >= (position + 1) // windows.group * windows.group
        if new is not None and (j < windows.sink or j > position - windows.recent or unfilled):
            shadow = int(step.shadow_of[page[j]])
            assert shadow >= 0 or j >= start, "a window reaches into a page that has no shadow"
            for side, own, shadows in zip(x, new, pages.shadow_sides, strict=True):
                side[j] = own[after + j] if j >= start else shadows[shadow, :, offset[j]]
    return x
