"""Windows against the definition: which tokens a query at each position reads in 16 bits, one by one."""

import pytest
import torch

from kvfold.format.windows import ROLLBACK, Windows

CASES = [
    Windows(sink, recent, group) for sink in (0, 1, 4, 9) for recent in (0, 1, 2, 7, 40) for group in (1, 2, 5, 16, 64)
]


def is_recent(windows: Windows, j: int, t: int) -> bool:
    """Whether the query at t reads token j ≤ t in 16 bits for another reason than that it lies in the sink."""
    full = t + 1 - (t + 1) % windows.group  # tokens in groups that are full once token t is there
    return j > t - windows.recent or j >= full


@pytest.mark.parametrize("windows", CASES, ids=str)
def test_exact_from(windows):
    positions = torch.arange(100)
    from_tensor = windows.raw_from(positions).tolist()
    for t in range(100):
        exact = [j for j in range(t + 1) if is_recent(windows, j, t)]
        assert list(range(max(0, windows.raw_from(t)), t + 1)) == exact
        assert from_tensor[t] == windows.raw_from(t)


@pytest.mark.parametrize("windows", CASES, ids=str)
def test_packed_from(windows):
    for j in range(50):
        assert windows.packed_from(j) == next(t for t in range(j, 200) if not is_recent(windows, j, t))
        # once packed, for ever
        assert not any(is_recent(windows, j, t) for t in range(windows.packed_from(j), 200))


@pytest.mark.parametrize("windows", CASES, ids=str)
def test_before(windows):
    """What the next token, at position `length`, reads in 16 bits, or needs to fill its group."""
    for length in range(100):
        group = length // windows.group
        needed = [
            j
            for j in range(length)
            if is_recent(windows, j, length) or (windows.group > 1 and j // windows.group == group)
        ]
        assert list(windows.before(length)) == needed


@pytest.mark.parametrize("windows", CASES, ids=str)
def test_spans_cover_what_is_read_and_what_may_be_taken_back(windows):
    for start in (0, 1, 5, 16, 30, 63, 64):
        for count in (0, 1, 2, 17, 40, 70):
            length = start + count
            kept = {j for span in windows.spans(start, length) for j in span}
            read = {
                j for t in range(start, length) for j in range(start) if j < windows.sink or is_recent(windows, j, t)
            }
            rolled_back = {
                j for after in range(max(start, length - ROLLBACK), length + 1) for j in windows.before(after)
            }
            sink = set(range(min(windows.sink, length)))
            assert read | rolled_back | sink <= kept
            # nothing but those, what the step found, and what follows the first of them
            recent = rolled_back | {
                j for j in range(max(start, length - ROLLBACK), length) if windows.recent or windows.group > 1
            }
            assert kept == sink | set(windows.before(start)) | recent
            for page_size in (1, 3, 16):
                assert windows.pages(start, length, page_size) == {j // page_size for j in kept}


def test_spans_by_hand():
    assert Windows(4, 8).spans(0, 100) == (range(4), range(0), range(61, 100))
    assert Windows(4, 8).spans(99, 100) == (range(4), range(92, 99), range(92, 100))
    assert list(map(list, Windows(4).spans(50, 100))) == [[0, 1, 2, 3], [], []]
    # a page of 32 is not full at 68 = 100 − 32, which may be rolled back to
    assert Windows(0, 0, 32).spans(0, 100) == (range(0), range(0), range(64, 100))
    assert list(Windows(0, 0, 32).spans(96, 97)[1]) == []
    assert Windows(0, 0, 32).spans(97, 98)[1:] == (range(96, 97), range(96, 98))


def test_what_counts_as_windows():
    assert not Windows()
    assert Windows(sink=1)
    assert Windows(recent=1)
    assert Windows(group=2)


@pytest.mark.parametrize(("sink", "recent"), [(-1, 0), (0, -1)])
def test_negative_windows_are_refused(sink, recent):
    with pytest.raises(ValueError, match="cannot be negative"):
        Windows(sink, recent)
