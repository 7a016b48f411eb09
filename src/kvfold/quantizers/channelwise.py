"""Channel-wise affine integers over a page of tokens, some channels of each page with twice the bits."""

import torch
from torch import Tensor

from kvfold.packing import pack, unpack
from kvfold.quantizers.affine import SMALLEST_SCALE


def storable(x: Tensor, bits: int) -> Tensor:
    """[..., d] -> bool[...]: vectors with which a page can be quantized, whatever its other tokens are."""
    largest = torch.finfo(torch.float16).max * min(1, (2**bits - 1) / 2)  # a scale spans two of them
    return (x.float().abs() <= largest).all(dim=-1)  # 16 bits would round the bound


def quantize(x: Tensor, bits: int, boosted: int) -> tuple[Tensor, Tensor]:
    """float32[pages, tokens, ..., d] -> uint8[pages, tokens, ..., bytes] packed codes, float16[pages, 1, ..., entries].

    The `boosted` channels with the largest mean |x| of a page have 2·bits bits: the low ones lie with those of all
    other channels, the high ones behind them. Metadata are the scales, the offsets, and the boosted channels as bytes.
    Scales or offsets are not finite where 16 bits cannot hold them.
    """
    levels = torch.full_like(x[:, :1], 2**bits - 1)
    # sums of 16-bit numbers are exact in float64 and ties go to the lowest channel, whatever the batch
    strength = x.abs().sum(dim=1, keepdim=True, dtype=torch.float64)
    channels = strength.sort(dim=-1, descending=True, stable=True).indices[..., :boosted].sort(dim=-1).values
    levels.scatter_(-1, channels, 2 ** (2 * bits) - 1)
    low, high = x.amin(dim=1, keepdim=True), x.amax(dim=1, keepdim=True)
    scale, offset = ((high - low) / levels).half(), low.half()
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
