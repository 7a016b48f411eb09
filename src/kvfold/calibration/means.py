"""The mean post-RoPE key and mean value of every layer and KV head, for centring."""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

import kvfold
from kvfold.artifact import Artifact, Fingerprint, Metadata, Provenance
from kvfold.geometry import Geometry

FIRST_TOKENS = 4  # attention sinks: their keys are unlike all others, so they stay out of the mean


class _TapLayer(CacheLayerMixin):
    """Stands where a layer keeps its keys and values, sees them on their way to attention, keeps their sums."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.sums = torch.zeros(2, geometry.kv_heads, geometry.head_dim, dtype=torch.float64)
        self.tokens = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        for total, states in zip(self.sums, (key_states, value_states), strict=True):  # states [1, kv_heads, tokens, d]
            total += states[0, :, FIRST_TOKENS:].double().sum(dim=1).cpu()
        self.tokens += key_states.shape[2] - FIRST_TOKENS
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


@torch.no_grad()
def calibrate(
    model: PreTrainedModel, tokens: Tensor, context: int = 2048, progress: Callable[[float], None] = lambda done: None
) -> Artifact:
    """Run `tokens` (1-D) through the model in windows of `context` and keep the means. `progress` gets shares of 1."""
    if len(tokens) <= FIRST_TOKENS:
        raise ValueError(f"calibration needs more than {FIRST_TOKENS} tokens")
    geometry = Geometry.from_config(model.config.to_dict())
    layers = [_TapLayer(geometry) for _ in range(geometry.layers)]
    decoder = model.get_decoder()
    for window in tokens.split(context):
        if len(window) > FIRST_TOKENS:
            decoder(window.unsqueeze(0).to(model.device), past_key_values=Cache(layers=layers), use_cache=True)
        progress(len(window) / len(tokens))
    key_mean, value_mean = torch.stack([layer.sums / layer.tokens for layer in layers], dim=1).float()
    provenance = Provenance(
        tokens_sha256=hashlib.sha256(tokens.to(torch.int64).numpy().tobytes()).hexdigest(),
        tokens=len(tokens),
        context=context,
        versions={module.__name__: module.__version__ for module in (kvfold, torch, transformers)},
    )
    metadata = Metadata(model=Fingerprint.of(model), calibration=provenance)
    return Artifact(metadata, key_mean.contiguous(), value_mean.contiguous())
