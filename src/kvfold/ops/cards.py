"""What kernels know of a GPU. docs/gpus.md lists what follows from it."""

from typing import Literal, NamedTuple

HOPPER = (9, 0)  # compute capability: the first with PDL (see pdl.py)
# KiB of an SM's shared memory, by compute capability
SHARED = {
    (8, 0): 164,
    (8, 6): 100,
    (8, 7): 164,
    (8, 9): 100,
    (9, 0): 228,
    (10, 0): 228,
    (10, 3): 228,
    (12, 0): 100,
    (12, 1): 100,
}
OWN = 1024  # bytes of shared memory that a CTA takes beside what it asks for


class Card(NamedTuple):
    shared: int  # bytes of an SM's shared memory; one CTA can get all but OWN of it
    overlaps: bool  # whether it has PDL
    products: Literal["mma", "wgmma", "tcgen05"]  # what Triton multiplies 64 rows with, if four or eight warps do it


def card_of(capability: tuple[int, int]) -> Card:
    """The card of this compute capability. An unknown one is taken for the smallest."""
    products: dict[int, Literal["wgmma", "tcgen05"]] = {9: "wgmma", 10: "tcgen05", 11: "tcgen05"}
    shared = 1024 * SHARED.get(capability, min(SHARED.values()))
    return Card(shared, capability >= HOPPER, products.get(capability[0], "mma"))
