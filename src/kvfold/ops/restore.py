"""Restore lost shadow pages from packed pages.

An engine may lose the shadow of a page while the page itself lives on. On a prefix hit, a later request needs the
shadow again. It is restored from the page, with the precision of packed tokens. So no other op has to know.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.format.layout import PageLayout
from kvfold.ops.pages import LayerPages


class Restore:
    """Restores the shadow pages of layers whose pages and shadow pages stay in place."""

    def __init__(self, layers: Sequence[LayerPages]) -> None:
        self.alike: dict[PageLayout, list[LayerPages]] = {}  # layers with windows, by layout
        for layer in layers:
            if layer.windows and len(layer.shadows):
                self.alike.setdefault(layer.layout, []).append(layer)
        self._addresses, self._units = {}, {}
        for layout, layers in self.alike.items():
            device = layers[0].pool.device
            addresses = [[layer.pool.data_ptr(), layer.shadows.data_ptr()] for layer in layers]
            self._addresses[layout] = torch.tensor(addresses, device=device)
            self._units[layout] = torch.tensor([[layer.key.unit, layer.value.unit] for layer in layers], device=device)

    def __call__(self, pages: Tensor, shadows: Tensor, count: Tensor) -> None:
        """Restore shadows[i] from pages[i] in every layer, for i below `count`, int32[1] on the device."""
        if count.is_cuda:
            self.launch(pages, shadows, count)
            return
        n = int(count)
        for layer in (layer for layers in self.alike.values() for layer in layers if n):
            for views in layer.views:
                x = layer.codec(views.sides).dequantize(
                    *views.read_pages(pages[:n])
                )  # [pages, tokens, heads, sides, d]
                for side, unpacked in zip(layer.shadow_sides[views.sides], x.unbind(3), strict=True):
                    side[shadows[:n]] = unpacked.transpose(1, 2).to(side.dtype)

    def launch(self, pages: Tensor, shadows: Tensor, count: Tensor) -> None:
        """The same with one launch per layout, for all its layers. Waits for nothing."""
        from kvfold.ops.dequantize_gpu import restore

        for layout, layers in self.alike.items():
            restore(self._addresses[layout], self._units[layout], layers[0], pages, shadows, count)
