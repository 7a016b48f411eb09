"""What a recipe occupies in a model: layouts, bytes and bits by hand, and beside what a cache allocates."""

import pytest
import torch
from random_layers import fitted

from kvfold.bench.random_fits import random_artifact
from kvfold.fitted import Fitted
from kvfold.geometry import Geometry
from kvfold.ops.dispatch import choose
from kvfold.paged import PagedCache
from kvfold.recipe import Recipe
from kvfold.recipes import RECIPES, parse

LEARNING = [name for name, recipe in RECIPES.items() if recipe.learns]
PLAIN = [name for name in RECIPES if name not in LEARNING and not name.startswith("tq")]


def geometry(head_dim: int = 128, layers: int = 4, kv_heads: int = 2) -> Geometry:
    return Geometry.uniform("TestForCausalLM", layers, 4 * kv_heads, kv_heads, head_dim)


def test_pages_of_a_method_have_its_own_size():
    sizes = {name: Fitted(recipe, geometry(128)).page_layouts()[0].page_size for name, recipe in RECIPES.items()}
    special = {"kivi-2": 32, "kivi-4": 32, "kitty-2": 128}
    assert sizes == {name: special.get(name, 16) for name in RECIPES}


@pytest.mark.filterwarnings("ignore:.*many times slower", "ignore:the portable kernel decodes")
@pytest.mark.parametrize(
    "text", [*RECIPES, "oscar-int2:per_head=true", "gtq-k3v3:per_head=true", "gtq-k2v2:widths=all,per_head=true"]
)
def test_what_no_kernel_stores_is_for_evaluation(text: str):
    """As the ops themselves say, on a CPU and on a GPU; and calibration changes nothing."""
    pytest.importorskip("triton")
    pytest.importorskip("numba")
    recipe = parse(text)
    plain, learned = Fitted(recipe, geometry(layers=1)), Fitted(recipe, geometry(layers=1), {0: fitted(text, 128, 2)})
    (layout,) = learned.page_layouts(64).values()
    for device in ("cpu", "cuda"):
        store = choose(layout, 4, torch.device(device), (9, 0)).store
        assert (store.implementation == "torch") == bool(plain.for_evaluation)
        assert (layout.for_evaluation or "") in store.reason
    assert plain.for_evaluation == layout.for_evaluation
    if plain.for_evaluation:
        with pytest.raises(ValueError, match=rf"^{text} is for evaluation, .*: serve fold4, fold3 or fold2$"):
            plain.check_served()
    else:
        plain.check_served()


@pytest.mark.parametrize(
    ("text", "head_dim", "message"),
    [
        ("saw-int4:order=32", 80, "saw-int4: order=32 does not divide the head dimension 80"),
        ("saw-int4:order=256", 128, "saw-int4: order=256 does not divide the head dimension 128"),
        ("saw-int4:order=48", 96, "order=48 is not a power of two"),
        ("int4:group=48", 64, "group=48 does not divide the head dimension 64"),
        ("saw-int4:group=96", 128, "group=96 does not divide the head dimension 128"),
        ("int2:group=2", 64, "int2: group=2: 2 codes of 2 bits do not fill whole bytes"),
        ("oscar-int2:group=1", 64, "oscar-int2: group=1: 1 codes of 2 bits do not fill whole bytes"),
        ("kivi-2:group=32", 80, "group=32 does not divide the head dimension 80"),
        ("kmeans-saw-int4:order=32", 80, "kmeans-saw-int4: order=32 does not divide the head dimension 80"),
        ("int4:skip=4", 64, "int4:skip=4: layer 4 cannot be skipped: the packed layers are 0 to 3"),
        ("int4:skip=0+17", 64, r"int4:skip=0\+17: layer 17 cannot be skipped: the packed layers are 0 to 3"),
    ],
)
def test_a_recipe_that_does_not_fit_the_model_is_refused(text, head_dim, message):
    stored = Fitted(parse(text), geometry(head_dim))
    for refuse in (stored.check, lambda: stored.sequence_bytes(100)):
        with pytest.raises(ValueError, match=message):
            refuse()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_fits_every_head_dimension(name, head_dim):
    Fitted(parse(name), geometry(head_dim)).check()


# --- bits


@pytest.mark.parametrize(
    ("name", "head_dim", "bits"),
    [
        ("bf16", 128, 16),
        ("int8", 128, 8.25),
        ("int4", 128, 4.25),
        ("quarot-int2", 128, 2.25),
        ("int4", 64, 4.5),
        ("int2", 80, 2.4),
        ("int4", 256, 4.125),
        ("int2:group=64", 128, 2.5),
        ("saw-int4:group=32", 128, 5),
        ("int4:skip=0", 128, (16 + 3 * 4.25) / 4),
        # the number of a centroid takes 16 bits of a slot more than int4
        ("kmeans-int4", 128, 4.375),
        ("kmeans-saw-int4", 64, 4.75),
        ("hessian-int4", 128, 4.25),
        # two groups of half a head
        ("oscar-int2:block=0", 128, 2.5),
        ("oscar-int2:block=0", 64, 3),
        ("oscar-int2:group=128,block=0", 128, 2.25),
        # a norm of 16 bits
        ("tq-k3v3", 128, 3.125),
        ("tq-k4v4", 256, 4.0625),
        ("tq-k4v2", 64, 3.25),
        # keys of two widths have a norm for each: 48 + 4 bytes, and values 48 + 2
        ("gtq-k3v3:widths=two", 128, 3.1875),
        ("gtq-k3v3", 128, 3.25),  # three norms for keys
        ("gtq-k3v3:widths=all", 128, 3.375),  # five
        ("gtq-k3v3", 64, 3.375),
        ("gtq-k2v2:skip=3", 64, (16 + 3 * 2.375) / 4),
        ("gtq-k1v8", 128, 4.625),
    ],
)
def test_bits_per_element_without_an_open_block(name, head_dim, bits):
    for context in (16, 2048, 131072):
        assert Fitted(parse(name), geometry(head_dim)).bits_per_element(context) == pytest.approx(bits, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "context", "bytes_per_head"),
    [
        # d = 128, pages of 16 tokens: 2176 bytes of int4 or 1152 of int2; a raw key and value have 2·128·2 = 512
        ("int4", 1, 2176),
        ("int4", 17, 2 * 2176),
        ("int4:block=64", 2048, 128 * 2176 + (64 + 16) * 512),
        ("int4:block=64", 20, 2 * 2176 + (64 + 16) * 512),
        ("int2:block=256", 131072, 8192 * 1152 + (256 + 16) * 512),
        ("int2:block=1", 2048, 128 * 1152 + (1 + 16) * 512),
    ],
)
def test_bytes_of_a_sequence_by_hand(text, context, bytes_per_head):
    stored = Fitted(parse(text), geometry(layers=3, kv_heads=2))
    assert stored.sequence_bytes(context) == 6 * bytes_per_head
    # a skipped layer takes 16 bits for everything and has no ring
    skipping = parse(text + (",skip=1" if ":" in text else ":skip=1"))
    raw = -(-context // 16) * 8192
    assert Fitted(skipping, stored.geometry).sequence_bytes(context) == 2 * (2 * bytes_per_head + raw)
    bits = 8 * bytes_per_head / (2 * 128 * context)
    assert stored.bits_per_element(context) == pytest.approx(bits, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "head_dim", "page_size", "page_bytes"),
    [
        # K codes, V codes, K metadata for the page, V metadata for each token and group
        ("kivi-2", 128, 32, 32 * 32 + 32 * 32 + 2 * 128 * 2 + 32 * 4 * 4),  # 3 bits
        ("kivi-2", 64, 32, 32 * 16 + 32 * 16 + 2 * 64 * 2 + 32 * 2 * 4),  # 3 bits
        ("kivi-4", 128, 32, 32 * 64 + 32 * 64 + 2 * 128 * 2 + 32 * 4 * 4),  # 5 bits
        # 32 or 16 boosted channels: two bits more for each token, and their numbers in bytes
        ("kivi-2", 80, 32, 32 * 20 + 32 * 20 + 2 * 80 * 2 + 32 * 5 * 4),  # groups of 16
        ("kitty-2", 80, 128, 128 * (20 + 6) + 128 * 20 + 2 * 80 * 2 + 32 + 128 * 4),  # 24 of 80 channels, aligned
        ("kitty-2", 128, 128, 128 * (32 + 8) + 128 * 32 + 2 * 128 * 2 + 32 + 128 * 4),  # 2.508 bits
        ("kitty-2", 64, 128, 128 * (16 + 4) + 128 * 16 + 2 * 64 * 2 + 16 + 128 * 4),
        ("kitty-2:boost=0.125", 128, 128, 128 * (32 + 4) + 128 * 32 + 2 * 128 * 2 + 16 + 128 * 4),
    ],
)
def test_bytes_of_recipes_that_quantize_whole_pages(text, head_dim, page_size, page_bytes):
    recipe = parse(text)
    (layout,) = Fitted(recipe, geometry(head_dim, layers=1)).page_layouts().values()
    assert (layout.page_size, layout.page_bytes) == (page_size, page_bytes)
    raw = 2 * head_dim * 2
    model = geometry(head_dim, layers=1, kv_heads=1)
    bare = Fitted(parse(f"{recipe.name}:block=0{',' + text.partition(':')[2] if ':' in text else ''}"), model)
    for pages in (1, 7):  # the open block is a page
        assert bare.sequence_bytes(pages * page_size) == pages * page_bytes + (page_size + 16) * raw
        assert bare.sequence_bytes(pages * page_size - 1) == pages * page_bytes + (page_size + 16) * raw
    assert recipe.block == 128
    assert Fitted(recipe, model).sequence_bytes(2048) == 2048 // page_size * page_bytes + (128 + 16) * raw
    bits = bare.bits_per_element(2**20)
    assert bits == pytest.approx(8 * page_bytes / (2 * head_dim * page_size), rel=2e-3)


def test_the_open_block_hardly_counts_in_long_contexts():
    recipe = parse("int2:block=256")
    # (8192·1152 + 272·512)·8 / (2·128·131072)
    assert Fitted(recipe, geometry()).bits_per_element(131072) == pytest.approx(2.283203125, rel=1e-12)


def storage_bytes(cache: PagedCache) -> int:
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*cache.pools, *cache.rings)
        if tensor.numel()
    }
    return sum(storages.values())


def allocated_after_one_step(recipe: Recipe, model: Geometry, context: int, page_size: int) -> int:
    fit = fitted(recipe.fitted_as, model.key_dim, model.kv_heads)
    codecs = Fitted(recipe, model, dict.fromkeys(model.packed, fit)).codecs(torch.bfloat16, "cpu")
    cache = PagedCache(list(codecs.values()), model.kv_heads, 1, block=recipe.block, page_size=page_size)
    cache.extend([context])
    assert cache.allocated_bytes == storage_bytes(cache)
    return storage_bytes(cache)


BLOCKS = ["", "block=1", "block=70", "block=64,skip=0+2", "skip=0+1+2"]


BYTES = [(name, options, head_dim) for name in PLAIN for options in BLOCKS for head_dim in (64, 80, 128)]
BYTES += [(f"{name}:centroids=9", "block=64,skip=0+2", 64) for name in ("kmeans-int4", "kmeans-saw-int4")]
BYTES += [(name, options, 64) for name in [*LEARNING[2:], "tq-k3v2"] for options in ("block=70", "skip=1")]


@pytest.mark.parametrize(("name", "options", "head_dim"), BYTES)
def test_counted_bytes_are_the_allocated_bytes(name, options, head_dim):
    recipe = parse(f"{name}{',' if ':' in name else ':'}{options}" if options and name != "bf16" else name)
    model = geometry(head_dim, layers=3)
    for page_size in (2 if name.startswith("ki") else 1, 3, 16, 64):
        for context in (1, 15, 16, 17, 333, 2048):
            allocated = allocated_after_one_step(recipe, model, context, page_size)
            stored = Fitted(recipe, model)
            layouts = stored.page_layouts(page_size).values()
            # in transformers, 64 tokens can be taken back, and in engines 16
            more = sum(48 * 2 * 2 * 2 * head_dim for layout in layouts if layout.block(recipe.block))
            assert stored.sequence_bytes(context, page_size) == allocated - more, (page_size, context)


def test_counted_bytes_are_the_allocated_bytes_at_128k():
    recipe, model = parse("int2:block=256"), geometry(layers=2)
    allocated = allocated_after_one_step(recipe, model, 131072, 16)
    assert allocated == 4 * (8192 * 1152 + (256 + 64) * 512)
    assert Fitted(recipe, model).bits_per_element(131072) == 8 * (allocated - 4 * 48 * 512) / (2 * 2 * 2 * 128 * 131072)


# --- layers


def test_skipped_layers_are_sixteen_bits_and_untransformed():
    means = (torch.ones(2, 64), torch.ones(2, 64))
    fit = {"key_mean": means[0], "value_mean": means[1]}
    stored = Fitted(parse("saw-int4:skip=1,values=true"), geometry(64, layers=2), {0: fit, 1: fit})
    for codec in stored.layer_codecs(1, torch.float16):
        assert codec.layout.slot_bytes == 128
        assert codec.transform.mean is None
        assert codec.transform.rotation is None
        assert codec.raw_dtype == torch.float16
    for codec, mean in zip(stored.layer_codecs(0, torch.float16), means, strict=True):
        assert codec.layout.slot_bytes == 36
        assert codec.transform.mean is mean
        assert codec.transform.rotation is not None
        assert codec.raw_dtype == torch.float16


@pytest.mark.parametrize("name", LEARNING)
def test_skipped_layers_of_recipes_that_learn(name):
    """Their tensors are there for every layer, and left alone in those."""
    recipe = parse(f"{name}:skip=0{',centroids=9' if name.startswith('kmeans') else ''}")
    fit = fitted(recipe.fitted_as, 64, 2)
    for codec in Fitted(recipe, geometry(64, layers=1), {0: fit}).layer_codecs(0):
        assert (codec.layout.slot_bytes, codec.transform.mean, codec.transform.rotation) == (128, None, None)
        assert (codec.clip, codec.centroids) == (None, None)


def test_layers_get_what_the_artifact_holds_for_them():
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    recipe, model = parse("gtq-k3v3:widths=all"), Geometry.from_config(config)
    artifact = random_artifact(config, [recipe])
    artifact.tensors["key_mean"] = torch.arange(2.0).view(2, 1, 1).expand(2, 2, 64)
    widths = torch.tensor([[4] * 32 + [2] * 32, [3] * 64], dtype=torch.uint8)
    artifact.tensors[f"{recipe.fitted_as}/key_widths"] = widths.unsqueeze(1)
    stored = Fitted.of(recipe, model, artifact)
    # 24 bytes of codes, and a norm of 2 bytes per width
    assert [layout.key.slot_bytes for layout in stored.page_layouts().values()] == [28, 26]
    assert stored.sequence_bytes(16) == 2 * 16 * ((28 + 26) + (26 + 26))
    for layer, (key, _) in stored.codecs(torch.bfloat16, "cpu").items():
        assert key.layout == stored.page_layouts()[layer].key
        assert (key.transform.mean == layer).all()
    # before calibration: five norms
    assert [layout.key.slot_bytes for layout in Fitted.of(recipe, model, None).page_layouts().values()] == [34, 34]


def test_only_full_attention_is_packed_and_keys_may_be_longer_than_values():
    kinds = ["sliding_attention", "full_attention", "linear_attention", "full_attention"]
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 192, "v_head_dim": 128}
    config = {**sizes, "num_hidden_layers": 4, "layer_types": kinds, "sliding_window": 16}
    recipe, model = parse("int4:block=4"), Geometry.from_config(config)
    artifact = random_artifact(config, [recipe])
    artifact.tensors["key_mean"] = torch.tensor([1.0, 3.0]).view(2, 1, 1).expand(2, 2, 192)
    stored = Fitted.of(recipe, model, artifact)
    codecs = stored.codecs(torch.bfloat16, "cpu")
    assert list(codecs) == list(stored.page_layouts()) == [1, 3]
    for layer, (key, value) in codecs.items():
        assert (key.transform.mean == layer).all()
        assert (key.layout.slot_bytes, value.layout.slot_bytes) == (96 + 4, 64 + 4)
    # two layers of two heads: 2 pages of 16 tokens, and a ring of 4 + 16 16-bit keys and values
    assert stored.sequence_bytes(17) == 2 * 2 * (2 * 16 * (100 + 68) + (4 + 16) * 2 * (192 + 128))
    assert stored.bits_per_element(17) == 8 * stored.sequence_bytes(17) / (2 * 2 * (192 + 128) * 17)
    with pytest.raises(ValueError, match="layer 0 cannot be skipped: the packed layers are 1, 3"):
        Fitted(parse("int4:skip=0"), model).check()
