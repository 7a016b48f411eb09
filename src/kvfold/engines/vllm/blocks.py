"""How many tokens a block of vLLM has, per layer.

vLLM gives the blocks of all layers one size in bytes. It would pad packed blocks to the size of 16-bit ones, and
nothing would be gained. So packed blocks have to be the largest.
"""

from collections.abc import Mapping
from dataclasses import replace

from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import AttentionSpec

Backends = Mapping[str, type[AttentionBackend]]  # by the layer's name


def fit_blocks(
    packed: Mapping[str, AttentionSpec], others: Mapping[str, AttentionSpec], backends: Backends
) -> dict[str, AttentionSpec]:
    """The specs of packed layers and of other layers with attention, with blocks of one size in bytes.

    A packed block holds so many tokens that the smallest block of every other layer fits into its bytes. The others
    take the largest blocks that fit. What is left of the bytes is padding, in their blocks alone.
    """
    block_bytes = max(spec.page_size_bytes for spec in packed.values())
    smallest = [_tokens(backends[name], spec, 0) * _token_bytes(spec) for name, spec in others.items()]
    times = -(-max(smallest, default=1) // block_bytes)
    block_bytes *= times
    fitted = {name: replace(spec, block_size=times * spec.block_size) for name, spec in packed.items()}
    for name, spec in others.items():
        tokens = _tokens(backends[name], spec, block_bytes // _token_bytes(spec))
        fitted[name] = replace(spec, block_size=tokens, page_size_padded=block_bytes)
    return fitted


def _token_bytes(spec: AttentionSpec) -> int:
    return spec.unpadded_page_size_bytes // spec.block_size


def _tokens(backend: type[AttentionBackend], spec: AttentionSpec, most: int) -> int:
    """The largest block of at most `most` tokens that the backend takes, or else the smallest that it takes."""
    sizes = backend.get_supported_kernel_block_sizes(spec)
    exact = [size for size in sizes if not isinstance(size, MultipleOf)]
    bases = [size.base for size in sizes if isinstance(size, MultipleOf)]
    fitting = [size for size in exact if size <= most] + [most // base * base for base in bases if base <= most]
    return max(fitting) if fitting else min(exact + bases)
