"""Norm and direction: x̂ = norm·level[code], with Lloyd–Max levels for normal coordinates (TurboQuant-MSE)."""

import torch
from torch import Tensor

from kvfold.quantizers import lloyd_max


def quantize(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """float32[..., n] -> uint8[..., n] codes, float16[..., 1] norm.

    Coordinates are scaled to a mean square of 1 and rounded to the nearest level. The stored norm is ‖x‖/‖level[code]‖,
    so that decoding keeps the length of x. A norm that float16 cannot hold is not finite.
    """
    norm = _norm(x)
    codes = lloyd_max.quantize(x * (x.shape[-1] ** 0.5 / norm.clamp_min(torch.finfo(torch.float32).tiny)), bits)
    return codes, (norm / _norm(lloyd_max.dequantize(codes, bits))).half()


def dequantize(codes: Tensor, bits: int, norm: Tensor) -> Tensor:
    return lloyd_max.dequantize(codes, bits).mul_(norm.float())


def _norm(x: Tensor) -> Tensor:
    """In float64, so that it does not depend on the shape of the batch."""
    return x.double().square().sum(dim=-1, keepdim=True).sqrt().float()
