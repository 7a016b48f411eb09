"""What ops have to return, and how far from it they may be.

The expected numbers are computed in float64 from the bytes that an op sees. The allowed error is twice the error of the
same maths with some numbers rounded to 16 bits: the operands of tensor cores, what is quantized, and the outputs of
flash attention.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvfold.format.open_block import raw_from
from kvfold.ops import naive
from kvfold.ops.dispatch import New
from kvfold.ops.pages import LayerPages, Logits
from kvfold.transforms import Transform

NAIVE_QUERIES = 256  # with more, `naive.attend` is too slow; `attend` computes the same
TIE_ERROR = 2**-7  # always allowed for stored numbers: a tie may round to the next code
EPSILON = torch.finfo(torch.float32).eps


def attend_error(pages: LayerPages, q: Tensor, new: New, logits: Logits, outputs: Tensor) -> tuple[float, float]:
    """The relative and the allowed error of outputs [tokens, q_heads, d], for the first and last sequence."""
    rows = sorted({0, len(pages.step.lengths) - 1})
    exact, rounded = (
        torch.cat([attend(pages, q, new, logits, row, dtype) for row in rows]) for dtype in (None, q.dtype)
    )
    found = torch.cat([outputs[queries(pages, row)] for row in rows])
    return relative_error(found, exact), allowed_error(rounded, exact)


def queries(pages: LayerPages, row: int) -> slice:
    """Where the queries of a sequence lie in the queries of the step."""
    return slice(*pages.step.query_starts[row : row + 2].tolist())


def attend(
    pages: LayerPages, q: Tensor, new: New, logits: Logits, row: int, dtype: torch.dtype | None = None
) -> Tensor:
    """What `naive.attend` returns for one sequence, float32[n, q_heads, d].

    All queries are computed at once. Transformed queries, keys, values, weights and outputs are rounded to `dtype`, if
    it is given.
    """
    step, own = pages.step, queries(pages, row)
    start, length = step.known.starts[row], step.known.lengths[row]
    position = torch.arange(start, length, device=q.device).unsqueeze(1)
    token = torch.arange(length, device=q.device)
    seen = token <= position  # [n, tokens]
    read = [(naive.read_packed(pages, row, length), seen)]  # and which queries read them
    if new is not None:
        raw = token >= raw_from(position, pages.block)
        begin, end, first = (int(x) for x in (*pages.fresh.starts[row : row + 2], pages.fresh.first[row]))
        places = step.in_rings(torch.tensor(row, device=q.device), token, pages.ring_tokens)
        k, v = (side[places // pages.ring_tokens, :, places % pages.ring_tokens] for side in pages.ring_sides)
        k[first:], v[first:] = (side[begin:end] for side in new)
        read = [(read[0][0], seen & ~raw), ((k, v), seen & raw)]
    for states, mask in read:
        for side in states:
            side[~mask.any(dim=0)] = 0  # no query reads these, so they may never have been written

    def rounded(x: Tensor) -> Tensor:
        return x.double() if dtype is None else x.to(dtype).double()

    def by_head(x: Tensor) -> Tensor:
        return x.unflatten(1, (pages.pool.shape[1], -1)).permute(1, 2, 0, 3)  # [kv_heads, ratio, n, d]

    key, value = pages.key.transform, pages.value.transform
    rotated = by_head(rounded(key.dual(q[own])))
    of_mean = torch.zeros_like(rotated[..., :1])
    if key.mean is not None:
        of_mean = logits.scale * by_head(q[own].double()) @ key.mean.double()[:, None, :, None]
    outs = rotated.new_zeros(*rotated.shape[:3], pages.layout.value.dims)
    for head, query in enumerate(rotated):
        x = query.new_full((), -math.inf)
        for (k, _), mask in read:
            products = logits.scale * query @ rounded(k[:, head]).mT + of_mean[head]
            if logits.cap is not None:
                products = logits.cap * torch.tanh(products / logits.cap)
            x = torch.where(mask, products, x)
        if logits.sinks is not None:
            x = torch.cat((x, logits.sinks.double().view(len(outs), -1, 1, 1)[head].expand(-1, len(x[0]), -1)), dim=-1)
        weights = rounded(torch.softmax(x, dim=-1))
        for (_, v), mask in read:
            outs[head] += (weights[..., :length] * mask) @ rounded(v[:, head])
        if logits.sinks is not None:
            zero = value.forward(torch.zeros_like(outs[:, 0, 0]))[head]
            outs[head] += weights[..., length:] * zero
    return value.inverse(rounded(outs).permute(2, 0, 1, 3).flatten(1, 2).float())


def store_error(pages: LayerPages, k: Tensor, v: Tensor, new: New) -> tuple[float, float]:
    """The relative and the allowed error of what a step stored and returned as `new`. The codecs are the definition."""
    step = pages.step
    sides = list(zip((pages.key, pages.value), (k, v), strict=True))
    y = [codec.transform.forward(x) for codec, x in sides]
    narrow = [side.to(k.dtype) for side in y]
    near, narrow_near = (
        [codec.without_first(side, step.rows[1]) for (codec, _), side in zip(sides, parts, strict=True)]
        for parts in (y, narrow)
    )
    page, offset = step.places
    stored, exact, rounded = [], [], []
    for views in pages.views:
        part, codec = views.sides, pages.codec(views.sides)
        stored.append(codec.dequantize(*views.read(page, offset)))
        exact.append(codec.dequantize(*codec.quantize(torch.stack(near[part], dim=2))))
        rounded.append(codec.dequantize(*codec.quantize(torch.stack(narrow_near[part], dim=2).float())))
    error, allowed = (relative_error(flat(parts), flat(exact)) for parts in (stored, rounded))
    if new is not None:
        rows = slice(None) if pages.fresh.rows is None else pages.fresh.rows
        error = max(error, relative_error(flat(side[rows] for side in new), flat(narrow)))
    return error, 2 * allowed


# --- Against the definitions themselves, on the CPU.


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread. The definitions make many small calls, which more threads slow down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def on_cpu(pages: LayerPages) -> LayerPages:
    """A layer and its step copied to the CPU, where the definitions run."""
    tensors: dict[str, Any] = {name: _copied(x) for name, x in vars(pages.step).items() if isinstance(x, Tensor)}
    key, value, pool = pages.key.to("cpu"), pages.value.to("cpu"), _copied(pages.pool)
    views = pages.layout.views(pool, together=key.quantizes_like(value))
    return replace(
        pages, step=replace(pages.step, **tensors), key=key, value=value, pool=pool, views=views,
        ring=_copied(pages.ring), faults=_copied(pages.faults),
    )  # fmt: skip


def _copied(x: Tensor) -> Tensor:
    return x.to("cpu", copy=True)


@one_thread()
def naive_attend_error(pages: LayerPages, q: Tensor, new: New, logits: Logits, outputs: Tensor) -> tuple[float, float]:
    """The relative and the allowed error of outputs [tokens, q_heads, d]."""

    def attended(dtype: torch.dtype | None) -> Tensor:
        return torch.cat([attend(pages, q, new, logits, row, dtype) for row in range(len(pages.step.lengths))])

    exact = naive.attend(pages, q, new, logits) if len(q) <= NAIVE_QUERIES else attended(None)
    return relative_error(outputs.cpu(), exact), allowed_error(attended(q.dtype), exact)


@one_thread()
def naive_store_error(
    before: LayerPages, expected: LayerPages, got: LayerPages, k: Tensor, v: Tensor
) -> tuple[float, float]:
    """The relative and the allowed error of what a step packed in `got`. `naive.store` packed `expected`."""
    rounded = on_cpu(before)
    narrow = [codec.transform.forward(x).to(k.dtype) for codec, x in ((rounded.key, k), (rounded.value, v))]
    key, value = (replace(codec, transform=Transform()) for codec in (rounded.key, rounded.value))
    naive.store(replace(rounded, key=key, value=value), *narrow)
    exact = _packed(expected)
    return relative_error(_packed(got), exact), max(TIE_ERROR, allowed_error(_packed(rounded), exact))


def _packed(pages: LayerPages) -> Tensor:
    """The numbers of the decoded tokens that a step packed, keys and values.

    Where whole pages are quantized, these are the tokens of the pages that the step filled.
    """
    step, group = pages.step, pages.layout.page_size if pages.layout.per_page else 1
    tokens = [
        (row, token)
        for row, (start, length) in enumerate(zip(*step.known, strict=True))
        for token in range(start // group * group, length // group * group)
    ]
    row, token = torch.tensor(tokens, dtype=torch.int64).view(-1, 2).unbind(dim=1)
    return flat(pages.unpack(step.table[row, token // step.page_size], token % step.page_size))


def differing_share(before: Tensor, expected: Tensor, got: Tensor) -> float:
    """How many integers differ from the expected ones, relative to how many had to change."""
    return float((got != expected).sum() / (before != expected).sum().clamp_min(1))


# --- Errors.


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All numbers of keys and values, which may differ in d."""
    return torch.cat([x.flatten() for x in tensors])


def relative_error(x: Tensor, exact: Tensor) -> float:
    """The norm of the error of all numbers over the norm of `exact`. 0 if there are no numbers."""
    return float((x.double() - exact.double()).norm() / exact.double().norm()) if exact.numel() else 0.0


def allowed_error(rounded: Tensor, exact: Tensor) -> float:
    """Twice the error of the same maths in 16 bits. Epsilon is for errors of 0, as with a single stored token."""
    return 2 * (relative_error(rounded, exact) + EPSILON)
