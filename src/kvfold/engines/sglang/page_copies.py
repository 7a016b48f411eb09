"""Copies of pages between a GPU and host memory, by a kernel that reads and writes the host memory itself."""

import triton
import triton.language as tl
from torch import Tensor

from kvfold.ops.launch import launcher

WORD = 8  # bytes
PROGRAMS = 32  # they keep PCIe busy, and leave most of the GPU to others
TILE = 1024  # words that a program copies at a time


def copy_pages(sources: Tensor, targets: Tensor, row_bytes: int, source_pages: Tensor, target_pages: Tensor) -> None:
    """Copy source_pages[i] to target_pages[i] in every layer. Pages have `row_bytes` bytes, a multiple of WORD.

    `sources` and `targets` are the addresses of the layers, int64[layers]. Host memory has to be pinned. All tensors
    are on the GPU. Waits for nothing.
    """
    kernel = launcher(_copy_pages, sources.device, WORDS=row_bytes // WORD, TILE=TILE, num_warps=8)
    kernel((PROGRAMS, 1, 1), sources, targets, source_pages, target_pages, len(source_pages), len(sources))


@triton.jit(do_not_specialize=["pages", "layers"], do_not_specialize_on_alignment=["sources", "targets"])
def _copy_pages(
    sources, targets, source_pages, target_pages, pages, layers, WORDS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    TILES: tl.constexpr = (WORDS + TILE - 1) // TILE
    for work in range(tl.program_id(0), layers * pages * TILES, tl.num_programs(0)):
        layer, page = work // TILES // pages, work // TILES % pages
        source = tl.load(sources + layer).to(tl.pointer_type(tl.int64)) + tl.load(source_pages + page) * WORDS
        target = tl.load(targets + layer).to(tl.pointer_type(tl.int64)) + tl.load(target_pages + page) * WORDS
        word = work % TILES * TILE + tl.arange(0, TILE)
        tl.store(target + word, tl.load(source + word, mask=word < WORDS), mask=word < WORDS)
