"""16-bit copies made again from packed pages, against the codecs."""

import pytest
import torch
from even_codecs import even_codecs
from random_layers import fitted

from kvfold.format.codec import Codec
from kvfold.format.windows import Windows
from kvfold.ops.naive import store
from kvfold.ops.pages import LayerPages
from kvfold.ops.restore import Restore
from kvfold.paged import PagedCache
from kvfold.recipes import parse

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, PAGE = 2, 16

pytestmark = pytest.mark.usefixtures("_poisoned_memory")


def layers(recipe: str, dims: int | tuple[int, int], count: int) -> list[LayerPages]:
    """Layers of a cache of which 6 pages are full, with other tokens in every layer."""
    both = (dims, dims) if isinstance(dims, int) else dims
    sides = [parse(recipe).codecs(d, d, fitted(recipe, d, HEADS), torch.bfloat16) for d in both]
    return filled([(sides[0][0], sides[1][1])] * count)


def filled(codecs: list[tuple[Codec, Codec]]) -> list[LayerPages]:
    count, both = len(codecs), [codec.layout.dims for codec in codecs[0]]
    codecs = [(key.to(DEVICE), value.to(DEVICE)) for key, value in codecs]
    cache = PagedCache(codecs, HEADS, 1, windows=Windows(sink=4, recent=40), page_size=PAGE, device=DEVICE)
    cache.extend([6 * PAGE])
    for layer in range(count):
        generator = torch.Generator().manual_seed(layer)
        k, v = (torch.randn(6 * PAGE, HEADS, d, generator=generator).to(DEVICE) for d in both)
        store(cache.pages(layer), k.bfloat16(), v.bfloat16())
    return [cache.pages(layer) for layer in range(count)]


@pytest.mark.parametrize("how", ["torch", "triton"])
@pytest.mark.parametrize(
    ("recipe", "dims"),
    [
        ("saw-int4", 64),
        ("int2:group=32", 64),
        ("gtq-k3v3", 128),
        ("int8", 80),
        ("tq-k2v4", 64),
        ("saw-int4", (192, 128)),
    ],
)
def test_copies_are_what_is_packed(recipe, dims, how):
    check(layers(recipe, dims, 2), how)


@pytest.mark.parametrize("how", ["torch", "triton"])
def test_every_layer_has_units_of_its_own(how):
    """For scales of evenly spaced levels."""
    widths = [(16, 4), (32, 2), (16, 1)], [(32, 8), (32, 2)]
    check(filled([even_codecs(*widths, units) for units in ((0.5, 2.0), (4.0, 0.25))]), how)


def check(both: list[LayerPages], how: str) -> None:
    pages, copies = torch.tensor([4, 0, 2, 5], device=DEVICE), torch.tensor([1, 2, 0, 3], device=DEVICE)
    before = [layer.shadows.clone() for layer in both]
    restore = Restore(both)
    run = restore.launch if how == "triton" else restore
    run(pages, copies, torch.tensor([3], dtype=torch.int32, device=DEVICE))
    for layer, old in zip(both, before, strict=True):
        for page, copy in ((4, 1), (0, 2), (2, 0)):
            sides = layer.layout.views(layer.pool, together=False)
            for side, (codec, views) in enumerate(zip((layer.key, layer.value), sides, strict=True)):
                codes, meta = views.read_pages(torch.tensor([page], device=DEVICE))
                expected = codec.dequantize(codes, meta)[0, :, :, 0].transpose(0, 1)  # [heads, tokens, d]
                torch.testing.assert_close(layer.shadow_sides[side][copy], expected.bfloat16(), rtol=2**-7, atol=1e-30)
        assert torch.equal(layer.shadows[3:].view(torch.int16), old[3:].view(torch.int16))  # no other is touched


def test_nothing_to_restore():
    (layer,) = layers("saw-int4", 64, 1)
    before = layer.shadows.clone()
    Restore([layer]).launch(
        *torch.zeros(2, 4, dtype=torch.int64, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    )
    assert torch.equal(layer.shadows.view(torch.int16), before.view(torch.int16))
