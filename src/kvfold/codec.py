"""Codec = transform + decode rules + slot layout. Plain PyTorch: the definition that kernels are tested against."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvfold.layout import SlotLayout
from kvfold.packing import pack, unpack
from kvfold.quantizers import affine
from kvfold.transforms import Transform


@dataclass(frozen=True)
class Codec:
    """Vectors [..., kv_heads, d] to slots uint8[..., kv_heads, slot_bytes] and back.

    `encode` and `decode` are the whole way; `quantize` and `dequantize` are its inner half, between transformed
    coordinates and the two byte arrays of a slot (codes, float16 metadata), which a page keeps apart.
    """

    layout: SlotLayout
    transform: Transform = field(default_factory=Transform)
    wide: torch.dtype = torch.bfloat16  # the 16-bit type of raw segments

    def encode(self, x: Tensor) -> Tensor:
        codes, meta = self.quantize(self.transform.forward(x))
        return torch.cat((codes, meta.view(torch.uint8)), dim=-1)

    def decode(self, slots: Tensor) -> Tensor:
        codes, meta = slots.split([self.layout.code_bytes, self.layout.meta_bytes], dim=-1)
        entries = meta.contiguous().view(torch.float16) if self.layout.meta_bytes else meta.half()
        return self.transform.inverse(self.dequantize(codes, entries))

    def quantize(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Transformed float32[..., d] -> uint8[..., code_bytes] codes, float16[..., entries] metadata."""
        if y.shape[-1] != self.layout.dims:
            raise ValueError(f"vectors of {y.shape[-1]} dims do not fit a slot of {self.layout.dims}")
        codes, meta = [], []
        for segment in self.layout.segments:
            part = y if segment.dims == y.shape[-1] else y[..., segment.start : segment.stop]
            if segment.rule == "raw":
                codes.append(to_wide(part, self.wide).view(torch.uint8))
            else:
                part_codes, part_meta = affine.quantize(part, segment.bits)
                codes.append(pack(part_codes, segment.bits))
                meta.append(part_meta)
        return _joined(codes), _joined(meta) if meta else y.new_empty((*y.shape[:-1], 0), dtype=torch.float16)

    def dequantize(self, codes: Tensor, meta: Tensor) -> Tensor:
        parts = []
        for segment, part_codes, part_meta in self.layout.split(codes, meta):
            if segment.rule == "raw":
                parts.append(part_codes.contiguous().view(self.wide).float())
            else:
                parts.append(affine.dequantize(unpack(part_codes, segment.bits), part_meta))
        return _joined(parts)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def to_wide(y: Tensor, wide: torch.dtype) -> Tensor:
    """Transformed vectors in the 16-bit type; what it cannot hold is refused."""
    narrowed = y.to(wide)
    if not torch.isfinite(narrowed).all():
        raise ValueError(f"cannot store NaN, Inf or numbers beyond the range of {wide}")
    return narrowed.contiguous()
