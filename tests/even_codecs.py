"""Codecs with evenly spaced levels, by the sizes and widths of their segments."""

from collections.abc import Sequence

import torch

from kvfold.format.codec import Codec
from kvfold.format.layout import even_slot
from kvfold.transforms import Hadamard, Matrix, Transform, hadamard_matrix

Widths = Sequence[tuple[int, int]]  # (dims, bits) per segment


def even_codecs(
    key: Widths,
    value: Widths,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    centred: bool = True,
) -> tuple[Codec, Codec]:
    """Keys with a permutation per KV head, rotated inside segments, and values rotated in equal blocks."""
    generator, dims = torch.Generator().manual_seed(0), sum(n for n, _ in key)
    mixing = torch.block_diag(*(hadamard_matrix(n) for n, _ in key)).float()
    mixed = torch.stack([mixing[torch.randperm(dims, generator=generator)] for _ in range(kv_heads)])
    means = torch.randn(2, kv_heads, dims, generator=generator) if centred else (None, None)
    keys = Transform(means[0], Matrix.of_signs(mixed))
    values = Transform(means[1], Hadamard(value[0][0]))
    return Codec(even_slot(key), keys, dtype), Codec(even_slot(value), values, dtype)
