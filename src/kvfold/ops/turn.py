"""What a step with one token of each sequence begins with: its queries, keys and values, transformed in one launch.

A program takes a block of rows of one KV head, and some of their coordinates. Queries are rotated as keys are, so the
rows of a token are its key and the queries that read it; or its value.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvfold.ops.pages import LayerPages
from kvfold.ops.rotate import head_stride, terms_and_shift
from kvfold.ops.sizes import ceil_div
from kvfold.ops.store.triton import Operands, below, check, sixteen_bits
from kvfold.transforms import Transform

ROWS = 16  # as many as tensor cores take
WIDTH = 64  # coordinates


class Turned(NamedTuple):
    q: Tensor  # float32[sequences, q_heads, d]
    kv: Tensor  # keys and values, float32[2, sequences, kv_heads, d]
    new: tuple[Tensor, Tensor]  # these in 16 bits


class _Memory(NamedTuple):
    shadow_of: Tensor  # see pages.py
    shadows: Tensor
    new: Tensor
    faults: Tensor


def turn(pages: LayerPages, q: Tensor, k: Tensor, v: Tensor, overlaps: bool = False) -> Turned:
    """Transform q, k and v [sequences, heads, d], of 16 bits, queries of the type of keys, and write copies of keys
    and values to shadows. With `overlaps`, it is launched before the kernel before it ends, and waits for that; and the
    next may begin beside it.

    Keys and values that 16 bits cannot hold are zero in the copies, and their tokens are marked in `pages.faults`, as
    `naive.store` says. A program does not see the numbers of another. So where they are finite, only the WIDTH
    coordinates around a number beyond the range are zero.
    """
    check(pages, k, v)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    (sequences, q_heads, dims), kv_heads, device = q.shape, k.shape[1], q.device
    turned, kv = torch.empty(q.shape, device=device), torch.empty(2, *k.shape, device=device)
    new = torch.empty(2, *k.shape, dtype=pages.shadows.dtype, device=device)
    key, KEY_FACTOR = pages.key.transform.once(_operands, dims, k.dtype, device)
    value, VALUE_FACTOR = pages.value.transform.once(_operands, dims, v.dtype, device)
    step, bits = pages.step, torch.int16
    memory = _Memory(step.shadow_of, pages.shadows.view(bits), new.view(bits), pages.faults)
    ratio, width = q_heads // kv_heads, min(WIDTH, dims)
    _turn[(ceil_div(sequences * (1 + ratio), ROWS), kv_heads, 2 * (dims // width))](
        q, k, v, key, value, turned, kv, step.locations, memory, sequences,
        *(stride for x in (q, k, v) for stride in x.stride()[:2]),
        KEY_FACTOR=KEY_FACTOR, VALUE_FACTOR=VALUE_FACTOR, RATIO=ratio, DIMS=dims, WIDTH=width, ROWS=ROWS,
        PAGE=pages.layout.page_size, BFLOAT=new.dtype == torch.bfloat16, OVERLAPS=overlaps,
        maxnreg=128,  # of a thread, which takes fewer if it may, and then loads matrices one part after the other
        **({"launch_pdl": True} if overlaps else {}),
    )  # fmt: skip
    return Turned(turned, kv, (new[0], new[1]))


def _operands(transform: Transform, dims: int, dtype: torch.dtype, device: torch.device) -> tuple[Operands, float]:
    terms, factor, shift = terms_and_shift(transform, dims, dtype, device)
    return Operands(terms, head_stride(terms), shift), factor


@triton.jit(do_not_specialize=["sequences"], do_not_specialize_on_alignment=["slots"])
def _turn(
    q, k, v, key, value, turned, kv, slots, memory, sequences,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    KEY_FACTOR: tl.constexpr, VALUE_FACTOR: tl.constexpr, RATIO: tl.constexpr, DIMS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, PAGE: tl.constexpr, BFLOAT: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = DIMS // WIDTH
    if (tl.program_id(2) >= COLUMNS) & (tl.program_id(0) * ROWS >= sequences):  # values have fewer rows
        return
    head, kv_heads = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    if tl.program_id(2) < COLUMNS:
        sequence, member = row // (1 + RATIO), row % (1 + RATIO)
        is_key, q_head = member == 0, head * RATIO + member - 1
        key_at, query_at = sequence * k_stride + head * k_head_stride, sequence * q_stride + q_head * q_head_stride
        to_key, to_query = sequence * kv_heads + head, sequence * kv_heads * RATIO + q_head
        _turn_side(
            tl.where(is_key, k + key_at, q + query_at), tl.where(is_key, kv + to_key * DIMS, turned + to_query * DIMS),
            sequence, is_key, key, slots, memory, sequences, 0, KEY_FACTOR, DIMS, WIDTH, PAGE, BFLOAT, OVERLAPS,
        )  # fmt: skip
    else:
        to_value = kv + ((sequences + row) * kv_heads + head) * DIMS
        _turn_side(
            v + row * v_stride + head * v_head_stride, to_value, row, row >= 0, value, slots,
            memory, sequences, 1, VALUE_FACTOR, DIMS, WIDTH, PAGE, BFLOAT, OVERLAPS,
        )  # fmt: skip


@triton.jit
def _turn_side(
    x, to, sequence, kept, operands, slots, memory, sequences, WHICH: tl.constexpr, FACTOR: tl.constexpr,
    DIMS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BFLOAT: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Rows at `x` go to `to`; those of keys or values, which are `kept`, to copies too."""
    head, kv_heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    coordinate = tl.arange(0, DIMS)
    column = tl.program_id(2) % (DIMS // WIDTH) * WIDTH + tl.arange(0, WIDTH)
    exists = sequence < sequences
    kept = kept & exists
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    # all that is loaded, at once: a launch lasts little longer than it waits for that
    slot = tl.load(slots + sequence, mask=kept, other=-1)
    terms = ()
    for i in tl.static_range(len(operands.matrices)):
        entry = head * operands.head + coordinate[:, None] * DIMS + column[None, :]
        terms += (tl.load(operands.matrices[i] + entry),)
    states = tl.load(x[:, None] + coordinate[None, :], mask=exists[:, None], other=0.0)
    if len(operands.matrices) == 0:
        y = tl.load(x[:, None] + column[None, :], mask=exists[:, None], other=0.0).to(tl.float32)
    if operands.shift is not None:
        shift = tl.load(operands.shift + head * DIMS + column)[None, :]
    shadow = tl.load(memory.shadow_of + slot // PAGE, mask=slot >= 0, other=-1)
    if len(operands.matrices) > 0:
        y = tl.zeros([x.shape[0], WIDTH], tl.float32)
        for i in tl.static_range(len(terms)):
            y = tl.dot(states.to(terms[i].dtype), terms[i], y)
        y *= FACTOR
    if operands.shift is not None:
        y += tl.where(kept[:, None], shift, 0.0)
    tl.store(to[:, None] + column[None, :], y, mask=exists[:, None])

    sound = (slot >= 0) & below((y,), BFLOAT)
    if len(operands.matrices) == 0:  # a rotation spreads NaN and Inf over all coordinates
        sound = sound & below((states.to(tl.float32),), BFLOAT)
    tl.store(memory.faults + slot, 1, mask=(slot >= 0) & ~sound)
    copy = sixteen_bits((y,), sound, BFLOAT)[0]
    in_new = memory.new + ((WHICH * sequences + sequence) * kv_heads + head) * DIMS
    tl.store(in_new[:, None] + column[None, :], copy, mask=kept[:, None])
    in_shadow = memory.shadows + (((shadow * kv_heads + head) * 2 + WHICH) * PAGE + slot % PAGE) * DIMS
    tl.store(in_shadow[:, None] + column[None, :], copy, mask=(shadow >= 0)[:, None])
