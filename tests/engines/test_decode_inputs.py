"""A decode step in SGLang's words, in one launch, against one row after the other in plain Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.engines.sglang.decode_inputs import decode_inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE, REQUESTS = 16, 40


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(PAGE, 2**33)), max_size=REQUESTS - 1), st.integers(0, 9))
def test_padding_is_kept_apart(dtype, running, padding):
    """Requests are any but the first; padding is of that one, with one token in the first page."""
    rows = [(request, *row) for request, row in zip(reversed(range(1, REQUESTS)), running, strict=False)]
    rows += [(0, 1, offset) for offset in range(padding)]
    if not rows:
        return
    requests, lengths, slots = (torch.tensor(column, device=DEVICE) for column in zip(*rows, strict=True))
    known = torch.full((REQUESTS,), -1, dtype=torch.int32, device=DEVICE)
    step = decode_inputs(slots, lengths.to(dtype), requests.to(dtype), known, PAGE)
    real = [slot >= PAGE for _, _, slot in rows]
    assert step.locations.tolist() == [slot if own else -1 for (_, _, slot), own in zip(rows, real, strict=True)]
    assert step.query_starts.tolist() == list(range(len(rows) + 1))
    assert step.starts.tolist() == [length - 1 for _, length, _ in rows]
    assert step.lengths.tolist() == [length for _, length, _ in rows]
    assert step.kept_lengths.tolist() == [length * own for (_, length, _), own in zip(rows, real, strict=True)]
    assert step.kept_starts.tolist() == [(length - 1) * own for (_, length, _), own in zip(rows, real, strict=True)]
    expected = {request: length for request, length, _ in rows}
    assert known.tolist() == [expected.get(request, -1) for request in range(REQUESTS)]
    assert {number.dtype for number in step[1:]} == {torch.int32}
    assert all(number.data_ptr() % 16 == 0 for number in step)
