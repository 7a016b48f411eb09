"""The open block against its rule: which tokens a query at each position reads raw, one by one."""

import pytest
import torch

from kvfold.format.open_block import DRAFTED, packed_from, raw_from, ring_tokens

BLOCKS = [0, 1, 2, 5, 16, 64]


def is_raw(block: int, j: int, t: int) -> bool:
    """Whether the query at t reads token j ≤ t raw: it lies in the block of the query."""
    return block > 0 and j // block == t // block


@pytest.mark.parametrize("block", BLOCKS)
def test_raw_from(block):
    from_tensor = raw_from(torch.arange(200), block).tolist()
    for t in range(200):
        assert list(range(raw_from(t, block), t + 1)) == [j for j in range(t + 1) if is_raw(block, j, t)]
        assert from_tensor[t] == raw_from(t, block)


@pytest.mark.parametrize("block", BLOCKS)
def test_packed_from(block):
    for j in range(100):
        first = next(t for t in range(j, 300) if not is_raw(block, j, t))
        assert packed_from(j, block) == first
        assert not any(is_raw(block, j, t) for t in range(first, 300)), "once packed, for ever"


@pytest.mark.parametrize("block", BLOCKS[1:])
def test_a_ring_holds_the_open_block_whatever_is_taken_back(block):
    """A ring of R tokens holds the last R that were written. After a step with drafts, any but the first of its tokens
    may go, and the next query reads its block raw."""
    room = ring_tokens(block)
    for start in range(3 * block + 2 * DRAFTED):
        for count in range(1, DRAFTED + 1):
            written = range(max(0, start + count - room), start + count)
            for length in range(start + 1, start + count + 1):
                assert all(j in written for j in range(length // block * block, length))
            # and no query of the step itself loses an older token to a new one
            assert all(j in written for j in range(start // block * block, start))
