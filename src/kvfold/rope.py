"""Rope: which coordinates of a head RoPE turns together, and how fast."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rope:
    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    head_dim: int
    # (i, j) with i < j, ordered by i. An angle a turns (x_i, x_j) into (x_i cos a − x_j sin a, x_i sin a + x_j cos a).
    pairs: tuple[tuple[int, int], ...]
    frequencies: tuple[float, ...]  # per pair, in radians per position

    def __post_init__(self) -> None:
        turning = [i for pair in self.pairs for i in pair]
        if any(not 0 <= i < j < self.head_dim for i, j in self.pairs) or len(set(turning)) < len(turning):
            raise ValueError(f"pairs must be of different coordinates below head_dim, {self.head_dim}, i < j")
        if len(self.frequencies) != len(self.pairs):
            raise ValueError(f"there are {len(self.frequencies)} frequencies for {len(self.pairs)} pairs")
        if not all(map(math.isfinite, self.frequencies)):
            raise ValueError("frequencies must be finite")

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.pairs)

    @property
    def layout(self) -> Literal["half", "interleaved", "other"]:
        half = len(self.pairs)
        if half and self.pairs == tuple((i, i + half) for i in range(half)):
            return "half"
        if half and self.pairs == tuple((2 * i, 2 * i + 1) for i in range(half)):
            return "interleaved"
        return "other"

    def blocks(self) -> list[tuple[int, int]]:
        """The pairs, then the coordinates that do not turn, two by two."""
        turning = {i for pair in self.pairs for i in pair}
        rest = [i for i in range(self.head_dim) if i not in turning]
        return [*self.pairs, *zip(rest[::2], rest[1::2], strict=True)]

    def rotate(self, x: Tensor, offset: Tensor) -> Tensor:
        """x[..., d] turned by `offset` positions. `offset` broadcasts with x[..., 0]."""
        first, second = torch.tensor(self.pairs, dtype=torch.int64, device=x.device).reshape(-1, 2).T
        frequencies = torch.tensor(self.frequencies, dtype=torch.float64, device=x.device)
        angles = offset.to(x.device).unsqueeze(-1) * frequencies  # [..., pairs]; float64 for far positions
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        turned = x.expand(*torch.broadcast_shapes(x.shape[:-1], offset.shape), x.shape[-1]).clone()
        turned[..., first] = x[..., first] * cos - x[..., second] * sin
        turned[..., second] = x[..., first] * sin + x[..., second] * cos
        return turned
