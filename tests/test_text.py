import logging
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from kvfold.text import (
    DOCUMENTATION,
    SOURCE,
    default_text,
    draw,
    haystack_texts,
    opening,
    read_text,
    tokenize,
    with_openings,
)


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
    [
        (None, "No such file"),
        (b" \n", "is empty"),
        (b"caf\xe9", "is not UTF-8"),
        (bytes(9), "is not text: it holds NUL"),
    ],
)
def test_read_text_says_what_is_wrong_with_the_file(tmp_path: Path, content: bytes | None, message: str):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises((OSError, ValueError), match=message) as caught:
        read_text(path, "evaluation")
    assert str(path) in str(caught.value)


def test_haystacks_come_from_two_kinds_of_text_or_from_the_users_files(tmp_path: Path):
    texts = haystack_texts([])
    assert list(texts) == [DOCUMENTATION, SOURCE]
    assert texts[DOCUMENTATION] == default_text("evaluation")
    assert len(texts[SOURCE]) > 1_000_000  # 15 haystacks of 32,768 tokens can be cut from different places
    assert "class ArgumentParser(" in texts[SOURCE]
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file in files:
        file.write_text(f"text of {file.name}")
    assert haystack_texts(files) == {"a.txt": "text of a.txt", "b.txt": "text of b.txt"}
    with pytest.raises(ValueError, match="same file name"):
        haystack_texts([*files, tmp_path / "folder" / "a.txt"])


def test_tokenize_gives_the_first_tokens_of_the_whole_text(embedded, caplog: pytest.LogCaptureFixture):
    _, tokenizer = embedded
    text = default_text("evaluation")
    with caplog.at_level(logging.WARNING):
        whole = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        for tokens in (1, 100, 8192, len(whole), None):
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


def words(begins: bool) -> PreTrainedTokenizerFast:
    """A tokenizer that names a BOS, and puts it before texts or not."""
    own = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="b"))
    own.pre_tokenizer = Whitespace()
    if begins:
        own.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>", eos_token="</s>")


def test_passages_begin_as_the_tokenizer_begins_a_text():
    """Naming a BOS is not enough: SmolLM2 names one that it was not trained to begin with."""
    text = tokenize("a b b a b b a", words(True), None)
    assert text.tolist() == [2, 3, 3, 2, 3, 3, 2]
    assert opening(words(True)).tolist() == [0]
    assert with_openings(text, 3, words(True)).tolist() == [0, 3, 3, 0, 3, 3, 0]
    assert text[0] == 2, "the tokens that were given stay as they were"
    assert opening(words(False)).tolist() == []
    assert torch.equal(with_openings(text, 3, words(False)), text)


def test_the_embedded_model_begins_with_the_text(embedded):
    assert opening(embedded[1]).tolist() == []


# draw: tokens are their own positions here, so that passages show where they come from


@pytest.mark.parametrize(
    ("length", "count", "context"), [(1000, 300, 50), (1000, 1000, 100), (999, 125, 10), (64, 5, 64)]
)
def test_passages_are_drawn_from_places_that_do_not_overlap(length: int, count: int, context: int):
    drawn = draw(torch.arange(length), count, context, seed=3)
    assert len(drawn) == count
    assert len(set(drawn.tolist())) == count, "no token comes twice"
    for passage in drawn.split(context):
        assert passage.tolist() == list(range(int(passage[0]), int(passage[0]) + len(passage)))


def test_passages_come_from_all_over_the_text_and_depend_on_the_seed_alone():
    tokens = torch.arange(100_000)
    state = torch.random.get_rng_state()
    starts = draw(tokens, 2000, 100, seed=0)[::100]
    assert torch.equal(starts, draw(tokens, 2000, 100, seed=0)[::100])
    assert not torch.equal(starts, draw(tokens, 2000, 100, seed=1)[::100])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert starts.tolist() != sorted(starts.tolist())
    assert starts.min() < 20_000
    assert starts.max() > 80_000


def test_a_text_that_is_too_short_to_draw_from_is_refused():
    assert len(draw(torch.arange(100), 100, 50, seed=0)) == 100
    for length, count, passages in ((99, 100, 2), (149, 101, 3), (49, 1, 1)):
        with pytest.raises(ValueError, match=f"has {length} tokens, too few for {passages} passages of 50"):
            draw(torch.arange(length), count, 50, seed=0)
