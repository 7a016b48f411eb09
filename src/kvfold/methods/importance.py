"""Which RoPE blocks of a head matter most."""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from kvfold.calibration.statistics import Moments
    from kvfold.rope import Rope

Score = Literal["product", "mean"]


def block_energies(
    q: "Moments", k: "Moments", rope: "Rope", mean: "Tensor | None"
) -> tuple["Tensor", "Tensor", "Tensor"]:
    """E‖q_i‖² and E‖k_i‖² of every block and KV head [kv_heads, blocks], and the coordinates of blocks [blocks, 2]."""
    import torch

    blocks = torch.tensor(rope.blocks())
    moments = q.second(), k.second(mean)
    of_q, of_k = (moment.diagonal(dim1=1, dim2=2)[:, blocks].sum(dim=-1) for moment in moments)
    return of_q, of_k, blocks


def ranked_blocks(
    q: "Moments", k: "Moments", rope: "Rope", mean: "Tensor | None", score: Score = "product"
) -> tuple["Tensor", "Tensor"]:
    """Per KV head, the scores of its blocks in descending order [kv_heads, blocks], and the coordinates of these blocks
    [kv_heads, d].

    - product: E‖q_i‖²·E‖k_i‖². The squared error of logits is in proportion to it if the error of a block is in
      proportion to its norm.
    - mean: ½(E‖q_i‖² + E‖k_i‖²).
    """
    of_q, of_k, blocks = block_energies(q, k, rope, mean)
    scores, ranked = (of_q * of_k if score == "product" else (of_q + of_k) / 2).sort(
        dim=1, descending=True, stable=True
    )
    return scores, blocks[ranked].flatten(1)
