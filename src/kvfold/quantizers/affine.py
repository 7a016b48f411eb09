"""Token-wise affine integers: x̂ = scale·code + offset, with a 16-bit scale and offset per group."""

import torch
from torch import Tensor

SMALLEST_SCALE = 2.0**-24  # the smallest positive float16
TINY = torch.finfo(torch.float32).tiny


def quantize(x: Tensor, bits: int, clip: float | None = None) -> tuple[Tensor, Tensor]:
    """float32[..., n] -> uint8[..., n] codes, float16[..., 2] (scale, offset).

    The range is that of x. With `clip`, it ends at `clip` times √(Σx⁴/Σx²) on both sides: at 1.73 times the root mean
    square if coordinates are normal and `clip` is 1, at 1.34 times if they are uniform, at the largest magnitude if all
    others are small.

    Codes are computed with the scale and offset as stored, so that 16-bit metadata costs range, not bias. A constant
    vector has scale 0 and decodes to its offset. A scale or offset that float16 cannot hold is not finite.
    """
    levels = 2**bits - 1
    low, high = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
    if clip is not None:
        squares = x.double().square()  # sums of these are the same in every batch
        square, fourth = (part.sum(dim=-1, keepdim=True) for part in (squares, squares.square()))
        limit = clip * (fourth / square.clamp_min(TINY)).sqrt().float()
        low = torch.where(low < -limit, -limit, low)  # unlike maximum, this does not change the sign of zeros
        high = torch.where(high > limit, limit, high)
    meta = torch.cat(((high - low) / levels, low), dim=-1).half()
    scale, offset = meta.float().chunk(2, -1)
    codes = (x - offset).div_(scale.clamp_min(SMALLEST_SCALE)).round_().clamp_(0, levels)
    return codes.to(torch.uint8), meta


def dequantize(codes: Tensor, meta: Tensor) -> Tensor:
    entries = meta.float()
    if codes.device.type == "cpu":  # one pass in PyTorch, for rows that end in their scale and offset
        rows = torch.cat((codes, entries.view(torch.uint8)), dim=-1)
        return torch.ops.quantized.embedding_bag_byte_unpack(rows)
    scale, offset = entries.chunk(2, -1)
    return codes.float().mul_(scale).add_(offset)
