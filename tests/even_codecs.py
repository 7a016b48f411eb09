"""Codecs with evenly spaced levels, by the sizes and widths of their segments."""

from collections.abc import Sequence

import torch

from kvfold.format.codec import Codec
from kvfold.format.layout import even_slot
from kvfold.transforms import Hadamard, PermutedHadamard, Transform

Widths = Sequence[tuple[int, int]]  # (dims, bits) per segment


def even_codecs(
    key: Widths,
    value: Widths,
    units: tuple[float, float] = (0.5, 2.0),
    kv_heads: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    centred: bool = True,
) -> tuple[Codec, Codec]:
    """Keys with a permutation per KV head, rotated inside segments, and values rotated in equal blocks."""
    generator, dims = torch.Generator().manual_seed(0), sum(n for n, _ in key)
    order = torch.stack([torch.randperm(dims, generator=generator) for _ in range(kv_heads)])
    means = torch.randn(2, kv_heads, dims, generator=generator) if centred else (None, None)
    keys = Transform(means[0], PermutedHadamard(order, tuple(n for n, _ in key)))
    values = Transform(means[1], Hadamard(value[0][0]))
    return Codec(even_slot(key), keys, dtype, unit=units[0]), Codec(even_slot(value), values, dtype, unit=units[1])
