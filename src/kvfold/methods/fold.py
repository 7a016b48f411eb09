"""fold: kvfold's own recipe. More bits for RoPE blocks that matter more, in evenly spaced levels."""

from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from kvfold.format.layout import SlotLayout, even_slot
from kvfold.methods.allocation import runs
from kvfold.methods.importance import ranked_blocks
from kvfold.recipe import Fit, Means, Number, Recipe, Rotations

if TYPE_CHECKING:
    from torch import Tensor

    from kvfold.calibration.statistics import LayerStatistics
    from kvfold.rope import Rope
    from kvfold.transforms import PermutedHadamard

Quarters = tuple[int, int, int, int]  # bits per quarter of a head's coordinates, the most important quarter first
Segments = list[tuple[int, int]]  # (dims, bits)


class Fold(Recipe):
    """Coordinates are sorted by importance. Those of equal width are a segment, which a Hadamard matrix mixes.

    - Keys: a RoPE block matters as much as E‖q_i‖²·E‖k_i‖². Every KV head has an order of its own.
    - Values: a coordinate matters as much as its variance. This rotation can be folded into the weights.
    - Tokens and queries count as much as their errors cost (see `LayerStatistics`).
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
        key = _rotation(fit["key_order"], self._segments("key", key_dim, fit))
        if "value_folded" in fit:
            return key, None
        return key, _rotation(fit["value_order"], self._segments("value", value_dim, fit))

    def fit(self, layer: "LayerStatistics", rope: "Rope", means: Means) -> Fit:
        import torch

        _, key_order = ranked_blocks(layer.read_q, layer.read_k, rope, means[0])
        variance = layer.read_v.second(means[1]).diagonal(dim1=1, dim2=2)
        orders = {"key": key_order, "value": variance.argsort(dim=1, descending=True, stable=True)}
        fit: dict[str, Tensor] = {}
        for (side, order), states, mean in zip(orders.items(), layer.prompt[1:], means, strict=True):
            segments = self._segments(side, order.shape[1], {})
            fit[f"{side}_order"] = order.to(torch.int16)
            fit[f"{side}_unit"] = torch.tensor([_unit(states, mean, order, segments)])
        return fit

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


def _rotation(order: "Tensor", segments: Segments) -> "PermutedHadamard":
    """A segment whose size is no power of two has several Hadamard matrices of one order."""
    from kvfold.transforms import PermutedHadamard

    blocks = (block for size, _ in segments for block in [size & -size] * (size // (size & -size)))
    return PermutedHadamard(order.long(), tuple(blocks))


def _unit(states: "Tensor", mean: "Tensor | None", order: "Tensor", segments: Segments) -> float:
    """The unit of scales, from states [kv_heads, tokens, d] of calibration."""
    import torch

    from kvfold.quantizers import even

    x = states.transpose(0, 1).float()
    y = _rotation(order, segments).apply(x if mean is None else x - mean.float())
    parts = y.split([size for size, _ in segments], dim=-1)
    scales = [even.scaled(part, bits)[1].flatten() for part, (_, bits) in zip(parts, segments, strict=True)]
    return even.unit_of(torch.cat(scales))
