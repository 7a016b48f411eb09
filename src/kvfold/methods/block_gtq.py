"""Block-GTQ: RoPE-aware bit allocation for key-cache quantization."""

from typing import TYPE_CHECKING, ClassVar, Literal

from kvfold.format.layout import SlotLayout, codebook_slot, mixed_slot
from kvfold.methods.allocation import allocate, runs
from kvfold.methods.importance import Score, ranked_blocks
from kvfold.methods.turboquant import TurboQuant
from kvfold.recipe import Fit, Means, Rotations

if TYPE_CHECKING:
    from kvfold.calibration.statistics import LayerStatistics
    from kvfold.rope import Rope

MANY_DIMS = 128  # from this head dimension on, a third norm pays off
USUAL_NORMS = 5  # of a slot with widths=all
THREE = ((1, 2), (1, 0), (2, -1))  # quarters of the coordinates, the most important first, and their bits beyond b
UNIT = 4  # RoPE blocks that share a width: their 8 coordinates fill whole bytes at any width


class BlockGtq(TurboQuant):
    """Keys: RoPE blocks that matter more get more bits. Blocks of equal width form one TurboQuant vector, with a norm.

    Bits go one by one to the block with the largest ¾·s_i·4^(−b_i). All KV heads of a layer have equally many blocks of
    each width, so that their slots are equal. Which blocks these are depends on the head. With `per_head`, the numbers
    of blocks depend on the head too.

    The scores s_i are those of importance.py: `score=product`, or `score=mean` as in the paper.

    The widths are one of these, where b is `key_bits`:

    - `widths=three`, the default from 128 dims on: a quarter of the coordinates with b + 2 bits, a quarter with b, half
      of them with b − 1.
    - `widths=two`, the default below, where a third norm costs too much: half with b + 1 bits, half with b − 1.
    - `widths=all`, the paper's: any from 1 to 8, chosen per layer. Each width that occurs costs a norm.
    """

    options: ClassVar = (*TurboQuant.options, "score", "widths", "per_head")
    score: Score = "product"
    widths: Literal["two", "three", "all"] | None = None  # None: by the head dimension
    per_head: bool = False

    def _three(self, head_dim: int) -> list[tuple[int, int]] | None:
        """The (dims, bits) per run of `widths=three`, or None if the widths are others."""
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
        """The widths that calibration chooses from."""
        if self.key_bits in (1, 8):
            return (self.key_bits,)
        return tuple(range(1, 9)) if self.widths == "all" else (self.key_bits - 1, self.key_bits + 1)

    def layouts(self, key_dim: int, value_dim: int, fit: Fit) -> tuple[SlotLayout, SlotLayout]:
        _, value = super().layouts(key_dim, value_dim, fit)
        if key_dim % (2 * UNIT):
            raise ValueError(f"Block-GTQ takes heads of a multiple of {2 * UNIT} dims, not {key_dim}")
        if "key_widths" in fit:
            slots = [codebook_slot(runs(head.tolist())) for head in fit["key_widths"]]
            return slots[0] if len(slots) == 1 else mixed_slot(slots), value
        widths = self._widths()
        if three := self._three(key_dim):
            slot = codebook_slot(three)
        elif len(widths) <= 2:
            slot = codebook_slot([(key_dim // len(widths), bits) for bits in reversed(widths)])
        else:  # calibration decides the number of norms: without a fit, take the usual one
            units, norms = key_dim // 8, min(USUAL_NORMS, key_dim // 8)
            slot = codebook_slot([(8 * ((units + part) // norms), self.key_bits) for part in reversed(range(norms))])
        return mixed_slot([slot]) if self.per_head else slot, value

    def rotations(self, key_dim: int, value_dim: int, fit: Fit) -> Rotations:
        """Blocks are sorted by width. A random rotation then mixes the blocks of equal width."""
        import torch
        from torch.nn.functional import one_hot

        from kvfold.transforms import Matrix, random_rotation

        _, value = super().rotations(key_dim, value_dim, fit)
        mixing = [
            torch.block_diag(*(random_rotation(dims, 2 * self.seed) for dims, _ in runs(head.tolist())))
            for head in fit["key_widths"]
        ]
        order = one_hot(fit["key_order"].long(), key_dim).double().mT  # [kv_heads, d, d]
        return Matrix.of_signs((order @ torch.stack(mixing)).float()), value

    def fit(self, layer: "LayerStatistics", rope: "Rope", means: Means) -> Fit:
        import torch

        scores, order = ranked_blocks(layer.q, layer.k, rope, means[0], self.score)
        if three := self._three(order.shape[1]):
            widths = torch.tensor([[bits for dims, bits in three for _ in range(dims)]])
        else:
            # Heads share widths by rank of their blocks. So the scores of a rank are added over the heads.
            rows, unit = (scores, 1) if self.per_head else (scores.sum(dim=0, keepdim=True), UNIT)
            units = rows.unflatten(1, (-1, unit)).sum(dim=2)
            chosen = torch.tensor([allocate(row, len(row) * self.key_bits, self._widths()) for row in units])
            widths = chosen.repeat_interleave(2 * unit, dim=1)
        return {"key_widths": widths.to(torch.uint8), "key_order": order.to(torch.int16)}
