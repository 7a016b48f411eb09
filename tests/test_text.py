import logging
import re
from pathlib import Path

import pytest
import torch

from kvfold.text import default_text, read_text, tokenize


def test_halves_share_no_paragraph_and_are_alike_in_size():
    calibration, evaluation = default_text("calibration"), default_text("evaluation")
    paragraphs = [{p.strip() for p in re.split(r"\n\s*\n", text)} for text in (calibration, evaluation)]
    assert not paragraphs[0] & paragraphs[1]
    assert 0.6 < len(calibration) / len(evaluation) < 1.6


def test_each_half_is_long_enough_to_calibrate_and_evaluate_with(embedded):
    _, tokenizer = embedded
    for half in ("calibration", "evaluation"):
        assert read_text(None, half) == default_text(half)
        assert len(tokenize(default_text(half), tokenizer, 32_768)) == 32_768


def test_read_text_gives_the_users_file(tmp_path: Path):
    path = tmp_path / "text.txt"
    path.write_text("naïve – μ\n", encoding="utf-8")
    assert read_text(path, "evaluation") == "naïve – μ\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b" \n", "is empty"), (b"caf\xe9", "is not UTF-8")],
)
def test_read_text_says_what_is_wrong_with_the_file(tmp_path: Path, content: bytes | None, message: str):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises((OSError, ValueError), match=message) as caught:
        read_text(path, "evaluation")
    assert str(path) in str(caught.value)


def test_tokenize_gives_the_first_tokens_of_the_whole_text(embedded, caplog: pytest.LogCaptureFixture):
    _, tokenizer = embedded
    text = default_text("evaluation")
    with caplog.at_level(logging.WARNING):
        whole = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        for tokens in (1, 100, 8192, len(whole)):
            ids = tokenize(text, tokenizer, tokens)
            assert ids.dtype == torch.int64
            assert ids.tolist() == whole[:tokens]
    assert not caplog.records


def test_tokenize_finds_tokens_past_a_sparse_head(embedded):
    _, tokenizer = embedded
    text = " " * 4000 + "one two three " * 100
    assert tokenize(text, tokenizer, 100).tolist() == tokenizer(text)["input_ids"][:100]


def test_tokenize_says_how_many_tokens_a_short_text_has(embedded):
    _, tokenizer = embedded
    with pytest.raises(ValueError, match=r"has 5 tokens, fewer than the 6 "):
        tokenize("12345", tokenizer, 6)
