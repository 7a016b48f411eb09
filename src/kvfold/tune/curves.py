"""What packed keys and values cost: the KL of the model's predictions from those with a 16-bit cache.

Two tests, each a passage of the same length:
- text: a passage of the user's text;
- copy: random tokens twice. The second time, the model has to find what followed the first time, as in retrieval.

The open block is that of the tuned recipe, but at most a quarter of a passage. So most of what a query reads is packed,
though passages may be short, and what only reads its neighbours costs little, as when served.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, PreTrainedTokenizerBase
from transformers.masking_utils import sdpa_mask

from kvfold.calibration.tap import attending
from kvfold.format.codec import Codec, sixteen_bit
from kvfold.geometry import Geometry
from kvfold.kept_parts import NOTHING_KEPT, Name, Parts
from kvfold.ops.dense import divergence
from kvfold.recipes import TUNED
from kvfold.text import with_openings
from kvfold.unpacked_attention import attend_masked, attend_unpacked, logits_of

IMPLEMENTATION = "kvfold-tune"
TESTS = ("text", "copy")

Packed = Mapping[int, tuple[Codec | None, Codec | None]]  # codecs of keys and values, by layer; None: in 16 bits

_packed: ContextVar[Packed] = ContextVar("kvfold-tune")


def passages(text: Tensor, length: int, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """int64[pairs, tests, length]: the passages of `text` (1-D), and beside each one its tokens in random order, twice.

    What is left of the text behind the last whole passage is not used.
    """
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for passage in text[: len(text) // length * length].split(length):
        once = passage[torch.randperm(length, generator=generator)[: length // 2]]
        rows = passage, torch.cat((once, once, once))[:length]
        pairs.append(torch.stack([with_openings(row, length, tokenizer) for row in rows]))
    return torch.stack(pairs)


@torch.no_grad()
def divergences(
    model: PreTrainedModel,
    pairs: Tensor,
    changes: Mapping[Name, Packed],
    advance: Callable[[float], None] = lambda share: None,
    parts: Parts = NOTHING_KEPT,  # a change on a pair each
) -> dict[Name, Tensor]:
    """Per change, float64[tests]: the mean KL per token, if the layers of the change are packed and all others are not.

    `pairs` come from `passages`. `advance` gets shares of 1.
    """
    geometry = Geometry.from_config(model.config.to_dict())
    # the head takes time too
    weights = {name: 1.1 * len(geometry.layers) - min(change) for name, change in changes.items()}
    total = {name: torch.zeros(len(TESTS), dtype=torch.float64) for name in changes}
    with attending(model, IMPLEMENTATION):
        for number, pair in enumerate(pairs):
            run = _Run(model, geometry, pair.to(model.device))
            for name, change in changes.items():
                kl = parts((number, name), partial(run.divergence, change))
                total[name] += torch.tensor(kl, dtype=torch.float64)
                advance(weights[name] / sum(weights.values()) / len(pairs))
    # sums of nearly equal numbers may fall just below zero
    return {name: (kl / len(pairs)).clamp_min(0) for name, kl in total.items()}


class _Run:
    """One pair of passages: what the model computes with a 16-bit cache, and how far a packed one is from it."""

    def __init__(self, model: PreTrainedModel, geometry: Geometry, pair: Tensor) -> None:
        self.model, self.pair = model, pair
        self.readers = {n: layer.target for n, layer in enumerate(geometry.layers) if layer.target is not None}
        # layers that read the cache of others need these to run
        self.layers: Sequence[nn.Module] = () if self.readers else getattr(model.get_decoder(), "layers", ())
        self.outputs: list[Any] = []

    @cached_property
    def expected(self) -> list[Tensor]:
        """Per test, the log-probabilities with a 16-bit cache. Keeps what every layer gives."""
        hooks = [layer.register_forward_hook(lambda *seen: self.outputs.append(seen[-1])) for layer in self.layers]
        try:
            return self._log_probs({})
        finally:
            for hook in hooks:
                hook.remove()

    def divergence(self, packed: Packed) -> list[float]:
        """Per test."""
        expected = self.expected
        shared = {n: packed[target] for n, target in self.readers.items() if target in packed}
        first = min(packed)
        with _skipped(self.layers[:first], self.outputs[first - 1] if first and self.layers else None):
            found = self._log_probs({**packed, **shared})
        kl = [divergence(p, q).double().mean() for p, q in zip(expected, found, strict=True)]
        return torch.stack(kl).tolist()

    def _log_probs(self, packed: Packed) -> list[Tensor]:
        """Per test: float32[scored tokens, vocabulary]."""
        token = _packed.set(packed)
        try:  # before its middle, a passage reads little that is packed
            logits = self.model(self.pair, use_cache=False, logits_to_keep=-(-self.pair.shape[1] // 2)).logits
        finally:
            _packed.reset(token)
        scored = logits[0], logits[1, :-1]  # what follows the copy is not in the passage
        return [torch.log_softmax(each.float(), dim=-1) for each in scored]


@contextmanager
def _skipped(layers: Sequence[nn.Module], output: Any) -> Iterator[None]:
    """These layers, the first of the model, return `output` instead of running."""
    replaced = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        for layer, forward in zip(layers, replaced, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    layer: int = module.layer_idx  # type: ignore[assignment]
    codecs, n = _packed.get().get(layer), query.shape[2]
    if codecs is None:
        return attend_unpacked(module, query, key, value, attention_mask, scaling=scaling, **kwargs), None
    causal = torch.ones(len(query), 1, n, n, dtype=torch.bool, device=query.device).tril()
    logits, block = logits_of(query, scaling, kwargs), min(TUNED.block, max(1, n // 4))
    out = attend_masked(query, key, value, causal, logits, codecs, block, sixteen_bit(query.dtype))
    return out.to(query.dtype), None


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
