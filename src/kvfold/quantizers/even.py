"""Evenly spaced levels: x̂ = scale·(code − middle), with one 8-bit scale per segment of a token.

A code is a number that integer products take as it is. The middle of the grid is the same for all tokens, so it goes
into a constant of the query. Levels are symmetric, so no offset is stored.

A scale is a byte 16·e + m. It stands for (1 + m/16)·2^(e − 8), and for 0 if e = 0. Recipes scale coordinates so
that scales of usual tokens are near 1, the middle of the range: see `usual_step`.
"""

import math

import torch
from torch import Tensor

# The steps that are tried, by bits. Up to 2 bits they are multiples of the root mean square: with 1.5958 and 0.9957 the
# mean squared error on N(0, 1) is least. From 4 bits on they are parts of the largest magnitude: there few numbers lie
# beyond the outermost level, 7.5 or 127.5, and the best step depends on these few. With 8 bits none does, and there is
# room for a scale that is rounded down.
STEPS = {
    1: (1.5957691216,),
    2: (0.9 * 0.9956866860, 0.9956866860, 1.125 * 0.9956866860),
    4: (1 / 8.6, 1 / 7.9),
    8: (1 / 124.5,),
}
BY_LARGEST = 4  # bits from which on steps are parts of the largest magnitude
FINE = 8  # bits from which on codes make up for the rounding of their scale
UNSTORABLE = 255  # the byte of scales that are too large, and of NaN
MANTISSA = 4  # bits of a scale
LEAST = (127 - 8) << MANTISSA  # the bits of 2^-8, without the lower bits of a float32 mantissa
DROPPED = 23 - MANTISSA


def quantize(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """float32[..., n] -> uint8[..., n] codes, uint8[..., 1] scale.

    An 8-bit scale is off by up to 3 %, which is more than codes of 8 bits are. So these are computed again, with the
    scale as stored.
    """
    codes, scale = scaled(x, bits)
    stored = _encode(scale)
    if bits >= FINE:
        codes = _nearest(x, decode(stored), bits)
    return codes.to(torch.uint8), stored


def scaled(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """float32[..., n] -> codes float32[..., n], and scales float32[..., 1] before they are rounded.

    The scale is ‖x‖²/⟨x, code − middle⟩. So ⟨x, x̂⟩ = ‖x‖²: products with x keep their size. The scale with the least
    error, and the one that keeps the length, make them smaller, and with them the largest logits.

    Of the steps that are tried, that is taken whose levels have the largest cosine with x: with this scale, the error
    is ‖x‖²·(1/cosine² − 1).
    """
    middle = (2**bits - 1) / 2
    wide = x.double()  # so that sums do not depend on the shape of the batch
    square = wide.square().sum(dim=-1, keepdim=True)
    size = x.abs().amax(dim=-1, keepdim=True) if bits >= BY_LARGEST else (square / x.shape[-1]).sqrt().float()
    steps = size * torch.tensor(STEPS[bits], dtype=torch.float32, device=x.device)  # [..., steps]
    tried = _nearest(x.unsqueeze(-2), steps.unsqueeze(-1), bits)  # [..., steps, n]
    levels = tried.double() - middle
    products = (wide.unsqueeze(-2) * levels).sum(dim=-1)
    best = (products.square() / levels.square().sum(dim=-1)).argmax(dim=-1, keepdim=True)
    codes = tried.take_along_dim(best.unsqueeze(-1), dim=-2).squeeze(-2)
    product = products.gather(-1, best)
    scale = torch.where(square > 0, (square / product).float(), square.float())
    return codes, scale


def _nearest(x: Tensor, step: Tensor, bits: int) -> Tensor:
    """The codes of the nearest levels, for a step [..., 1]."""
    codes = x / step.clamp_min(torch.finfo(torch.float32).tiny) + (2**bits - 1) / 2
    return codes.round_().clamp_(0, 2**bits - 1)


def dequantize(codes: Tensor, bits: int, scale: Tensor) -> Tensor:
    return codes.float().sub_((2**bits - 1) / 2).mul_(decode(scale))


def usual_step(bits: int) -> float:
    """The step for a vector whose root mean square is 1, more or less: its largest magnitude is about 3."""
    return STEPS[bits][0] * (3 if bits >= BY_LARGEST else 1)


def decode(scale: Tensor) -> Tensor:
    """uint8 -> float32."""
    whole = (scale.int() + LEAST) << DROPPED
    return whole.view(torch.float32).masked_fill(scale < 1 << MANTISSA, 0)


def _encode(scale: Tensor) -> Tensor:
    """float32 that is not negative -> uint8, the nearest scale. Ties go to the even byte."""
    bits = scale.contiguous().view(torch.int32)
    nearest = ((bits + (1 << DROPPED - 1) - 1 + (bits >> DROPPED & 1)) >> DROPPED) - LEAST
    stored = torch.where(nearest < 1 << MANTISSA, 0, nearest.clamp_max(UNSTORABLE))
    return torch.where(scale < math.inf, stored, UNSTORABLE).to(torch.uint8)
