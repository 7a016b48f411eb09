"""Overlap against n-grams in Python sets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvfold.calibration.text_overlap import check_disjoint, overlap, text_hashes
from kvfold.models import EMBEDDED, load_tokenizer
from kvfold.text import default_text, tokenize

CALIBRATION = torch.randint(0, 50_000, (300,), generator=torch.Generator().manual_seed(0))
PIECES = st.one_of(
    st.lists(st.integers(0, 50_000), max_size=40),
    st.tuples(st.integers(0, 299), st.integers(1, 100)).map(lambda p: CALIBRATION[p[0] : p[0] + p[1]].tolist()),
)


def by_hand(tokens: list[int], calibration: list[int]) -> float:
    known = {tuple(calibration[i : i + 32]) for i in range(0, len(calibration) - 31, 32)}
    starts = [i for i in range(len(tokens) - 31) if tuple(tokens[i : i + 32]) in known]
    covered = {i + j for i in starts for j in range(32)}
    return len(covered) / len(tokens) if tokens else 0.0


@given(st.lists(PIECES, max_size=5))
def test_overlap_is_what_n_grams_in_a_set_give(pieces: list[list[int]]):
    tokens = [token for piece in pieces for token in piece]
    found = overlap(torch.tensor(tokens, dtype=torch.int64), text_hashes(CALIBRATION))
    assert found == pytest.approx(by_hand(tokens, CALIBRATION.tolist()))


@given(st.lists(st.integers(0, 1), max_size=80), st.lists(st.integers(0, 1), max_size=80))
def test_tokens_of_few_kinds_do_not_collide(tokens: list[int], calibration: list[int]):
    found = overlap(torch.tensor(tokens, dtype=torch.int64), text_hashes(torch.tensor(calibration, dtype=torch.int64)))
    assert found == pytest.approx(by_hand(tokens, calibration))


def test_hashes_stay_as_artifacts_hold_them():
    expected = sum((7 + j) * pow(0x9E3779B97F4A7C15, j + 1) for j in range(32)) % 2**64
    found = text_hashes(torch.arange(7, 7 + 63))
    assert found.dtype == torch.int64
    assert [number % 2**64 for number in found.tolist()] == [expected]


def test_overlap_is_refused_with_its_size():
    known = text_hashes(CALIBRATION)
    check_disjoint(torch.arange(1000), known)
    with pytest.raises(ValueError, match=r"64 of the 1,064 evaluation tokens were calibrated on.*another text"):
        check_disjoint(torch.cat((torch.arange(1000), CALIBRATION[32:96])), known)


def test_the_halves_of_the_default_text_are_disjoint():
    tokenizer = load_tokenizer(EMBEDDED)
    calibration, evaluation = (tokenize(default_text(half), tokenizer, 8192) for half in ("calibration", "evaluation"))
    assert overlap(evaluation, text_hashes(calibration)) == 0
    assert overlap(calibration, text_hashes(calibration)) == 1
