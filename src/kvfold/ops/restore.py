"""16-bit copies of pages, made again from what is packed in them.

An engine may lose the copy of a page while the page itself lives on, shared by requests that come later. Those read
the tokens of their windows as they were packed; with the copy made again, no other op has to know.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.layout import PageLayout
from kvfold.ops.pages import LayerPages
from kvfold.ops.tiles import key_side, level_table, value_side
from kvfold.ops.unpack import write_segment


class Restore:
    """For the layers of a cache whose pages and shadows stay where they are."""

    def __init__(self, layers: Sequence[LayerPages]) -> None:
        self.layers = [layer for layer in layers if layer.windows and len(layer.shadows)]
        self._addresses: dict[PageLayout, Tensor] = {}
        for layout in dict.fromkeys(layer.layout for layer in self.layers):
            own = [layer for layer in self.layers if layer.layout == layout]
            rows = [[layer.pool.data_ptr(), layer.shadows.data_ptr()] for layer in own]
            self._addresses[layout] = torch.tensor(rows, device=own[0].pool.device)

    def __call__(self, pages: Tensor, shadows: Tensor, count: Tensor) -> None:
        """Make shadows[i] the copy of pages[i] in every layer, for i below `count`, int32[1] on the device."""
        if count.is_cuda:
            self.launch(pages, shadows, count)
            return
        for layer in self.layers if count.item() else ():
            _restore_layer(layer, pages[: int(count)], shadows[: int(count)])

    def launch(self, pages: Tensor, shadows: Tensor, count: Tensor) -> None:
        for layout, addresses in self._addresses.items():
            first = next(layer for layer in self.layers if layer.layout == layout)
            kv_heads = first.pool.shape[1]
            _restore[(len(addresses), kv_heads)](
                addresses,
                level_table(count.device),
                pages,
                shadows,
                count,
                first.pool,
                first.shadows,
                KEY=key_side(layout),
                VALUE=value_side(layout),
                PAGE=layout.page_size,
                PAGE_BYTES=layout.page_bytes,
                KV_HEADS=kv_heads,
                TOKENS=triton.next_power_of_2(layout.page_size),
            )


def _restore_layer(layer: LayerPages, pages: Tensor, shadows: Tensor) -> None:
    for sides, codes, meta in layer.sides:
        x = layer.codec(sides).dequantize(codes[pages], meta[pages])  # [pages, page_size, kv_heads, sides, d]
        layer.shadows[shadows, :, sides] = x.permute(0, 2, 3, 1, 4).to(layer.shadows.dtype)


@triton.jit
def _restore(
    addresses,  # of the pool and the shadows of each layer
    levels,
    pages,
    shadows,
    count,
    any_pool,  # a layer's, for their types
    any_shadows,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    layer, head = tl.program_id(0), tl.program_id(1)
    pool = tl.load(addresses + 2 * layer)
    codes, meta = pool.to(any_pool.dtype), pool.to(tl.pointer_type(tl.float16))
    copies = tl.load(addresses + 2 * layer + 1).to(any_shadows.dtype)
    token = tl.arange(0, TOKENS)
    for i in range(tl.load(count)):
        page = tl.load(pages + i).to(tl.int64) * KV_HEADS + head + tl.zeros([TOKENS], tl.int64)
        copy = copies + ((tl.load(shadows + i).to(tl.int64) * KV_HEADS + head) * (2 * PAGE) + token) * KEY.head_dim
        _copy(copy, codes, meta, levels, page, token, KEY, PAGE, PAGE_BYTES, TOKENS)
        _copy(copy + PAGE * KEY.head_dim, codes, meta, levels, page, token, VALUE, PAGE, PAGE_BYTES, TOKENS)


@triton.jit
def _copy(
    copy, codes, meta, levels, page, token,
    SIDE: tl.constexpr, PAGE: tl.constexpr, PAGE_BYTES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write the keys or the values of a page to pointers `copy`, one for each token."""
    wide = codes.to(copy.dtype)
    for i in tl.static_range(len(SIDE.columns)):
        write_segment(copy, codes, meta, wide, levels, page, token, token < PAGE, SIDE, i, PAGE_BYTES, TOKENS)
