"""A decode step in SGLang's words, in one launch, against one row after the other in plain Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.engines.sglang.decode_inputs import decode_inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 16


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("drafts", [0, 1, 4])
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(PAGE, 2**33)), max_size=40), st.integers(0, 9))
def test_padding_is_kept_apart(dtype, drafts, running, padding):
    """Padding is in the first page. SGLang's lengths include the token of a request that has no drafts."""
    rows = running + [(1, 0)] * padding
    if not rows:
        return
    n, counted = 1 + drafts, int(not drafts)
    lengths, first = (torch.tensor(column, device=DEVICE) for column in zip(*rows, strict=True))
    real = [slot >= PAGE for _, slot in rows]
    slots = torch.where(first.unsqueeze(1) < PAGE, 0, first.unsqueeze(1) + torch.arange(n, device=DEVICE))
    step = decode_inputs(slots.flatten(), lengths.to(dtype), PAGE, counted)
    expected = [slot + i if own else -1 for (_, slot), own in zip(rows, real, strict=True) for i in range(n)]
    starts = [length - counted if own else 0 for (length, _), own in zip(rows, real, strict=True)]
    assert step.locations.tolist() == expected
    assert step.query_starts.tolist() == [n * row for row in range(len(rows) + 1)]
    assert step.starts.tolist() == starts
    assert step.lengths.tolist() == [start + n for start in starts]
    assert {number.dtype for number in step[1:]} == {torch.int32}
    assert all(number.data_ptr() % 16 == 0 for number in step)
