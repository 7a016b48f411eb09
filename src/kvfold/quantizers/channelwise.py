"""Channel-wise affine integers over a page of tokens. Some channels of a page have twice the bits."""

import torch
from torch import Tensor

from kvfold.format.packing import pack, unpack
from kvfold.quantizers.affine import SMALLEST_SCALE


def storable(x: Tensor, bits: int) -> Tensor:
    """[..., d] -> bool[...]: whether vectors are storable. A page can be quantized if all its vectors are."""
    largest = torch.finfo(torch.float16).max * min(1, (2**bits - 1) / 2)  # high − low is at most twice as much
    return (x.float().abs() <= largest).all(dim=-1)  # in float32: 16 bits would round the bound


def quantize(x: Tensor, bits: int, boosted: int) -> tuple[Tensor, Tensor]:
    """float32[pages, tokens, ..., d] -> uint8[pages, tokens, ..., bytes] packed codes, float16[pages, 1, ..., entries].

    The `boosted` channels with the largest mean |x| in a page have 2·bits bits. Their low bits are packed with the
    codes of all other channels, their high bits behind them. Metadata are the scales, the offsets, and the numbers of
    the boosted channels, one byte each. A scale or offset that float16 cannot hold is not finite.
    """
    levels = torch.full_like(x[:, :1], 2**bits - 1)
    # Independent of the batch: sums of 16-bit numbers are exact in float64, and ties go to the lowest channel.
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
    """Packed codes uint8[..., bytes], metadata of their pages float16[..., entries] -> float32[..., dims]."""
    low_bytes = dims * bits // 8
    codes = unpack(packed[..., :low_bytes], bits)
    scale, offset, channels = meta.split([dims, dims, meta.shape[-1] - 2 * dims], dim=-1)
    if boosted:
        high = unpack(packed[..., low_bytes:], bits) << bits
        # clamped, because unwritten metadata may be any bytes
        index = channels.contiguous().view(torch.uint8).long().clamp_(max=dims - 1).expand(high.shape)
        codes = codes.scatter_add(-1, index, high)
    return codes.float().mul_(scale.float()).add_(offset.float())
