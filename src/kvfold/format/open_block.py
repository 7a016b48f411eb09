"""The open block: which tokens a query reads raw.

A query at position t reads raw the tokens from ⌊t/B⌋·B on, and packed all tokens before. B is the recipe's `block`.

So a full block is read packed for ever, and only the block that a sequence is filling needs its raw vectors. They are
kept in a ring: position p is at place p mod R.
"""

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from numpy import ndarray
    from torch import Tensor

DRAFTED = 16  # new tokens of a sequence, at most, in a step that may take all but the first of them back

Position = TypeVar("Position", int, "Tensor", "ndarray")


def raw_from(position: Position, block: int) -> Position:
    """The first token that a query at `position` reads raw. With a block of 0 tokens it reads none: position + 1."""
    return position // block * block if block else position + 1


def packed_from(token: Position, block: int) -> Position:
    """The first position whose query reads `token` packed."""
    return (token // block + 1) * block if block else token


def ring_tokens(block: int) -> int:
    """The least R: after any step with drafts, however many are taken back, the ring still holds the open block."""
    return block + DRAFTED if block else 0
