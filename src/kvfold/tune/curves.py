"""What packed keys and values cost: the KL of the model's predictions from those with a 16-bit cache.

Two tests, each a passage of the same length:
- text: a passage of the user's text;
- copy: random tokens twice. The second time, the model has to find what followed the first time, as in retrieval.

All tokens but the sink are read packed, the query's own included. So nothing hides behind a window of recent tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, PreTrainedTokenizerBase
from transformers.masking_utils import sdpa_mask

from kvfold.calibration.tap import attending
from kvfold.engines.unpacked_attention import attend_unpacked
from kvfold.format.codec import Codec
from kvfold.geometry import Geometry
from kvfold.recipes import TUNED
from kvfold.text import with_openings

IMPLEMENTATION = "kvfold-tune"
TESTS = ("text", "copy")
SINK = TUNED.sink

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
    changes: Sequence[Packed],
    advance: Callable[[float], None] = lambda share: None,
) -> Tensor:
    """float64[changes, tests]: the mean KL per token, if the layers of a change are packed and all others are not.

    `pairs` come from `passages`. `advance` gets shares of 1.
    """
    geometry = Geometry.from_config(model.config.to_dict())
    weights = [1.25 * len(geometry.layers) - min(change) for change in changes]  # the head takes a fifth of the time
    total = torch.zeros(len(changes), len(TESTS), dtype=torch.float64)
    with attending(model, IMPLEMENTATION):
        for pair in pairs:
            run = _Run(model, geometry, pair.to(model.device))
            for row, change, weight in zip(total, changes, weights, strict=True):
                row += run.divergence(change)
                advance(weight / sum(weights) / len(pairs))
    return (total / len(pairs)).clamp_min(0)  # sums of nearly equal numbers may fall just below zero


class _Run:
    """One pair of passages: what the model computes with a 16-bit cache, and how far a packed one is from it."""

    def __init__(self, model: PreTrainedModel, geometry: Geometry, pair: Tensor) -> None:
        self.model, self.pair = model, pair
        self.readers = {n: layer.target for n, layer in enumerate(geometry.layers) if layer.target is not None}
        # layers that read the cache of others need these to run
        self.layers: Sequence[nn.Module] = () if self.readers else getattr(model.get_decoder(), "layers", ())
        self.outputs: list[Any] = []
        hooks = [layer.register_forward_hook(lambda *seen: self.outputs.append(seen[-1])) for layer in self.layers]
        try:
            self.expected = self._log_probs({})
        finally:
            for hook in hooks:
                hook.remove()

    def divergence(self, packed: Packed) -> Tensor:
        """float64[tests]"""
        shared = {n: packed[target] for n, target in self.readers.items() if target in packed}
        first = min(packed)
        with _skipped(self.layers[:first], self.outputs[first - 1] if first and self.layers else None):
            found = self._log_probs({**packed, **shared})
        kl = [(p.exp() * (p - q)).sum(dim=-1).double().mean() for p, q in zip(self.expected, found, strict=True)]
        return torch.stack(kl).cpu()

    def _log_probs(self, packed: Packed) -> list[Tensor]:
        """Per test: float32[scored tokens, vocabulary]."""
        token = _packed.set(packed)
        try:
            logits = self.model(self.pair, use_cache=False).logits
        finally:
            _packed.reset(token)
        middle = self.pair.shape[1] // 2
        # nothing is packed before the first of these; what the model predicts after the copy is not in the passage
        scored = logits[0, min(SINK, middle) :], logits[1, middle:-1]
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


def _read(codec: Codec | None, states: Tensor) -> Tensor:
    """Keys or values [batch, kv_heads, n, d] as they are read: the sink raw, all others packed."""
    if codec is None:
        return states
    tokens = states.transpose(1, 2)
    packed = codec.decode(codec.encode(tokens)).to(states.dtype)
    return torch.cat((tokens[:, :SINK], packed[:, SINK:]), dim=1).transpose(1, 2)


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
    codecs = _packed.get().get(layer, (None, None))
    k, v = (_read(codec, states) for codec, states in zip(codecs, (key, value), strict=True))
    return attend_unpacked(module, query, k, v, attention_mask, scaling=scaling, **kwargs), None


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
