"""Perplexity, KL divergence and top-1 agreement with the 16-bit cache, token by token."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

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
) -> tuple[Scores, dict[str, Scores]]:
    """Score every cache on `tokens` (1-D), in passages of `context` tokens. Each passage begins with an empty cache.

    The caches take turns per chunk. So the logits of the reference are computed once and kept for one chunk only.
    """
    own, others = Scores(), {name: Scores() for name in caches}
    for passage in tokens.to(model.device).split(context):
        if len(passage) < 2:
            continue
        reference_cache = reference()
        filled = {name: make() for name, make in caches.items()}
        for start in range(0, len(passage) - 1, CHUNK):
            chunk = passage[start : min(start + CHUNK, len(passage) - 1)]
            targets = passage[start + 1 : start + 1 + len(chunk)]
            expected = _logits(model, chunk, reference_cache)
            own.add(start, expected, expected, targets)
            advance(len(chunk) / len(tokens) / (1 + len(caches)))
            for name, cache in filled.items():
                others[name].add(start, _logits(model, chunk, cache), expected, targets)
                advance(len(chunk) / len(tokens) / (1 + len(caches)))
    if not own.tokens:
        raise ValueError("nothing to score: the text needs at least two tokens")
    return own, others


def _logits(model: PreTrainedModel, tokens: Tensor, cache: Cache) -> Tensor:
    logits: Tensor = model(tokens.unsqueeze(0), past_key_values=cache, use_cache=True).logits[0]
    if not all(torch.isfinite(part).all() for part in logits.split(SLICE)):
        raise ValueError("the model gave logits that are not finite")
    return logits
