"""Centring and rotation of keys, values and queries."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from kvfold.once import Once


class Terms(NamedTuple):
    """A rotation for tensor cores: apply(x) = factors·x·matrix, and dual(q) = factors·Σ q·term."""

    matrix: Tensor  # 16-bit [kv_heads or 1, d, d], with no rounding
    duals: tuple[Tensor, ...]  # one such term, or two whose sum has 16 bits at least
    factors: Tensor  # of columns, float64[d]


class Rotation(Protocol):
    """An invertible linear map of the last dimension."""

    def apply(self, x: Tensor) -> Tensor: ...
    def invert(self, y: Tensor) -> Tensor: ...
    def dual(self, q: Tensor) -> Tensor:
        """The map of queries under which dual(q)·apply(k) = q·k."""
        ...

    def dense(self, dims: int, device: torch.device) -> Tensor:
        """The matrix D of dual(q) = q·D and invert(y) = y·Dᵀ, float32[kv_heads or 1, d, d]."""
        ...

    def terms(self, dims: int, dtype: torch.dtype, device: torch.device) -> "Terms": ...

    def to(self, device: torch.device | str) -> Self: ...


@dataclass(frozen=True)
class Transform(Once):
    """y = (x − mean)·A, per KV head, on [..., heads, d]. Queries and outputs may have several heads per KV head.

    - Keys: the mean is never added back. It would add a constant to all logits of a query, which softmax ignores. So
      `dual(q)·forward(k)` gives the same attention weights as q·k. Learned sinks and soft-caps do not ignore it: they
      get `Logits.of_mean`.
    - Values: attention weights sum to one. So `inverse` of the attention output adds the mean once.
    """

    mean: Tensor | None = None  # [kv_heads, d]
    rotation: Rotation | None = None
    _memory: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def to(self, device: torch.device | str) -> "Transform":
        mean, rotation = self.mean, self.rotation
        return Transform(
            mean if mean is None else mean.to(device), rotation if rotation is None else rotation.to(device)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        if self.mean is not None:
            y = y - self.mean
        return y if self.rotation is None else self.rotation.apply(y)

    def inverse(self, y: Tensor) -> Tensor:
        x = y if self.rotation is None else self.rotation.invert(y)
        if self.mean is None:
            return x
        return (x.unflatten(-2, (len(self.mean), -1)) + self.mean.unsqueeze(1)).flatten(-3, -2)

    def dual(self, q: Tensor) -> Tensor:
        return q.float() if self.rotation is None else self.rotation.dual(q.float())
