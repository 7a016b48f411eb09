"""Transforms of queries and of attention's outputs on a GPU, each in one small launch."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvfold.ops.sizes import ceil_div, power_of_two
from kvfold.transforms import Transform


class _Blocks(NamedTuple):
    """What a program computes."""

    vectors: int
    columns: int  # coordinates of them, at most
    warps: int


FEW = _Blocks(16, 64, 4)
MANY = _Blocks(64, 128, 4)
MANY_VECTORS = 1 << 14  # from which on larger blocks, which read matrices less often, leave little of a GPU idle


class _Matrices(NamedTuple):
    """A, or Aᵀ, as the sum of `terms` [kv_heads or 1, d, d] times `factor`."""

    terms: tuple[Tensor, ...]
    factor: float
    transposed: bool
    precision: str  # of a product of float32


def dual(transform: Transform, q: Tensor, dtype: torch.dtype = torch.float32, beside: bool = False) -> Tensor:
    """Queries [tokens, q_heads, d] of any type -> `transform.dual` of them: of `dtype`, or as they are if not rotated.

    With `beside`, which asks for queries that are older than the kernel before it, it runs beside that one and does not
    end before that; and the next kernel may begin beside it.
    """
    if transform.rotation is None:
        return q
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    matrices = transform.once(_of_queries, q.shape[-1], q.dtype, q.device)
    return _rotate_to(out, q, matrices, beside=beside)


def inverse(transform: Transform, x: Tensor, out: Tensor | None = None, late: bool = False) -> Tensor:
    """Outputs float32[tokens, q_heads, d] -> `transform.inverse` of them, float32 or in `out`.

    With `late`, it is launched before the kernel that computes the outputs ends, and waits for that.
    """
    if transform.rotation is None:
        return transform.inverse(x) if out is None else out.copy_(transform.inverse(x))
    out = torch.empty(x.shape, device=x.device) if out is None else out
    # 11 bits of each factor are more than bfloat16 keeps; three products give what they leave out of other outputs
    precision = "tf32" if out.dtype == torch.bfloat16 else "tf32x3"
    matrices = _Matrices((transform.rotation.dense(x.shape[-1], x.device),), 1.0, True, precision)
    return _rotate_to(out, x, matrices, transform.mean, late=late)


def _of_queries(transform: Transform, dims: int, dtype: torch.dtype, device: torch.device) -> _Matrices:
    """For queries of 16 bits, matrices of as many."""
    assert transform.rotation is not None
    if dtype == torch.float32:
        return _Matrices((transform.rotation.dense(dims, device),), 1.0, False, "tf32x3")
    terms, factor, _ = terms_and_shift(transform, dims, dtype, device)
    return _Matrices(terms, factor, False, "ieee")


def terms_and_shift(
    transform: Transform, dims: int, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[Tensor, ...], float, Tensor | None]:
    """(x − mean)·A, for 16-bit x, as factor·Σ x·term + shift: matrices of as many bits [kv_heads or 1, d, d], none
    where nothing is rotated, and float32[kv_heads, d], None where nothing is centred. All is there when it returns:
    kernels may read it before they wait for those before them."""
    terms: tuple[Tensor, ...] = ()
    factor, shift = 1.0, None if transform.mean is None else -transform.mean
    if transform.rotation is not None:
        terms, factor = transform.rotation.terms(dims, dtype, device)
        if shift is not None:  # by the terms too, so that what they leave out of A meets x − mean and not x
            matrix = factor * torch.stack(terms).double().sum(dim=0)
            shift = (shift.double().unsqueeze(-2) @ matrix).squeeze(-2).float()
        kept = torch.float32 if device.type == "cpu" else dtype  # Triton's interpreter cannot multiply bfloat16
        terms = tuple(term.to(kept).contiguous() for term in terms)
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()
    return terms, factor, shift


def head_stride(matrices: tuple[Tensor, ...]) -> int:
    """From the matrices [kv_heads or 1, ...] of one KV head to those of the next."""
    return matrices[0].stride(0) if matrices and len(matrices[0]) > 1 else 0


def _rotate_to(
    out: Tensor, x: Tensor, matrices: _Matrices, mean: Tensor | None = None, late: bool = False, beside: bool = False
) -> Tensor:
    """x·A (or x·Aᵀ) + mean, with the matrix and mean [kv_heads, d] of each head's KV head."""
    tokens, q_heads, dims = x.shape
    first = matrices.terms[0]
    heads = max(len(first), 1 if mean is None else len(mean))
    ratio = q_heads // heads
    blocks = MANY if tokens * q_heads >= MANY_VECTORS and dims <= MANY.columns else FEW
    row, column = first.stride()[-2:]
    width = min(blocks.columns, power_of_two(dims))
    _rotate[(ceil_div(tokens * ratio, blocks.vectors), heads, ceil_div(dims, width))](
        x,
        matrices.terms,
        mean,
        out,
        tokens,
        *x.stride()[:2],
        head_stride(matrices.terms),
        *((column, row) if matrices.transposed else (row, column)),
        FACTOR=matrices.factor,
        PRECISION=matrices.precision,
        RATIO=ratio,
        DIMS=dims,
        PADDED=power_of_two(dims),
        WIDTH=width,
        ROWS=blocks.vectors,
        LATE=late,
        BESIDE=beside,
        num_warps=blocks.warps,
        **({"launch_pdl": True} if late or beside else {}),
    )
    return out


@triton.jit(do_not_specialize=["tokens"])
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
    FACTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    RATIO: tl.constexpr,
    DIMS: tl.constexpr,
    PADDED: tl.constexpr,  # dims, up to a power of two
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    LATE: tl.constexpr,
    BESIDE: tl.constexpr,
):
    if BESIDE:
        gdc_launch_dependents()
    head = tl.program_id(1)
    vector = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, q_head = vector // RATIO, head * RATIO + vector % RATIO
    exists = (token < tokens)[:, None]
    row = tl.arange(0, PADDED)
    column = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    inside = (column < DIMS)[None, :]
    entry = head * matrix_stride + row[:, None] * row_stride + column[None, :] * column_stride
    at = token[:, None].to(tl.int64) * x_stride + q_head[:, None] * x_head_stride + row[None, :]
    terms = ()
    for i in tl.static_range(len(matrices)):
        terms += (tl.load(matrices[i] + entry, mask=(row < DIMS)[:, None] & inside, other=0.0),)
    if LATE:
        gdc_wait()
    states = tl.load(x + at, mask=exists & (row < DIMS)[None, :], other=0.0).to(matrices[0].dtype.element_ty)
    rotated = tl.zeros([ROWS, WIDTH], tl.float32)
    for i in tl.static_range(len(matrices)):
        rotated = tl.dot(states, terms[i], rotated, input_precision=PRECISION)
    rotated *= FACTOR
    if mean is not None:
        rotated += tl.load(mean + head * DIMS + column[None, :], mask=inside, other=0.0)
    place = (token[:, None].to(tl.int64) * (tl.num_programs(1) * RATIO) + q_head[:, None]) * DIMS + column[None, :]
    tl.store(out + place, rotated, mask=exists & inside)
    if BESIDE:
        gdc_wait()
