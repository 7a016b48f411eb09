"""Perplexity, KL divergence and top-1 agreement with the 16-bit cache, token by token."""

import math
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from kvfold.kept_parts import NOTHING_KEPT, Parts
from kvfold.ops.dense import divergence

# Tokens per call of the model, and per softmax. They bound the memory of logits and change no answer: with 152,000
# words a call has 0.6 GB of logits in 16 bits, and a softmax 0.2 GB.
CHUNK = 2048
SLICE = 256
LONG = 16_384  # positions from here on are also reported apart
TAIL = 99.9  # percentile of KL


@dataclass
class Scores:
    """What was measured of each scored token: float64[tokens]."""

    positions: np.ndarray = field(default_factory=lambda: np.empty(0))  # in the passage; tokens read before
    nll: np.ndarray = field(default_factory=lambda: np.empty(0))
    kls: np.ndarray = field(default_factory=lambda: np.empty(0))
    agreed: np.ndarray = field(default_factory=lambda: np.empty(0))

    def add(self, start: int, logits: Tensor, reference: Tensor, targets: Tensor) -> None:
        """Add tokens from position `start` on. Logits are [tokens, vocabulary]; `targets` are the next tokens."""
        parts = []
        for own, other, target in zip(*(each.split(SLICE) for each in (logits, reference, targets)), strict=True):
            q, p = (torch.log_softmax(each.float(), dim=-1) for each in (own, other))
            nll = -q.gather(1, target.unsqueeze(1)).squeeze(1)
            agreed = q.argmax(dim=-1) == p.argmax(dim=-1)
            parts.append(torch.stack((nll, divergence(p, q), agreed.float())))
        measured = torch.cat(parts, dim=1).double().cpu().numpy()
        self.positions = np.append(self.positions, np.arange(start, start + len(targets)))
        self.nll, self.kls, self.agreed = map(np.append, (self.nll, self.kls, self.agreed), measured)

    def extend(self, more: "Scores") -> None:
        """Add the scores of other passages."""
        for name, numbers in vars(more).items():
            setattr(self, name, np.append(getattr(self, name), numbers))

    def extend_written(self, written: str) -> None:
        """Add the tokens of scores that were `written`."""
        parts = np.frombuffer(b64decode(written)).reshape(4, -1)
        self.positions, self.nll, self.kls, self.agreed = map(np.append, vars(self).values(), parts)

    def written(self) -> str:
        """Exactly, as text."""
        return b64encode(np.stack(list(vars(self).values())).tobytes()).decode()

    def beyond(self, position: int) -> "Scores | None":
        """The scores of tokens from this position on, if there are any."""
        there = self.positions >= position
        return Scores(*(each[there] for each in vars(self).values())) if there.any() else None

    @property
    def tokens(self) -> int:
        return len(self.nll)

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nll.mean(), 700.0))

    @property
    def kl(self) -> float:
        return max(0.0, float(self.kls.mean()))  # sums of nearly equal float32 numbers may fall just below zero

    @property
    def kl_99(self) -> float:
        """The KL that one token in a hundred exceeds."""
        return max(0.0, float(np.percentile(self.kls, 99)))

    @property
    def kl_tail(self) -> float:
        """The KL that one token in a thousand exceeds."""
        return max(0.0, float(np.percentile(self.kls, TAIL)))

    @property
    def top1(self) -> float:
        return float(self.agreed.mean())


@torch.no_grad()
def compare(
    model: PreTrainedModel,
    tokens: Tensor,
    context: int,
    reference: Callable[[], Cache],
    caches: dict[str, Callable[[], Cache]],
    advance: Callable[[float], None] = lambda share: None,
    parts: Parts = NOTHING_KEPT,  # a passage each
) -> tuple[Scores, dict[str, Scores]]:
    """Score every cache on `tokens` (1-D), in passages of `context` tokens. Each passage begins with an empty cache."""
    own, *others = (Scores() for _ in range(1 + len(caches)))
    for number, passage in enumerate(tokens.to(model.device).split(context)):
        if len(passage) < 2:
            continue
        if number in parts:
            advance(len(passage) / len(tokens))
        measure = partial(_compare, model, passage, [reference, *caches.values()], len(tokens), advance)
        for scores, written in zip((own, *others), parts(number, measure), strict=True):
            scores.extend_written(written)
    if not own.tokens:
        raise ValueError("nothing to score: the text needs at least two tokens")
    return own, dict(zip(caches, others, strict=True))


def _compare(
    model: PreTrainedModel,
    passage: Tensor,
    caches: list[Callable[[], Cache]],
    total: int,
    advance: Callable[[float], None],
) -> list[str]:
    """The scores of the caches on a passage out of `total` tokens, as `written`. The first cache is the reference.

    The caches take turns per chunk. So the logits of the reference are computed once and kept for one chunk only.
    """
    filled = [make() for make in caches]
    scores = [Scores() for _ in filled]
    for start in range(0, len(passage) - 1, CHUNK):
        chunk = passage[start : min(start + CHUNK, len(passage) - 1)]
        targets = passage[start + 1 : start + 1 + len(chunk)]
        expected = None
        for own, cache in zip(scores, filled, strict=True):
            logits = _logits(model, chunk, cache)
            expected = logits if expected is None else expected
            own.add(start, logits, expected, targets)
            advance(len(chunk) / total / len(caches))
    return [own.written() for own in scores]


def _logits(model: PreTrainedModel, tokens: Tensor, cache: Cache) -> Tensor:
    logits: Tensor = model(tokens.unsqueeze(0), past_key_values=cache, use_cache=True).logits[0]
    if not all(torch.isfinite(part).all() for part in logits.split(SLICE)):
        raise ValueError("the model gave logits that are not finite")
    return logits
