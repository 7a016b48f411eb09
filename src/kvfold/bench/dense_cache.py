"""The baseline of whole decode steps: a dense 16-bit cache that is allocated once."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import CacheLayerMixin

from kvfold.bench.dense_attention import attend_dense
from kvfold.geometry import Geometry

IMPLEMENTATION = "kvfold-dense"


class DenseLayer(CacheLayerMixin):
    """The keys and values of a layer, [sequences, kv_heads, capacity, d]."""

    is_sliding = False

    def __init__(self, cache: "DenseCache", shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.cache = cache
        self.keys, self.values = (torch.empty(shape, dtype=dtype, device=device).normal_() for _ in range(2))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("memory is allocated with the cache")

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.cache.position, key_states)
        self.values.index_copy_(2, self.cache.position, value_states)
        return self.keys[:, :, : self.cache.tokens], self.values[:, :, : self.cache.tokens]

    def get_seq_length(self) -> int:
        return self.cache.tokens - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.tokens, 0

    def get_max_length(self) -> int:
        return self.keys.shape[2]


class DenseCache(Cache):
    """Sequences of `start` random tokens each, with room for `capacity` tokens. `begin` comes before every step.

    A step over a full cache overwrites the last token. So all steps have one shape. cuDNN prepares each shape once,
    which it cannot do while a graph is captured.
    """

    def __init__(
        self, geometry: Geometry, sequences: int, start: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.tokens = start  # per sequence
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        shape = (sequences, geometry.kv_heads, capacity, geometry.key_dim)
        super().__init__(layers=[DenseLayer(self, shape, dtype, device) for _ in geometry.layers])

    @property
    def allocated_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def begin(self, sequences: int, n: int) -> None:
        """As `PackedCache.begin`, for one token."""
        held, _, capacity, _ = self.layers[0].keys.shape
        if n != 1 or sequences != held:
            raise ValueError(f"a step brings 1 token for each of {held} sequences, not {n} for {sequences}")
        self.tokens = min(self.tokens + 1, capacity)
        self.position.fill_(self.tokens - 1)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if query.shape[2] != 1 or attention_mask is not None:
        raise ValueError("the dense cache is for decode steps: one token of each sequence, and no mask")
    return attend_dense(query, key, value, scaling).transpose(1, 2), None


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, lambda *_, attention_mask=None, **__: attention_mask)
