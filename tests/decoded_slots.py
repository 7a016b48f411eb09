"""What the bytes of slots stand for, as documented."""

import numpy as np
import torch

from kvfold.format.layout import SlotLayout
from kvfold.quantizers import lloyd_max

PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}  # of codes, by bits


def decoded_by_hand(
    slots: torch.Tensor, layout: SlotLayout, raw_dtype: torch.dtype, centroids: torch.Tensor | None = None
) -> np.ndarray:
    """Slots uint8[..., kv_heads, slot_bytes] -> transformed float64[..., kv_heads, d], from the bytes as documented."""
    if layout.heads:  # each with its own codes from the first byte of the slot, and its own metadata behind them all
        parts = []
        for number, head in enumerate(layout.heads):
            slot, behind = slots[..., number, :], layout.code_bytes
            own = torch.cat((slot[..., : head.code_bytes], slot[..., behind : behind + head.meta_bytes]), dim=-1)
            parts.append(decoded_by_hand(own, head, raw_dtype))
        return np.stack(parts, axis=-2)
    data = slots.numpy()
    entries = np.ascontiguousarray(data[..., layout.code_bytes :])
    if layout.even:  # scales 16·e + m
        meta = np.where(entries < 16, 0, (1 + entries % 16 / 16) * 2.0 ** (entries // 16 - 8.0))
    else:
        meta = entries.view("<f2").astype(np.float64)
    parts, byte, entry = [], 0, 0
    for segment in layout.segments:
        n = segment.stop - segment.start
        if segment.rule == "raw":
            raw = np.ascontiguousarray(data[..., byte : byte + 2 * n])
            if raw_dtype == torch.float16:
                parts.append(raw.view("<f2").astype(np.float64))
            else:  # bfloat16: the upper half of a float32
                parts.append((raw.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64))
            byte += 2 * n
            continue
        n = -(-n // 8) * 8 if segment.rule == "codebook" else n
        codes, below = np.zeros((*data.shape[:-1], n)), 0
        for width in PLANES[segment.bits]:
            stride = n * width // 8
            plane = data[..., byte : byte + stride].astype(np.int64)
            for part in range(8 // width):
                bits = plane // 2 ** (part * width) % 2**width
                codes[..., part * stride : (part + 1) * stride] += bits * 2**below
            byte, below = byte + stride, below + width
        if segment.rule == "codebook":
            levels = np.array(lloyd_max.levels(segment.bits))
            parts.append(levels[codes[..., : segment.dims].astype(np.int64)] * meta[..., entry : entry + 1])
            entry += 1
        elif segment.rule == "even":
            parts.append((codes - (2**segment.bits - 1) / 2) * meta[..., entry : entry + 1])
            entry += 1
        else:
            parts.append(codes * meta[..., entry : entry + 1] + meta[..., entry + 1 : entry + 2])
            entry += 2
    assert byte == layout.code_bytes
    assert (1 if layout.even else 2) * (entry + layout.centroid) == layout.meta_bytes
    decoded = np.concatenate(parts, axis=-1)
    if layout.centroid:
        assert centroids is not None
        numbers = entries.view("<u2")[..., -1].astype(np.int64)  # [..., kv_heads]
        decoded += centroids.double().numpy()[np.arange(decoded.shape[-2]), numbers]
    return decoded
