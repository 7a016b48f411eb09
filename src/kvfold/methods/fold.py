"""fold: kvfold's own recipe. More bits for coordinates that matter more, in evenly spaced levels."""

from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from kvfold.format.layout import SlotLayout, even_slot
from kvfold.methods.allocation import runs
from kvfold.methods.importance import block_energies
from kvfold.recipe import Fit, Means, Number, Recipe, Rotations

if TYPE_CHECKING:
    from torch import Tensor

    from kvfold.calibration.statistics import LayerStatistics
    from kvfold.rope import Rope
    from kvfold.transforms import Matrix

Quarters = tuple[int, int, int, int]  # bits per quarter of a head's coordinates, the most important quarter first
Segments = list[tuple[int, int]]  # (dims, bits)

DAMPED = 1e-3  # of the mean variance and of the mean cost, added to those of every direction


class Fold(Recipe):
    """Coordinates are sorted by importance. Those of equal width are a segment, which a Hadamard matrix mixes. So all
    of them have the same error.

    Let a coordinate have variance σ², and let an error of 1 cost c. It matters as much as c·σ². Before it is mixed, it
    is divided by its error's fair share: multiplied by (c/σ²)^¼. Of all scales, this makes the cost of a segment's
    errors least: (Σ σ√c)² instead of Σ σ²·Σ c.

    - Keys: a coordinate stands for its RoPE block. σ² is E‖k_i‖², and c is E‖q_i‖². Every KV head has its own. Tokens
      and queries count as much as errors of their logits cost (see `LayerStatistics`).
    - Values: coordinates are directions, in which neither errors of outputs nor values are correlated. c is what the
      output projection makes of an error. This map can be folded into the weights.
    - Levels are evenly spaced, with one 8-bit scale per token and segment. So kernels multiply codes as integers.

    Widths are those of the recipe, or of the layer if `kvfold tune` chose them. Keys and values are always centred.
    """

    options: ClassVar = ("block", "skip")
    folds: ClassVar = True
    key: Quarters | None = None  # None: `kvfold tune` chooses
    value: Quarters | None = None
    block: Number = 64

    def layouts(self, key_dim: int, value_dim: int, fit: Fit) -> tuple[SlotLayout, SlotLayout]:
        key, value = self._segments("key", key_dim, fit), self._segments("value", value_dim, fit)
        return even_slot(key), even_slot(value)

    def rotations(self, key_dim: int, value_dim: int, fit: Fit) -> Rotations:
        from torch.nn.functional import one_hot

        picked = one_hot(fit["key_order"].long(), key_dim).double().mT  # [kv_heads, d, d]
        key = _mixed(picked * fit["key_scale"].double().unsqueeze(-2), self._segments("key", key_dim, fit))
        if "value_folded" in fit:
            return key, None
        return key, _mixed(fit["value_basis"].double(), self._segments("value", value_dim, fit))

    def fit(self, layer: "LayerStatistics", rope: "Rope", means: Means) -> Fit:
        import torch

        of_q, of_k, blocks = block_energies(layer.read_q, layer.read_k, rope, means[0])
        ranked = (of_q * of_k).argsort(dim=1, descending=True, stable=True)
        of_q, of_k = (_damped(x).gather(1, ranked).repeat_interleave(2, dim=1) for x in (of_q, of_k))
        basis, of_v = _directions(layer.v.second(means[1]), layer.v.count, layer.output_costs)
        value_scale = _scale(of_v, torch.ones_like(of_v), self._segments("value", of_v.shape[1], {}))
        return {
            "key_order": blocks[ranked].flatten(1).to(torch.int16),
            "key_scale": _scale(of_k, of_q, self._segments("key", of_k.shape[1], {})).float(),
            "value_basis": (basis * value_scale.unsqueeze(1)).bfloat16(),
        }

    def _segments(self, side: str, dims: int, fit: Fit) -> Segments:
        if dims % 8:
            raise ValueError(f"heads of a multiple of 8 dims are needed, not {dims}")
        if f"{side}_widths" in fit:
            return runs(fit[f"{side}_widths"][0].tolist())
        quarters = self.key if side == "key" else self.value
        if quarters is None:
            raise ValueError(f"its widths are chosen per layer: run `{self.fitted_by}`, then give --artifact DIR")
        return runs(widths_of(quarters, dims))

    @property
    def fitted_by(self) -> str:
        return super().fitted_by if self.key and self.value else "kvfold tune MODEL --bits 3 --out DIR"


def widths_of(quarters: Quarters, dims: int) -> list[int]:
    """Bits per coordinate. Quarters end at multiples of 8 coordinates, whose codes fill whole bytes at any width."""
    ends = [8 * round(i * dims / 32) for i in range(5)]
    return [bits for bits, (start, end) in zip(quarters, pairwise(ends), strict=True) for _ in range(start, end)]


def _damped(x: "Tensor", share: "float | Tensor" = DAMPED) -> "Tensor":
    """Numbers [kv_heads, n] plus a share of their mean. 1 if all are 0."""
    mean = x.mean(dim=1, keepdim=True)
    return (x + share * mean).where(mean > 0, 1.0)


def _scale(variance: "Tensor", cost: "Tensor", segments: Segments) -> "Tensor":
    """What coordinates [kv_heads, n] are multiplied by: (cost / variance)^¼. And per segment, a factor that brings its
    usual step to 1, the middle of the range of 8-bit scales."""
    import torch

    from kvfold.quantizers.even import usual_step

    scale = (cost / variance) ** 0.25
    sizes = [size for size, _ in segments]
    energies = (variance * scale.square()).split(sizes, dim=1)
    steps = [
        energy.mean(dim=1, keepdim=True).sqrt().expand_as(energy) * usual_step(bits)
        for energy, (_, bits) in zip(energies, segments, strict=True)
    ]
    return scale / torch.cat(steps, dim=1)


def _directions(moments: "Tensor", vectors: "Tensor", costs: "Tensor") -> tuple["Tensor", "Tensor"]:
    """The columns [kv_heads, d, d] on which centred values are projected, the most important first, and the variances
    there [kv_heads, d]. `moments` and `costs` are those of values and of their errors, [kv_heads, d, d].

    Moments of n `vectors` get d/n of their mean in every direction: few vectors say little of most directions.

    With costs = L·Lᵀ, an error e costs ‖e·L‖². The eigenvectors of Lᵀ·moments·L are the directions: costs are 1 there,
    and variances are the eigenvalues.
    """
    import torch

    from kvfold.transforms.covariance import eigenvectors

    def regular(x: "Tensor", share: "float | Tensor") -> "Tensor":
        diagonal = x.diagonal(dim1=1, dim2=2)
        return x + torch.diag_embed(_damped(diagonal, share) - diagonal)

    moments = regular(moments, moments.shape[1] / vectors.unsqueeze(1) + DAMPED)
    costs = regular(costs, DAMPED)
    lower = torch.linalg.cholesky(costs)
    columns = lower @ eigenvectors(lower.mT @ moments @ lower)
    return columns, (columns * (moments @ columns)).sum(dim=1)


def _mixed(columns: "Tensor", segments: Segments) -> "Matrix":
    """Projection on columns [kv_heads, d, d], then a Hadamard matrix per segment. A segment whose size is no power of
    two has several, of one order."""
    import torch

    from kvfold.transforms import Matrix, hadamard_matrix

    return Matrix((columns @ torch.block_diag(*[hadamard_matrix(size) for size, _ in segments])).float())
