"""What the tensors of a fit must be: their dtype, their shape, and the numbers in them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float16).max  # of means and scales: what 16 bits hold
FARTHEST = 2.0**15  # from 1, of scales of coordinates and of the singular values of a basis
RANGE = f"1/{FARTHEST:,.0f} to {FARTHEST:,.0f}"
NEARLY = 1e-4  # largest |A·Aᵀ − 1| of an orthogonal float32 matrix A; rounding gives 1e-6


class Kind(NamedTuple):
    dtype: torch.dtype
    shape: tuple[
        str, ...
    ]  # after [layers, kv_heads or 1]; "d" is the dimension of keys or values, any other name has any size
    right: Callable[[Tensor], Tensor]  # whether the numbers of a layer are right
    must: str  # the same in words, for the error


def _orthogonal(x: Tensor) -> Tensor:
    x = x.double()
    return ((x @ x.mT - torch.eye(x.shape[-1], dtype=x.dtype)).abs() < NEARLY).all()


def _permutations(x: Tensor) -> Tensor:
    return (x.sort(dim=-1).values == torch.arange(x.shape[-1])).all()


def _widths(x: Tensor) -> Tensor:
    return ((x >= 1) & (x <= 8)).all() & (x[..., 1:] <= x[..., :-1]).all()


def _scales(x: Tensor) -> Tensor:
    return ((x >= 1 / FARTHEST) & (x <= FARTHEST)).all()


def _invertible(x: Tensor) -> Tensor:
    return _scales(torch.linalg.svdvals(x.double()))


def in_range(x: Tensor) -> Tensor:
    return (x.abs() <= LARGEST).all()


KINDS = {
    "rotation": Kind(torch.float32, ("d", "d"), _orthogonal, "hold orthogonal matrices"),
    "clip": Kind(torch.float32, (), lambda x: (x > 0).all() & in_range(x), f"be positive and at most {LARGEST:,.0f}"),
    "folded": Kind(torch.float32, (), lambda x: (x == 1).all(), "be 1"),
    "centroids": Kind(torch.float32, ("centroids", "d"), in_range, f"be at most {LARGEST:,.0f}"),
    "widths": Kind(torch.uint8, ("d",), _widths, "hold widths from 8 bits down to 1, the largest first"),
    "scale": Kind(torch.float32, ("d",), _scales, f"be from {RANGE}"),
    "basis": Kind(torch.bfloat16, ("d", "d"), _invertible, f"hold matrices with singular values from {RANGE}"),
    "order": Kind(torch.int16, ("d",), _permutations, "hold permutations of the coordinates of a head"),
}


def check_shape(name: str, tensor: Tensor, layers: int, kv_heads: int, key_dim: int, value_dim: int) -> None:
    """Refuse a tensor of a type or a shape that no calibration finds. `name` is its name in an artifact
    (RECIPE/key_rotation, …)."""
    side, _, of = name.rpartition("/")[2].partition("_")
    if side not in ("key", "value") or of not in KINDS:
        raise ValueError(f"unknown tensor {name}")
    kind = KINDS[of]
    dims = key_dim if side == "key" else value_dim
    behind = [dims if dim == "d" else dim for dim in kind.shape]
    sizes = zip(tensor.shape[2:], behind, strict=False)
    if (
        tensor.dtype != kind.dtype
        or tensor.shape[:2] not in ((layers, 1), (layers, kv_heads))
        or tensor.ndim != 2 + len(behind)
        or any(size != wanted for size, wanted in sizes if isinstance(wanted, int))
    ):
        shape = ", ".join(map(str, (layers, f"1 or {kv_heads}", *behind)))
        raise ValueError(f"{name} must be {kind.dtype} of shape ({shape}), not {tensor.dtype} of {tuple(tensor.shape)}")


def check_numbers(name: str, tensor: Tensor) -> None:
    """Refuse numbers that no calibration finds, in a tensor of the right shape."""
    kind = KINDS[name.rpartition("/")[2].partition("_")[2]]
    if not all(kind.right(layer) for layer in tensor):
        raise ValueError(f"{name} must {kind.must}")
