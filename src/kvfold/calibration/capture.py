"""Capture: run a text through a model once, and keep statistics of its attention layers."""

import hashlib
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvfold.calibration.rope_probe import probe
from kvfold.calibration.statistics import FIRST_TOKENS, PROMPT, QUERIES, LayerStatistics, Statistics
from kvfold.calibration.tap import Seen, tapped
from kvfold.geometry import Geometry, UnsupportedModel
from kvfold.ops.pages import Logits

BEGINNINGS = 64  # tokens whose keys at position 0 are looked at, at most
SAMPLES = 4096  # tokens whose keys and values are kept, at most


@torch.no_grad()
def capture(
    model: PreTrainedModel,
    tokens: Tensor,
    context: int = 2048,
    *,
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 30,
    progress: Callable[[float], None] = lambda share: None,
) -> Statistics:
    """Run `tokens` (1-D) through the model in passages of `context` tokens, each alone. `progress` gets shares of 1.

    With a `checkpoint`, statistics are saved there at the end, and after a passage if the last save is
    `checkpoint_seconds` old. An interrupted run continues from there, with exactly the same result.
    """
    if len(tokens) <= FIRST_TOKENS:
        raise ValueError(f"calibration needs more than {FIRST_TOKENS} tokens")
    statistics = _begin(model, tokens, context, checkpoint)
    first_keys = _first_keys(model, _beginnings(model, tokens))
    sampled = _spread(len(tokens), context)
    saved = time.monotonic()
    for index, passage in enumerate(tokens.split(context)):
        if index >= statistics.passages and len(passage) > FIRST_TOKENS:
            _add_passage(statistics.layers, model, passage, sampled, index * context, first_keys)
            statistics.passages = index + 1
            if checkpoint and time.monotonic() - saved >= checkpoint_seconds:
                statistics.save(checkpoint)
                saved = time.monotonic()
        progress(len(passage) / len(tokens))
    for layer in statistics.layers:
        layer.to_host()
    if checkpoint:
        statistics.save(checkpoint)
    return statistics


def left_by(checkpoint: Path, tokens: int, context: int) -> str:
    """What an interrupted run has left, and how to continue."""
    if not checkpoint.exists():
        return "Nothing is kept: the run had not come to its first checkpoint."
    done = min(tokens, context * Statistics.passages_in(checkpoint))
    return f"{checkpoint} keeps {done:,} of {tokens:,} tokens: the same command goes on from there."


@torch.no_grad()
def collect(model: PreTrainedModel, tokens: Tensor) -> dict[int, tuple[Tensor, Tensor, Tensor, Logits]]:
    """Per packed layer: q [q_heads, n, d], k and v [kv_heads, n, d] (float32, in host memory), and its logits.

    `tokens` (1-D) are one passage.
    """
    layers: dict[int, tuple[Tensor, Tensor, Tensor, Logits]] = {}

    def keep(seen: Seen) -> None:
        q, k, v = (states.transpose(0, 1).float().cpu() for states in (seen.q, seen.k, seen.v))
        layers[seen.layer] = (q, k, v, seen.logits)

    _run(model, tokens.unsqueeze(0), keep)
    return layers


def _begin(model: PreTrainedModel, tokens: Tensor, context: int, checkpoint: Path | None) -> Statistics:
    """The statistics of the checkpoint, or empty ones."""
    digest = hashlib.sha256(f"{model.config.to_json_string()} {context} {PROMPT} {QUERIES} ".encode())
    digest.update(tokens.to("cpu", torch.int64).numpy().tobytes())
    if not checkpoint or not checkpoint.exists():
        return Statistics([], probe(model), digest.hexdigest())
    statistics = Statistics.load(checkpoint)
    if statistics.source != digest.hexdigest():
        raise ValueError(
            f"{checkpoint} was saved by a run with another model, text, context or kvfold; delete it to begin anew"
        )
    return statistics


def _spread(tokens: int, context: int) -> Tensor:
    """int64[m]: indices of the sampled tokens, ascending. The first tokens of a passage are not sampled."""
    index = torch.arange(tokens)
    index = index[index % context >= FIRST_TOKENS]
    m = min(SAMPLES, len(index))
    return index[torch.arange(m) * len(index) // m]


def _add_passage(
    layers: list[LayerStatistics],
    model: PreTrainedModel,
    passage: Tensor,
    sampled: Tensor,
    start: int,
    first_keys: list[Tensor],
) -> None:
    """Run the passage that begins at token `start` of the text, and add it to the statistics of every layer."""
    first, end = torch.searchsorted(sampled, torch.tensor([start, start + len(passage)])).tolist()

    numbers = count()

    def add(seen: Seen) -> None:
        if (number := next(numbers)) == len(layers):
            costs = _output_costs(model, seen)
            layers.append(LayerStatistics.begin(seen, len(sampled), first_keys[number], costs))
        layers[number].add(seen, sampled[first:end] - start, first)

    _run(model, passage.unsqueeze(0), add)


def _beginnings(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Tokens that texts may begin with: BOS if this text begins with it, else some of the text's tokens. Their keys at
    position 0 are nearly the same, if the model uses it as an attention sink."""
    if int(tokens[0]) == model.config.get_text_config().bos_token_id:
        return tokens[:1]
    return tokens[:: max(1, len(tokens) // BEGINNINGS)][:BEGINNINGS]


def _first_keys(model: PreTrainedModel, tokens: Tensor) -> list[Tensor]:
    """Per packed layer, the keys [n, kv_heads, d] of n tokens at position 0."""
    keys: list[Tensor] = []
    _run(model, tokens.unsqueeze(1), lambda seen: keys.append(seen.k))
    return keys


def _output_costs(model: PreTrainedModel, seen: Seen) -> Tensor | None:
    """Σ W·Wᵀ over the query heads of each KV head, float64[kv_heads, d, d]. W [d, hidden] is the part of a head in the
    output projection. None where the layer has no plain one."""
    (_, kv_heads, dims), q_heads = seen.v.shape, seen.q.shape[1]
    layers = getattr(model.get_decoder(), "layers", None)
    linear = getattr(getattr(layers[seen.layer], "self_attn", None), "o_proj", None) if layers is not None else None
    if not isinstance(linear, nn.Linear) or linear.in_features != q_heads * dims:
        return None
    heads = linear.weight.double().unflatten(1, (kv_heads, -1, dims))  # [hidden, kv_heads, ratio, d]
    return torch.einsum("nhrd,nhre->hde", heads, heads)


def _run(model: PreTrainedModel, passages: Tensor, tap: Callable[[Seen], None]) -> None:
    """One forward pass of the decoder over passages [n, tokens]. `tap` sees the packed layers in order."""
    expected = iter(Geometry.from_config(model.config.to_dict()).packed)

    def check(seen: Seen) -> None:
        if seen.layer != next(expected, None):
            raise UnsupportedModel(f"{type(model).__name__}: its layers do not each call attention once, in order")
        for name in ("q", "k", "v", "out"):
            if not torch.isfinite(getattr(seen, name)).all():
                raise ValueError(f"layer {seen.layer}: {name} holds NaN or infinity")
        tap(seen)

    with tapped(model, check) as decoder:
        decoder(passages.to(model.device), use_cache=False)
    if (missing := next(expected, None)) is not None:
        raise UnsupportedModel(f"{type(model).__name__}: its layer {missing} did not call the attention function")
