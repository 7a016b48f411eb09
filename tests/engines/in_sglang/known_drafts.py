"""Stands in for the corpus of SGLang's NGRAM, which a compiler would have to build."""

from collections.abc import Sequence

import numpy as np
from sglang.srt.speculative.cpp_ngram import ngram_corpus

WRONG = 3  # every so many tokens of a text, a draft is wrong


class KnownTexts:
    """Drafts are the next tokens of texts, some of them wrong, in a tree: beside the first of them is another token."""

    texts: Sequence[list[int]]

    def __init__(self, *, draft_token_num: int, **_: object) -> None:
        self.n = draft_token_num

    def match_stateful(
        self, states: list[int], tails: list[list[int]], lengths: list[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        masks = np.tri(self.n, dtype=np.int64)
        masks[2:, 1] = 0  # the token 1 is on no path but its own
        drafts = [self.drafts(tail, length) for tail, length in zip(tails, lengths, strict=True)]
        return np.array(drafts, np.int64).flatten(), np.tile(masks.flatten(), len(drafts))

    def drafts(self, tail: list[int], length: int) -> list[int]:
        (text,) = (text for text in self.texts if text[:length][-len(tail) :] == tail)
        wrong = [text[i] + (i % WRONG == 0) for i in range(length, min(len(text), length + self.n - 2))]
        return [tail[-1], 1, *wrong, *[0] * (self.n - 2 - len(wrong))]

    def nothing(self, *_: object) -> None:
        """It learns nothing."""

    insert = synchronize = erase_states = reset = nothing


def draft_from(texts: Sequence[list[int]]) -> None:
    """Let NGRAM draft from texts, each of which begins with a prompt."""
    corpus = type("Corpus", (KnownTexts,), {"texts": texts})
    ngram_corpus.get_ngram_corpus_cls = lambda: corpus
