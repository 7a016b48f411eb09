"""Channel-wise affine integers over a page of tokens, some channels of each page with twice the bits."""

import torch
from torch import Tensor

from kvfold.packing import pack, unpack
from kvfold.quantizers.affine import SMALLEST_SCALE


def check(x: Tensor, bits: int) -> None:
    """Refuse numbers x with which a page might not be quantized, whatever its other tokens are."""
    largest = torch.finfo(torch.float16).max * min(1, (2**bits - 1) / 2)  # a scale spans two of them
    if not (x.float().abs() <= largest).all():  # 16 bits would round the bound
        raise ValueError(f"cannot quantize NaN, Inf or numbers beyond ±{largest:g}, the range of 16-bit metadata")


def quantize(x: Tensor, bits: int, boosted: int) -> tuple[Tensor, Tensor]:
    """float32[pages, tokens, ..., d] -> uint8[pages, tokens, ..., bytes] packed codes, float16[pages, 1, ..., entries].

    The `boosted` channels with the largest mean |x| of a page have 2·bits bits: the low ones lie with those of all
    other channels, the high ones behind them. Metadata are the scales, the offsets, and the boosted channels as bytes.
    """
    levels = torch.full_like(x[:, :1], 2**bits - 1)
    # sums of 16-bit numbers are exact in float64 and ties go to the lowest channel, whatever the batch
    strength = x.abs().sum(dim=1, keepdim=True, dtype=torch.float64)
    channels = strength.sort(dim=-1, descending=True, stable=True).indices[..., :boosted].sort(dim=-1).values
    levels.scatter_(-1, channels, 2 ** (2 * bits) - 1)
    low, high = x.amin(dim=1, keepdim=True), x.amax(dim=1, keepdim=True)
    scale, offset = ((high - low) / levels).half(), low.half()
    if not (torch.isfinite(scale) & torch.isfinite(offset)).all():
        raise ValueError("cannot quantize NaN, Inf or numbers beyond ±65504, the range of 16-bit metadata")
    codes = ((x - offset.float()) / scale.float().clamp_min(SMALLEST_SCALE)).round_().clamp_(min=0)
    codes = torch.minimum(codes, levels).to(torch.uint8)
    packed = [pack(codes & (2**bits - 1), bits)]
    meta = [scale, offset]
    if boosted:
        packed.append(pack(codes.gather(-1, channels.expand(*codes.shape[:-1], boosted)) >> bits, bits))
        meta.append(channels.to(torch.uint8).view(torch.float16))
    return torch.cat(packed, dim=-1), torch.cat(meta, dim=-1)


def dequantize(packed: Tensor, meta: Tensor, dims: int, bits: int, boosted: int) -> Tensor:
    """Packed codes uint8[..., bytes] and metadata float16[..., entries] of their pages -> float32[..., dims]."""
    low_bytes = dims * bits // 8
    codes = unpack(packed[..., :low_bytes], bits)
    scale, offset, channels = meta.split([dims, dims, meta.shape[-1] - 2 * dims], dim=-1)
    if boosted:
        high = unpack(packed[..., low_bytes:], bits) << bits
        index = channels.contiguous().view(torch.uint8).long().clamp_(max=dims - 1).expand(high.shape)  # unwritten: any
        codes = codes.scatter_add(-1, index, high)
    return codes.float().mul_(scale.float()).add_(offset.float())
