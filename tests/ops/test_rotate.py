"""Rotations of queries and outputs on a GPU, or in Triton's interpreter, against float64."""

import pytest
import torch

from kvfold.ops import rotate
from kvfold.transforms import Hadamard, Matrix, Transform

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KV_HEADS, Q_HEADS = 2, 6


def rotation(name: str, dims: int):
    if name == "hadamard":
        return Hadamard(dims & -dims)
    heads = KV_HEADS if name == "per head" else 1
    generator = torch.Generator().manual_seed(dims)
    matrices = torch.linalg.qr(torch.randn(heads, dims, dims, generator=generator))[0]
    scales = torch.linspace(0.25, 4, dims)[torch.randperm(dims, generator=generator)]
    return Matrix((matrices * scales if name == "scaled" else matrices).to(DEVICE))


def by_head(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """The definition: every head times the matrix of its KV head, in float64."""
    each = [matrices[head * len(matrices) // Q_HEADS].double() for head in range(Q_HEADS)]
    return torch.stack([x[:, head].double() @ matrix for head, matrix in enumerate(each)], dim=1)


def drawn(tokens: int, dims: int, dtype: torch.dtype) -> torch.Tensor:
    wider = torch.randn(tokens, 2 * Q_HEADS, dims, generator=torch.Generator().manual_seed(tokens))
    return wider.to(DEVICE, dtype)[:, 1 : Q_HEADS + 1]  # as of a fused projection: heads lie among others


@pytest.mark.pairs
@pytest.mark.parametrize(("tokens", "many"), [(1, 1 << 14), (37, 1 << 14), (37, 1)])
@pytest.mark.parametrize(("name", "dims"), [("hadamard", 96), ("scaled", 128), ("one", 64), ("per head", 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries(tokens, many, name, dims, dtype, monkeypatch):
    monkeypatch.setattr(rotate, "MANY_VECTORS", many)
    transform = Transform(None, rotation(name, dims))
    q = drawn(tokens, dims, dtype)
    expected = by_head(q, transform.rotation.dense(dims, q.device))
    torch.testing.assert_close(rotate.dual(transform, q).double(), expected, rtol=0, atol=1e-4)
    half = rotate.dual(transform, q, torch.float16)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.double(), expected, rtol=2**-11, atol=1e-4)


@pytest.mark.pairs
@pytest.mark.parametrize(("tokens", "many"), [(1, 1 << 14), (37, 1 << 14), (37, 1)])
@pytest.mark.parametrize(("name", "dims"), [("hadamard", 128), ("permuted", 64), ("one", 80), ("per head", 128)])
@pytest.mark.parametrize("centred", [False, True])
def test_outputs(tokens, many, name, dims, centred, monkeypatch):
    monkeypatch.setattr(rotate, "MANY_VECTORS", many)
    mean = torch.randn(KV_HEADS, dims, generator=torch.Generator().manual_seed(0)).to(DEVICE) if centred else None
    transform = Transform(mean, rotation(name, dims))
    x = drawn(tokens, dims, torch.float32)
    expected = by_head(x, transform.rotation.dense(dims, x.device).mT)
    if mean is not None:
        expected += mean.double().repeat_interleave(Q_HEADS // KV_HEADS, dim=0)
    torch.testing.assert_close(rotate.inverse(transform, x).double(), expected, rtol=0, atol=1e-5)
    out = torch.empty(x.shape, dtype=torch.float16, device=DEVICE)
    assert rotate.inverse(transform, x, out) is out
    torch.testing.assert_close(out.double(), expected, rtol=2**-11, atol=2e-3)
