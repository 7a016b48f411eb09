"""The prologue of a decode step: one launch that transforms queries, keys and values.

Then decoding need not wait until the step's tokens are packed: `store_gpu.pack` packs them beside decoding.

A CTA computes WIDTH coordinates of ROWS vectors of one KV head. Queries are rotated nearly as keys are, so CTAs for
keys take the key of a token and its queries together. Values have CTAs of their own.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.ops.launch import launcher
from kvfold.ops.pages import LayerPages
from kvfold.ops.pdl import AFTER, ALONE, release, wait
from kvfold.ops.rotate import head_stride, terms_and_shift
from kvfold.ops.sizes import ceil_div
from kvfold.ops.store.quantize_tiles import sixteen_bits, storable
from kvfold.ops.store.store_gpu import check
from kvfold.transforms import Transform

ROWS = 16  # the rows of an MMA
WIDTH = 64  # coordinates


class Transformed(NamedTuple):
    q: Tensor  # float32[tokens, q_heads, d]
    kv: Tensor  # keys and values, float32[2, tokens, kv_heads, d]
    new: tuple[Tensor, Tensor]  # raw keys and values, as `store` returns them


class _Memory(NamedTuple):
    shadow_of: Tensor  # see pages.py
    shadows: Tensor
    new: Tensor
    faults: Tensor


def prologue(pages: LayerPages, q: Tensor, k: Tensor, v: Tensor, overlaps: bool = False) -> Transformed:
    """Transform 16-bit q, k and v [tokens, heads, d], and write k and v to shadows. q and k have one dtype.

    With `overlaps`, the kernel is launched before the previous one ends, and lets the next one begin.

    As `naive.store` says, a vector that 16 bits cannot hold becomes zeros in `new` and in shadows, and its location is
    marked in `pages.faults`. One thing differs, since CTAs do not see each other's numbers. If a finite vector gets out
    of range by the transform, only the WIDTH coordinates around such a number become zeros.
    """
    check(pages, k, v)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    (tokens, q_heads, dims), kv_heads, device = q.shape, k.shape[1], q.device
    transformed, kv = torch.empty(q.shape, device=device), torch.empty(2, *k.shape, device=device)
    new = torch.empty(2, *k.shape, dtype=pages.shadows.dtype, device=device)
    key = pages.key.transform.once(_operands, dims, k.dtype, device, True)
    value = pages.value.transform.once(_operands, dims, v.dtype, device, False)
    step, bits = pages.step, torch.int16
    memory = _Memory(step.shadow_of, pages.shadows.view(bits), new.view(bits), pages.faults)
    ratio, width = q_heads // kv_heads, min(WIDTH, dims)
    overlap = AFTER if overlaps else ALONE
    kernel = launcher(
        _prologue,
        device,
        RATIO=ratio,
        DIMS=dims,
        WIDTH=width,
        ROWS=ROWS,
        PAGE=pages.layout.page_size,
        BFLOAT=new.dtype == torch.bfloat16,
        OVERLAP=overlap,
        maxnreg=128,  # the compiler would choose fewer, and load one part of a matrix after another
        **overlap.launch,
    )
    kernel(
        (ceil_div(tokens * (1 + ratio), ROWS), kv_heads, 2 * (dims // width)),
        *(q, k, v, key, value, transformed, kv, step.locations, memory, tokens),
        *(stride for x in (q, k, v) for stride in x.stride()[:2]),
    )
    return Transformed(transformed, kv, (new[0], new[1]))


class _Operands(NamedTuple):
    """See `terms_and_shift`. The terms behind the first are of queries alone."""

    terms: tuple[Tensor, ...]
    head: int  # stride from KV head to KV head
    factors: Tensor | None
    shift: Tensor | None


def _operands(transform: Transform, dims: int, dtype: torch.dtype, device: torch.device, queries: bool) -> _Operands:
    terms, factors, shift = terms_and_shift(transform, dims, dtype, device)
    return _Operands(terms if queries else terms[:1], head_stride(terms), factors, shift)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["locations"])
def _prologue(
    q, k, v, key, value, transformed, kv, locations, memory, tokens,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    RATIO: tl.constexpr, DIMS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
    BFLOAT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = DIMS // WIDTH
    if (tl.program_id(2) >= COLUMNS) & (tl.program_id(0) * ROWS >= tokens):  # values have fewer rows
        return
    head, kv_heads = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    if tl.program_id(2) < COLUMNS:
        token, member = row // (1 + RATIO), row % (1 + RATIO)
        is_key, q_head = member == 0, head * RATIO + member - 1
        key_at, query_at = token * k_stride + head * k_head_stride, token * q_stride + q_head * q_head_stride
        to_key, to_query = token * kv_heads + head, token * kv_heads * RATIO + q_head
        _transform_side(
            tl.where(is_key, k + key_at, q + query_at),
            tl.where(is_key, kv + to_key * DIMS, transformed + to_query * DIMS),
            token, is_key, key, locations, memory, tokens, 0, DIMS, WIDTH, PAGE, BFLOAT, OVERLAP,
        )  # fmt: skip
    else:
        to_value = kv + ((tokens + row) * kv_heads + head) * DIMS
        _transform_side(
            v + row * v_stride + head * v_head_stride, to_value, row, row >= 0, value, locations,
            memory, tokens, 1, DIMS, WIDTH, PAGE, BFLOAT, OVERLAP,
        )  # fmt: skip


@triton.jit
def _transform_side(
    x, to, token, kept, operands, locations, memory, tokens, WHICH: tl.constexpr, DIMS: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, BFLOAT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Transform rows from `x` to `to`. Rows that are `kept` (keys, values) also go to `new` and to shadows."""
    head, kv_heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    coordinate = tl.arange(0, DIMS)
    column = tl.program_id(2) % (DIMS // WIDTH) * WIDTH + tl.arange(0, WIDTH)
    exists = token < tokens
    kept = kept & exists
    wait(OVERLAP, "start")
    release(OVERLAP, "start")
    # issue all loads at once: the kernel takes little longer than its loads
    location = tl.load(locations + token, mask=kept, other=-1)
    terms = ()
    for i in tl.static_range(len(operands.terms)):
        entry = head * operands.head + coordinate[:, None] * DIMS + column[None, :]
        terms += (tl.load(operands.terms[i] + entry),)
    states = tl.load(x[:, None] + coordinate[None, :], mask=exists[:, None], other=0.0)
    if len(operands.terms) == 0:
        y = tl.load(x[:, None] + column[None, :], mask=exists[:, None], other=0.0).to(tl.float32)
    if operands.factors is not None:
        factors = tl.load(operands.factors + column)[None, :]
    if operands.shift is not None:
        shift = tl.load(operands.shift + head * DIMS + column)[None, :]
    shadow = tl.load(memory.shadow_of + location // PAGE, mask=location >= 0, other=-1)
    if len(operands.terms) > 0:
        y = tl.zeros([x.shape[0], WIDTH], tl.float32)
        for i in tl.static_range(len(terms)):
            rows = states.to(terms[i].dtype)
            y = tl.dot(rows if i == 0 else tl.where(kept[:, None], 0.0, rows), terms[i], y)
        y *= factors
    if operands.shift is not None:
        y += tl.where(kept[:, None], shift, 0.0)
    tl.store(to[:, None] + column[None, :], y, mask=exists[:, None])

    sound = (location >= 0) & storable((y,), BFLOAT)
    if len(operands.terms) == 0:  # no rotation has spread NaN and Inf over all coordinates
        sound = sound & storable((states.to(tl.float32),), BFLOAT)
    tl.store(memory.faults + location, 1, mask=(location >= 0) & ~sound)
    raw = sixteen_bits((y,), sound, BFLOAT)[0]
    in_new = memory.new + ((WHICH * tokens + token) * kv_heads + head) * DIMS
    tl.store(in_new[:, None] + column[None, :], raw, mask=kept[:, None])
    in_shadow = memory.shadows + (((shadow * kv_heads + head) * 2 + WHICH) * PAGE + location % PAGE) * DIMS
    tl.store(in_shadow[:, None] + column[None, :], raw, mask=(shadow >= 0)[:, None])
