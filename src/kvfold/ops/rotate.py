"""Transforms of queries and of attention's outputs on a GPU, each in one small launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvfold.transforms import Transform

ROWS = tl.constexpr(16)  # vectors of a program
COLUMNS = tl.constexpr(64)  # coordinates of them that it computes, at most


def dual(transform: Transform, q: Tensor, dtype: torch.dtype = torch.float32, early: bool = False) -> Tensor:
    """Queries [tokens, q_heads, d] of any type -> `transform.dual` of them: of `dtype`, or as they are if not rotated.

    With `early`, the next kernel may begin before this one ends.
    """
    if transform.rotation is None:
        return q
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    return _rotate_to(out, q, transform.rotation.dense(q.shape[-1], q.device), transpose=False, early=early)


def inverse(transform: Transform, x: Tensor, out: Tensor | None = None, late: bool = False) -> Tensor:
    """Outputs float32[tokens, q_heads, d] -> `transform.inverse` of them, float32 or in `out`.

    With `late`, it is launched before the kernel that computes the outputs ends, and waits for that.
    """
    if transform.rotation is None:
        return transform.inverse(x) if out is None else out.copy_(transform.inverse(x))
    out = torch.empty(x.shape, device=x.device) if out is None else out
    matrices = transform.rotation.dense(x.shape[-1], x.device)
    return _rotate_to(out, x, matrices, transpose=True, mean=transform.mean, late=late)


def _rotate_to(
    out: Tensor,
    x: Tensor,
    matrices: Tensor,
    transpose: bool,
    mean: Tensor | None = None,
    early: bool = False,
    late: bool = False,
) -> Tensor:
    """x·A (or x·Aᵀ) + mean, with the matrix [kv_heads or 1, d, d] and mean [kv_heads, d] of each head's KV head."""
    tokens, q_heads, dims = x.shape
    heads = max(len(matrices), 1 if mean is None else len(mean))
    ratio = q_heads // heads
    row, column = matrices.stride()[-2:]
    width = min(COLUMNS.value, triton.next_power_of_2(dims))
    _rotate[(triton.cdiv(tokens * ratio, ROWS.value), heads, triton.cdiv(dims, width))](
        x,
        matrices,
        mean,
        out,
        tokens,
        *x.stride()[:2],
        matrices.stride(0) if len(matrices) > 1 else 0,
        *((column, row) if transpose else (row, column)),
        RATIO=ratio,
        DIMS=dims,
        PADDED=triton.next_power_of_2(dims),
        WIDTH=width,
        EARLY=early,
        LATE=late,
        num_warps=4,
        **({"launch_pdl": True} if late else {}),
    )
    return out


@triton.jit
def _rotate(
    x,
    matrices,
    mean,
    out,
    tokens,
    x_stride,
    x_head_stride,
    matrix_stride,
    row_stride,
    column_stride,
    RATIO: tl.constexpr,
    DIMS: tl.constexpr,
    PADDED: tl.constexpr,  # dims, up to a power of two
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
    LATE: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
    head = tl.program_id(1)
    vector = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, q_head = vector // RATIO, head * RATIO + vector % RATIO
    exists = (token < tokens)[:, None]
    row = tl.arange(0, PADDED)
    column = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    inside = (column < DIMS)[None, :]
    at = token[:, None].to(tl.int64) * x_stride + q_head[:, None] * x_head_stride + row[None, :]
    entry = matrices + head * matrix_stride + row[:, None] * row_stride + column[None, :] * column_stride
    matrix = tl.load(entry, mask=(row < DIMS)[:, None] & inside, other=0.0)
    if LATE:
        gdc_wait()
    states = tl.load(x + at, mask=exists & (row < DIMS)[None, :], other=0.0).to(tl.float32)
    rotated = tl.dot(states, matrix, input_precision="tf32x3")  # as exact as float32
    if mean is not None:
        rotated += tl.load(mean + head * DIMS + column[None, :], mask=inside, other=0.0)
    place = (token[:, None].to(tl.int64) * (tl.num_programs(1) * RATIO) + q_head[:, None]) * DIMS + column[None, :]
    tl.store(out + place, rotated, mask=exists & inside)
