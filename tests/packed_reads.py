"""Vectors as they are read after they were packed, by the definition."""

import torch
from torch import Tensor

from kvfold.format.codec import Codec


def packed_and_read(codec: Codec, x: Tensor, position: Tensor) -> Tensor:
    """Transformed vectors float32[tokens, kv_heads, d], from keys or values of these positions.

    Those at position 0 are quantized as differences from the layer's first key. All others lie around zero.
    """
    y = codec.transform.forward(x)
    around = torch.zeros_like(y)
    if codec.first is not None:
        around[position == 0] = codec.first
    return codec.dequantize(*codec.quantize((y - around).unsqueeze(-2))).squeeze(-2) + around
