"""Blocks of models with sliding windows: in bytes all are as large as the packed ones."""

import pytest
import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.core.kv_cache_utils import unify_kv_cache_spec_page_size
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvfold.engines.vllm.blocks import fit_blocks

HEADS, PAGE = 8, 64


def backend(*sizes: int | MultipleOf) -> type[AttentionBackend]:
    return type("Backend", (), {"get_supported_kernel_block_sizes": staticmethod(lambda _: list(sizes))})


@pytest.mark.parametrize(
    ("token_bytes", "dims", "sizes", "packed", "sliding"),
    [  # bytes of a packed token per KV head, head dimension; then tokens per block
        (136, 128, (MultipleOf(16),), 64, 16),  # 64 · 136 = 8,704 bytes hold 17 tokens of 2 · 128 · 2 = 512 bytes
        (72, 128, (MultipleOf(16),), 128, 16),  # 64 · 72 = 4,608 hold 9, and 9,216 hold 18
        (264, 128, (MultipleOf(16),), 64, 32),  # 16,896 hold 33
        (264, 128, (16, 32, 64), 64, 32),
        (264, 256, (128,), 512, 128),  # 128 tokens of 1,024 bytes are more than 7 · 64 · 264 and less than 8 · 64 · 264
        (512, 128, (MultipleOf(16),), 64, 64),
    ],
)
def test_the_smallest_block_that_others_fit_into(token_bytes, dims, sizes, packed, sliding):
    full = FullAttentionSpec(
        block_size=PAGE, num_kv_heads=HEADS, head_size=dims, dtype=torch.uint8, state_content_bytes=token_bytes
    )
    window = SlidingWindowSpec(
        block_size=PAGE, num_kv_heads=HEADS, head_size=dims, dtype=torch.bfloat16, sliding_window=1024
    )
    fitted = fit_blocks({"full": full}, {"window": window}, {"window": backend(*sizes)})
    assert (fitted["full"].block_size, fitted["window"].block_size) == (packed, sliding)
    assert fitted["full"].page_size_padded is None
    assert {spec.page_size_bytes for spec in fitted.values()} == {HEADS * packed * token_bytes}
    assert unify_kv_cache_spec_page_size(fitted) == fitted, "vLLM pads nothing more"


def test_layers_of_packed_models_keep_their_blocks():
    sizes = {"a": 136, "b": 512}
    specs = {
        name: FullAttentionSpec(
            block_size=PAGE, num_kv_heads=HEADS, head_size=128, dtype=torch.uint8, state_content_bytes=size
        )
        for name, size in sizes.items()
    }
    assert fit_blocks(specs, {}, {}) == specs
