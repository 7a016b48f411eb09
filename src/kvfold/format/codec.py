"""Codec = transform + decode rules + slot layout. Plain PyTorch: the definition that kernels are tested against."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvfold.format.layout import SlotLayout
from kvfold.format.packing import pack, unpack
from kvfold.quantizers import affine, channelwise, codebook, even, kmeans
from kvfold.transforms import Transform

UNSTORABLE = "cannot store NaN, Inf or numbers beyond the range of 16-bit floats"


def sixteen_bit(dtype: torch.dtype) -> torch.dtype:
    """The 16-bit type for raw vectors of a model with this dtype."""
    return dtype if dtype in (torch.bfloat16, torch.float16) else torch.bfloat16


@dataclass(frozen=True)
class Codec:
    """Vectors [..., kv_heads, d] to slots uint8[..., kv_heads, slot_bytes] and back.

    `encode` and `decode` go the whole way. `quantize` and `dequantize` are its inner half: from transformed coordinates
    to codes and metadata, and back. Metadata are float16, or uint8 where levels are evenly spaced. A page keeps codes
    and metadata apart.
    """

    layout: SlotLayout
    transform: Transform = field(default_factory=Transform)
    raw_dtype: torch.dtype = torch.bfloat16  # the 16-bit type of raw segments
    clip: float | None = None  # where affine segments are clipped: see quantizers/affine.py
    centroids: Tensor | None = None  # float32[kv_heads, centroids, d], in transformed coordinates
    first: Tensor | None = None  # float32[kv_heads, d], as well: what vectors at position 0 are near

    def to(self, device: torch.device | str) -> "Codec":
        centroids, first = (None if x is None else x.to(device) for x in (self.centroids, self.first))
        return replace(self, transform=self.transform.to(device), centroids=centroids, first=first)

    def without_first(self, y: Tensor, position: Tensor) -> Tensor:
        """What is quantized of transformed vectors [tokens, kv_heads, d]: at position 0, their difference from `first`.
        Whoever dequantizes position 0 adds it again."""
        return y if self.first is None else torch.where((position == 0)[:, None, None], y - self.first, y)

    def read_packed(self, x: Tensor, position: Tensor) -> Tensor:
        """Vectors [tokens, kv_heads, d] at these positions, as they are read after they were packed."""
        near = self.without_first(self.transform.forward(x), position)
        y = self.dequantize(*self.quantize(near.unsqueeze(-2))).squeeze(-2)
        if self.first is not None:
            y = torch.where((position == 0)[:, None, None], y + self.first, y)
        return self.transform.inverse(y)

    def quantizes_like(self, other: "Codec") -> bool:
        """Whether keys and values may go through `quantize` and `dequantize` together."""
        if self.layout.even or self.centroids is not None or other.centroids is not None:
            return False
        return (self.layout, self.clip) == (other.layout, other.clip)

    def encode(self, x: Tensor) -> Tensor:
        if self.layout.per_page:
            raise ValueError("a token alone has no slot where whole pages are quantized")
        codes, meta = self.quantize(self.transform.forward(x).unsqueeze(-2))
        return torch.cat((codes, meta.view(torch.uint8)), dim=-1).squeeze(-2)

    def decode(self, slots: Tensor) -> Tensor:
        codes, meta = slots.split([self.layout.code_bytes, self.layout.meta_bytes], dim=-1)
        entries = meta
        if not self.layout.even:
            entries = meta.contiguous().view(torch.float16) if self.layout.meta_bytes else meta.half()
        decoded = self.dequantize(codes.unsqueeze(-2), entries.unsqueeze(-2))
        return self.transform.inverse(decoded.squeeze(-2))

    def quantize(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Transformed float32[..., kv_heads, sides, d] -> uint8[..., code_bytes] codes, metadata [..., entries].

        If metadata belong to pages, y is [pages, page_size, kv_heads, sides, d], and metadata are [pages, 1, …].
        Raises if 16-bit metadata or raw floats cannot hold a vector.
        """
        codes, meta, lost = self.quantize_or_zero(y)
        if lost.any():
            raise ValueError(UNSTORABLE)
        return codes, meta

    def quantize_or_zero(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`quantize`, with zeros for vectors that it would refuse. Also returns which: bool[..., kv_heads, sides].

        If metadata belong to pages, it refuses whole pages.
        """
        if y.shape[-1] != self.layout.dims:
            raise ValueError(f"vectors of {y.shape[-1]} dims do not fit a slot of {self.layout.dims}")
        codes, meta = self._quantize(y)
        lost = ~self._finite(codes, meta)
        if lost.any():
            codes, meta = self._quantize(y.masked_fill(lost.unsqueeze(-1), 0))
        return codes, meta, lost

    def _finite(self, codes: Tensor, meta: Tensor) -> Tensor:
        """bool[..., kv_heads, sides]: slots whose metadata and raw floats are finite."""
        if self.layout.even:
            return (meta != even.UNSTORABLE).all(dim=-1)
        finite = meta[..., : self.layout.meta_numbers].isfinite().all(dim=-1)
        for segment, part, _ in self.layout.split(codes, meta) if self.layout.has_raw else ():
            if segment.rule == "raw":
                finite &= part.contiguous().view(self.raw_dtype).isfinite().all(dim=-1)
        return finite

    def _quantize(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """`quantize` without checks: what 16 bits cannot hold becomes NaN or Inf in metadata or raw floats."""
        if self.layout.heads:
            return self._quantize_heads(y)
        codes, meta, ids = [], [], []
        if self.centroids is not None:
            ids.append(self._nearest(y))
            y = y - self._centroid(ids[0], heads=-3)
        for segment in self.layout.segments:
            part = y if segment.dims == y.shape[-1] else y[..., segment.start : segment.stop]
            if segment.rule == "raw":
                codes.append(part.to(self.raw_dtype).contiguous().view(torch.uint8))
                continue
            if segment.rule == "affine":
                part_codes, part_meta = affine.quantize(part, segment.bits, self.clip)
                codes.append(pack(part_codes, segment.bits))
            elif segment.rule == "even":
                part_codes, part_meta = even.quantize(part, segment.bits)
                codes.append(pack(part_codes, segment.bits))
            elif segment.rule == "codebook":
                part_codes, part_meta = codebook.quantize(part, segment.bits)
                codes.append(pack(pad(part_codes, (0, segment.padded_dims - segment.dims)), segment.bits))
            else:
                packed, part_meta = channelwise.quantize(part, segment.bits, segment.boosted)
                codes.append(packed)
            meta.append(part_meta)
        entries = [*meta, *(number.short().view(torch.float16) for number in ids)]
        return _joined(codes), _joined(entries) if entries else y.new_empty((*y.shape[:-1], 0), dtype=torch.float16)

    def dequantize(self, codes: Tensor, meta: Tensor, heads: int = -3) -> Tensor:
        """The inverse of `quantize`. `heads` (negative) is the dimension of KV heads."""
        if self.layout.heads:
            return self._dequantize_heads(codes, meta, heads)
        parts = []
        for segment, part_codes, part_meta in self.layout.split(codes, meta):
            if segment.rule == "raw":
                parts.append(part_codes.contiguous().view(self.raw_dtype).float())
            elif segment.rule == "affine":
                parts.append(affine.dequantize(unpack(part_codes, segment.bits), part_meta))
            elif segment.rule == "even":
                parts.append(even.dequantize(unpack(part_codes, segment.bits), segment.bits, part_meta))
            elif segment.rule == "codebook":
                unpacked = unpack(part_codes, segment.bits)[..., : segment.dims]
                parts.append(codebook.dequantize(unpacked, segment.bits, part_meta))
            else:
                parts.append(channelwise.dequantize(part_codes, part_meta, segment.dims, segment.bits, segment.boosted))
        x = _joined(parts)
        if self.centroids is None:
            return x
        numbers = meta[..., -1:].view(torch.int16).long()
        return x.add_(self._centroid(numbers.clamp_(0, self.centroids.shape[1] - 1), heads))  # unwritten slots: any

    def _quantize_heads(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """`_quantize` if every KV head has a layout of its own."""
        codes, meta = [], []
        for layout, part in zip(self.layout.heads, y.split(1, dim=-3), strict=True):
            part_codes, part_meta = replace(self, layout=layout)._quantize(part)
            codes.append(pad(part_codes, (0, self.layout.code_bytes - layout.code_bytes)))
            meta.append(pad(part_meta, (0, self.layout.meta_entries - layout.meta_entries)))
        return torch.cat(codes, dim=-3), torch.cat(meta, dim=-3)

    def _dequantize_heads(self, codes: Tensor, meta: Tensor, heads: int) -> Tensor:
        parts = [
            replace(self, layout=layout).dequantize(
                codes.narrow(heads, head, 1)[..., : layout.code_bytes],
                meta.narrow(heads, head, 1)[..., : layout.meta_entries],
                heads,
            )
            for head, layout in enumerate(self.layout.heads)
        ]
        return torch.cat(parts, dim=heads)

    def _nearest(self, y: Tensor) -> Tensor:
        """The number [..., kv_heads, 1, 1] of the nearest centroid per token, over all KV heads together."""
        assert self.centroids is not None
        numbers = kmeans.nearest(y.reshape(-1, y.shape[-3:].numel()), self.centroids.transpose(0, 1).flatten(1))
        return numbers.view(*y.shape[:-3], 1, 1, 1).expand(*y.shape[:-1], 1)

    def _centroid(self, numbers: Tensor, heads: int) -> Tensor:
        """Numbers [..., 1] -> their centroids [..., d]."""
        assert self.centroids is not None
        head = torch.arange(len(self.centroids), device=numbers.device).view(-1, *[1] * (-heads - 1))
        return self.centroids[head, numbers].squeeze(-2)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
