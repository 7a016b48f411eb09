"""Perplexity, KL divergence and top-1 agreement with the 16-bit cache, token by token."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

CHUNK = 512  # tokens per call of the model; it bounds the memory of logits and changes no answer


@dataclass
class Scores:
    """Sums over the scored tokens."""

    tokens: int = 0
    nll: float = 0.0
    kl_sum: float = 0.0
    agreed: int = 0

    def add(self, log_probs: Tensor, reference: Tensor, targets: Tensor) -> None:
        """Add tokens. `log_probs` and `reference` are [tokens, vocabulary]; `targets` are the tokens that followed."""
        self.tokens += len(targets)
        self.nll -= log_probs.gather(1, targets.unsqueeze(1)).double().sum().item()
        self.kl_sum += (reference.exp() * (reference - log_probs)).sum(dim=-1).double().sum().item()
        self.agreed += int((log_probs.argmax(dim=-1) == reference.argmax(dim=-1)).sum())

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nll / self.tokens, 700.0))

    @property
    def kl(self) -> float:
        return max(0.0, self.kl_sum / self.tokens)  # sums of nearly equal float32 numbers may fall just below zero

    @property
    def top1(self) -> float:
        return self.agreed / self.tokens


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
            expected = _log_probs(model, chunk, reference_cache)
            own.add(expected, expected, targets)
            advance(len(chunk) / len(tokens) / (1 + len(caches)))
            for name, cache in filled.items():
                others[name].add(_log_probs(model, chunk, cache), expected, targets)
                advance(len(chunk) / len(tokens) / (1 + len(caches)))
    if not own.tokens:
        raise ValueError("nothing to score: the text needs at least two tokens")
    return own, others


def _log_probs(model: PreTrainedModel, tokens: Tensor, cache: Cache) -> Tensor:
    logits = model(tokens.unsqueeze(0), past_key_values=cache, use_cache=True).logits[0].float()
    if not torch.isfinite(logits).all():
        raise ValueError("the model gave logits that are not finite")
    return torch.log_softmax(logits, dim=-1)
