"""Transforms of queries and of attention's outputs on a GPU, one small launch each."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from kvfold.ops.launch import launcher
from kvfold.ops.pdl import ALONE, BESIDE, LAST, Overlap, release, wait
from kvfold.ops.sizes import ceil_div, power_of_two
from kvfold.transforms import Transform


class _Tile(NamedTuple):
    """What a CTA computes."""

    vectors: int
    columns: int  # coordinates per vector, at most
    warps: int


FEW = _Tile(16, 64, 4)
MANY = _Tile(64, 128, 4)  # reads matrices less often
MANY_VECTORS = 1 << 14  # from this many vectors on, MANY has CTAs for nearly all SMs


class _Matrices(NamedTuple):
    """factors·Σ terms [kv_heads or 1, d, d]: D of `Rotation` or, if `transposed`, Dᵀ."""

    terms: tuple[Tensor, ...]
    factors: Tensor | None  # of columns, float32[d]; None: 1
    transposed: bool
    precision: str  # of float32 products


def dual(transform: Transform, q: Tensor, dtype: torch.dtype = torch.float32, overlaps: bool = False) -> Tensor:
    """`transform.dual` of queries [tokens, q_heads, d] of any type. Without a rotation, q itself; else in `dtype`.

    With `overlaps`, the kernel runs beside the previous one, which must not write the queries.
    """
    if transform.rotation is None:
        return q
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    matrices = transform.once(_of_queries, q.shape[-1], q.dtype, q.device)
    return _rotate_to(out, q, matrices, None, BESIDE if overlaps else ALONE)


def inverse(transform: Transform, x: Tensor, out: Tensor | None = None, overlaps: bool = False) -> Tensor:
    """`transform.inverse` of attention's outputs float32[tokens, q_heads, d]: float32, or in `out`.

    With `overlaps`, the kernel loads its matrices while the previous one still computes x.
    """
    if transform.rotation is None:
        return transform.inverse(x) if out is None else out.copy_(transform.inverse(x))
    out = torch.empty(x.shape, device=x.device) if out is None else out
    # tf32 has 11 bits, more than bfloat16. For other outputs, tf32x3 adds the products with low bits.
    precision = "tf32" if out.dtype == torch.bfloat16 else "tf32x3"
    matrices = _Matrices((transform.rotation.dense(x.shape[-1], x.device),), None, True, precision)
    return _rotate_to(out, x, matrices, transform.mean, LAST if overlaps else ALONE)


def _of_queries(transform: Transform, dims: int, dtype: torch.dtype, device: torch.device) -> _Matrices:
    """16-bit queries get 16-bit matrices."""
    assert transform.rotation is not None
    if dtype == torch.float32:
        return _Matrices((transform.rotation.dense(dims, device),), None, False, "tf32x3")
    terms = transform.rotation.terms(dims, dtype, device)
    factors = terms.factors.float()
    return _Matrices(loadable(*terms.duals), factors, False, "ieee")


def matrix_and_shift(
    transform: Transform, dims: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Matrix, factors and shift with which (x − mean)·A = factors·x·matrix + shift.

    - matrix: 16-bit [kv_heads or 1, d, d], for 16-bit x; None without a rotation.
    - factors: float32[d]; None without a rotation.
    - shift: float32[kv_heads, d]; None without a mean.
    """
    shift = None if transform.mean is None else -transform.mean
    if transform.rotation is None:
        return None, None, shift
    matrix, _, factors = transform.rotation.terms(dims, dtype, device)
    if shift is not None:
        shift = (shift.double().unsqueeze(-2) @ (factors * matrix.double())).squeeze(-2).float()
    factors = factors.float()
    return loadable(matrix)[0], factors, shift


def loadable(*matrices: Tensor) -> tuple[Tensor, ...]:
    """16-bit matrices as kernels load them. They are in device memory when this returns: kernels read them before they
    wait (see pdl.py)."""
    device = matrices[0].device
    kept = torch.float32 if knobs.runtime.interpret else matrices[0].dtype  # the interpreter cannot multiply bfloat16
    loaded = tuple(matrix.to(kept).contiguous() for matrix in matrices)
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()
    return loaded


def head_stride(matrices: tuple[Tensor, ...]) -> int:
    """The stride from KV head to KV head in matrices [kv_heads or 1, ...]; 0 where all share one."""
    return matrices[0].stride(0) if matrices and len(matrices[0]) > 1 else 0


def _rotate_to(out: Tensor, x: Tensor, matrices: _Matrices, mean: Tensor | None, overlap: Overlap) -> Tensor:
    """x·A (or x·Aᵀ) + mean [kv_heads, d], with matrix and mean of the query head's KV head."""
    tokens, q_heads, dims = x.shape
    first = matrices.terms[0]
    heads = max(len(first), 1 if mean is None else len(mean))
    ratio = q_heads // heads
    tile = MANY if tokens * q_heads >= MANY_VECTORS and dims <= MANY.columns else FEW
    row, column = first.stride()[-2:]
    width = min(tile.columns, power_of_two(dims))
    kernel = launcher(
        _rotate,
        x.device,
        PRECISION=matrices.precision,
        RATIO=ratio,
        DIMS=dims,
        PADDED=power_of_two(dims),
        WIDTH=width,
        ROWS=tile.vectors,
        OVERLAP=overlap,
        num_warps=tile.warps if dims <= 128 else 2 * tile.warps,  # a CTA holds its matrices in registers
        **overlap.launch,
    )
    kernel(
        (ceil_div(tokens * ratio, tile.vectors), heads, ceil_div(dims, width)),
        x,
        matrices.terms,
        matrices.factors,
        mean,
        out,
        tokens,
        *x.stride()[:2],
        head_stride(matrices.terms),
        *((column, row) if matrices.transposed else (row, column)),
    )
    return out


@triton.jit(do_not_specialize=["tokens"])
def _rotate(
    x,
    matrices,
    factors,
    mean,
    out,
    tokens,
    x_stride,
    x_head_stride,
    matrix_stride,
    row_stride,
    column_stride,
    PRECISION: tl.constexpr,
    RATIO: tl.constexpr,
    DIMS: tl.constexpr,
    PADDED: tl.constexpr,  # DIMS, up to a power of two
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    release(OVERLAP, "start")
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
    wait(OVERLAP, "start")
    states = tl.load(x + at, mask=exists & (row < DIMS)[None, :], other=0.0).to(matrices[0].dtype.element_ty)
    rotated = tl.zeros([ROWS, WIDTH], tl.float32)
    for i in tl.static_range(len(matrices)):
        rotated = tl.dot(states, terms[i], rotated, input_precision=PRECISION)
    if factors is not None:
        rotated *= tl.load(factors + column[None, :], mask=inside, other=0.0)
    if mean is not None:
        rotated += tl.load(mean + head * DIMS + column[None, :], mask=inside, other=0.0)
    place = (token[:, None].to(tl.int64) * (tl.num_programs(1) * RATIO) + q_head[:, None]) * DIMS + column[None, :]
    tl.store(out + place, rotated, mask=exists & inside)
    wait(OVERLAP, "end")
