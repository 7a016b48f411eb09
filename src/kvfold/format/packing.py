"""Codes of 1 to 8 bits to bytes and back.

A width is split into power-of-two *planes*, the largest first: 3 = 2 + 1, 7 = 4 + 2 + 1. The first plane has the low
bits of the codes. A byte holds `per = 8 / width` codes of a plane: byte j has codes j, j + n/per, j + 2n/per, … from
its low bits up. So unpacking is one mask and shift per part, and each part is a contiguous run of codes.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def planes(bits: int) -> tuple[int, ...]:
    """The power-of-two widths that make up `bits`, in storage order."""
    if not 1 <= bits <= 8:
        raise ValueError(f"codes have 1 to 8 bits, not {bits}")
    return tuple(width for width in (8, 4, 2, 1) if bits & width)


def packed_bytes(n: int, bits: int) -> int:
    """Bytes of `n` codes of `bits` bits. Raises if they do not fill whole bytes."""
    planes(bits)
    if n <= 0 or n * bits % 8:
        raise ValueError(f"{n} codes of {bits} bits do not fill whole bytes")
    return n * bits // 8


def pack(codes: "Tensor", bits: int) -> "Tensor":
    """uint8[..., n] codes below 2**bits -> uint8[..., n·bits/8]."""
    import torch

    n = codes.shape[-1]
    packed_bytes(n, bits)
    packed, shift = [], 0
    for width in planes(bits):
        plane = codes if width == bits else (codes >> shift) & (2**width - 1)
        parts = plane.chunk(8 // width, dim=-1)
        byte = parts[0]
        for i, part in enumerate(parts[1:], start=1):
            byte = torch.add(byte, part, alpha=2 ** (i * width))  # their bits do not overlap, so a sum is an or
        packed.append(byte)
        shift += width
    return packed[0] if len(packed) == 1 else torch.cat(packed, dim=-1)


def unpack(packed: "Tensor", bits: int) -> "Tensor":
    """The inverse of `pack`."""
    import torch

    widths, n_bytes = planes(bits), packed.shape[-1]
    if n_bytes * 8 % bits:
        raise ValueError(f"{n_bytes} bytes do not hold whole codes of {bits} bits")
    n = n_bytes * 8 // bits
    codes, start, shift = None, 0, 0
    for width in widths:
        per = 8 // width
        plane = packed[..., start : start + n // per]
        parts = [(plane >> (i * width)) & (2**width - 1) for i in range(1, per - 1)]
        if per > 1:  # the first part needs no shift, the last no mask
            parts = [plane & (2**width - 1), *parts, plane >> (8 - width)]
        part = torch.cat(parts, dim=-1) if per > 1 else plane
        codes = part if codes is None else codes | (part << shift)
        start += n // per
        shift += width
    assert codes is not None
    return codes
