"""`kvfold bench decode`: eager decoding in transformers, with packed caches and with its own cache in turns."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from kvfold.artifact import Artifact
from kvfold.engines.transformers import PackedCache, cache
from kvfold.recipe import Recipe

PREFILL_CHUNK = 512
BASELINE = "transformers"


@dataclass(frozen=True)
class Row:
    recipe: str
    context: int
    batch: int
    tokens_per_s: float
    ratio: float  # to transformers' own cache, in the same run
    cache_bytes: int
    device: str
    threads: int
    dtype: str
    torch: str
    date: str


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    tokens: Tensor,
    recipes: Sequence[Recipe],
    artifact: Artifact | None = None,
    batch: int = 1,
    steps: int = 32,
    progress: Callable[[float], None] = lambda done: None,
) -> list[Row]:
    """Time `steps` decode steps after a context of `tokens` (1-D). The caches take turns, so all see the same noise."""
    caches: dict[str, Cache] = {BASELINE: DynamicCache(config=model.config)}
    caches |= {str(recipe): cache(model, recipe, artifact) for recipe in recipes}
    context = tokens.unsqueeze(0).expand(batch, -1).to(model.device)
    for filled in caches.values():
        for chunk in context.split(PREFILL_CHUNK, dim=1):
            model(chunk, past_key_values=filled, use_cache=True, logits_to_keep=1)
        progress(0.5 / len(caches))
    times: dict[str, list[float]] = {name: [] for name in caches}
    token = context[:, -1:]
    for _ in range(steps):
        for name, filled in caches.items():
            start = time.perf_counter()
            model(token, past_key_values=filled, use_cache=True)
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
        progress(0.5 / steps)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return [
        Row(
            recipe=name,
            context=len(tokens),
            batch=batch,
            tokens_per_s=batch / medians[name],
            ratio=medians[BASELINE] / medians[name],
            cache_bytes=_bytes(filled),
            device=torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu",
            threads=torch.get_num_threads(),
            dtype=str(model.dtype).removeprefix("torch."),
            torch=torch.__version__,
            date=datetime.now(UTC).date().isoformat(),
        )
        for name, filled in caches.items()
    ]


def _bytes(filled: Cache) -> int:
    if isinstance(filled, PackedCache):
        return filled.allocated_bytes
    return sum(t.untyped_storage().nbytes() for layer in filled.layers for t in (layer.keys, layer.values))
