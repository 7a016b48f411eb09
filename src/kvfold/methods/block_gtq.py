"""Block-GTQ: RoPE-aware bit allocation for key-cache quantization."""

from itertools import groupby
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from pydantic import NonNegativeInt
from torch import Tensor
from torch.nn.functional import one_hot

from kvfold.layout import SlotLayout, codebook_slot, mixed_slot
from kvfold.methods.allocation import allocate
from kvfold.methods.turboquant import TurboQuant
from kvfold.recipe import Fit
from kvfold.transforms import Matrix, Rotation, random_rotation

if TYPE_CHECKING:
    from kvfold.calibration.statistics import LayerStatistics
    from kvfold.rope import Rope

MANY_DIMS = 128  # from here on a third norm pays
USUAL_NORMS = 5
THREE = ((1, 2), (1, 0), (2, -1))  # quarters of the coordinates, from the most important down, and their bits beyond b
UNIT = 4  # RoPE blocks that get their bits together: 8 coordinates of any width fill whole bytes


class BlockGtq(TurboQuant):
    """Keys: RoPE blocks that matter more get more bits; blocks of equal width form one TurboQuant vector.

    Bits go one by one to where ¾·s_i·4^(−b_i) is largest. The KV heads of a layer have equally many blocks of each
    width and differ in which ones, so that their slots are equal; `per_head` gives each head what it would get alone.

    The paper's score is ½(E‖q_i‖² + E‖k_i‖²) (`score=mean`); the default E‖q_i‖²·E‖k_i‖² is what an error in proportion
    to the block does to logits. The paper takes any width from 1 to 8 (`widths=all`), of which each costs a norm, and
    every layer its own. By default all layers have the same slots: a quarter of the coordinates with b + 2 bits, one
    with b, half of them with b − 1 (`widths=three`), or, as smaller heads cannot afford the third norm, a half with
    b + 1 and a half with b − 1 (`widths=two`). The first tokens stay in 16 bits by default, since their keys lie far
    from the mean, where centring leaves few bits.
    """

    options: ClassVar = (*TurboQuant.options, "score", "widths", "per_head")
    sink: NonNegativeInt = 4
    score: Literal["product", "mean"] = "product"
    widths: Literal["two", "three", "all"] | None = None  # default: by the head dimension
    per_head: bool = False

    def _three(self, head_dim: int) -> list[tuple[int, int]] | None:
        """The (dims, bits) of `widths=three`, or None where there are others."""
        fits = 2 <= self.key_bits <= 6 and head_dim % (8 * UNIT) == 0 and not self.per_head
        if self.widths == "three" and not fits:
            raise ValueError(
                f"widths=three is for 2 to 6 bits, heads of a multiple of {8 * UNIT} dims (here {head_dim}) and "
                "no per_head"
            )
        if not fits or (self.widths or head_dim >= MANY_DIMS) not in ("three", True):
            return None
        return [(quarters * head_dim // 4, self.key_bits + more) for quarters, more in THREE]

    def _widths(self) -> tuple[int, ...]:
        """Those that calibration chooses from."""
        if self.key_bits in (1, 8):
            return (self.key_bits,)
        return tuple(range(1, 9)) if self.widths == "all" else (self.key_bits - 1, self.key_bits + 1)

    def layouts(self, head_dim: int, fit: Fit) -> tuple[SlotLayout, SlotLayout]:
        _, value = super().layouts(head_dim, fit)
        if head_dim % (2 * UNIT):
            raise ValueError(f"Block-GTQ takes heads of a multiple of {2 * UNIT} dims, not {head_dim}")
        if "key_widths" in fit:
            slots = [codebook_slot(_runs(head)) for head in fit["key_widths"]]
            return slots[0] if len(slots) == 1 else mixed_slot(slots), value
        if three := self._three(head_dim):
            return codebook_slot(three), value
        widths = self._widths()
        if len(widths) <= 2:
            return codebook_slot([(head_dim // len(widths), bits) for bits in reversed(widths)]), value
        # how many norms there will be is found by calibration; this many is usual
        parts = np.array_split(range(head_dim // 8), min(USUAL_NORMS, head_dim // 8))
        return codebook_slot([(8 * len(part), self.key_bits) for part in parts]), value

    def rotations(self, head_dim: int, fit: Fit) -> tuple[Rotation | None, Rotation | None]:
        """Blocks in the order of their widths, then a random rotation of those with the same."""
        _, value = super().rotations(head_dim, fit)
        mixing = [
            torch.block_diag(*(random_rotation(dims, 2 * self.seed) for dims, _ in _runs(head)))
            for head in fit["key_widths"]
        ]
        order = one_hot(fit["key_order"].long(), head_dim).double().mT  # [kv_heads, d, d]
        return Matrix((order @ torch.stack(mixing)).float()), value

    def fit(self, layer: "LayerStatistics", rope: "Rope", means: tuple[Tensor | None, Tensor | None]) -> Fit:
        blocks = torch.tensor(rope.blocks())  # [blocks, 2]
        moments = layer.q.second(), layer.k.second(means[0])
        q, k = (moment.diagonal(dim1=1, dim2=2)[:, blocks].sum(dim=-1) for moment in moments)
        scores, ranked = (q * k if self.score == "product" else (q + k) / 2).sort(dim=1, descending=True, stable=True)
        if three := self._three(2 * len(blocks)):
            widths = torch.tensor([[bits for dims, bits in three for _ in range(dims)]])
        else:
            # by rank, and summed over the heads, scores fall as those of each head: their best widths are best for all
            rows, unit = (scores, 1) if self.per_head else (scores.sum(dim=0, keepdim=True), UNIT)
            units = rows.unflatten(1, (-1, unit)).sum(dim=2)
            chosen = torch.tensor([allocate(row, len(row) * self.key_bits, self._widths()) for row in units])
            widths = chosen.repeat_interleave(2 * unit, dim=1)
        return {"key_widths": widths.to(torch.uint8), "key_order": blocks[ranked].flatten(1).to(torch.int16)}


def _runs(widths: Tensor) -> list[tuple[int, int]]:
    """Widths [d] -> (dims, bits) of each run of equal ones."""
    return [(len(list(run)), bits) for bits, run in groupby(widths.tolist())]
