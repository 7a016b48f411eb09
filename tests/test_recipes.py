import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import fitted

from kvfold.geometry import Geometry
from kvfold.paged import PagedCache
from kvfold.recipe import Recipe
from kvfold.recipes import RECIPES, parse

CODEBOOKS = [f"{family}-k{bits}v{bits}" for family in ("tq", "gtq") for bits in (2, 3, 4)]
COMMON = ("sink", "recent", "centre", "skip")
OWN_OPTIONS = {
    "int8": ("group",),
    "int4": ("group",),
    "int2": ("group",),
    "saw-int4": ("group", "order", "values"),
    "kmeans-int4": ("group", "centroids", "seed"),
    "kmeans-saw-int4": ("group", "order", "values", "centroids", "seed"),
    "hessian-int4": ("group",),
    "quarot-int2": ("group", "order", "values"),
    "oscar-int2": ("group", "per_head", "eigen", "hadamard", "permute", "clip"),
    "kivi-2": ("group",),
    "kivi-4": ("group",),
    "kitty-2": ("boost",),
    **dict.fromkeys(CODEBOOKS[:3], ("seed",)),
    **dict.fromkeys(CODEBOOKS[3:], ("seed", "score", "widths", "per_head")),
}
LEARNING = ["kmeans-int4", "kmeans-saw-int4", "hessian-int4", "oscar-int2", "gtq-k2v2", "gtq-k3v3", "gtq-k4v4"]


def geometry(head_dim: int = 128, layers: int = 4, kv_heads: int = 2) -> Geometry:
    return Geometry("TestForCausalLM", layers, 4 * kv_heads, kv_heads, head_dim)


def boolean() -> st.SearchStrategy[str]:
    return st.sampled_from(("true", "false"))


OPTIONS = {
    "sink": st.integers(0, 10**6).map(str),
    "recent": st.integers(0, 10**6).map(str),
    "centre": boolean(),
    "skip": st.lists(st.integers(0, 500), min_size=1, max_size=5).map(lambda layers: "+".join(map(str, layers))),
    "group": st.integers(1, 4096).map(str),
    "order": st.integers(1, 4096).map(str),
    "centroids": st.integers(1, 2**15).map(str),
    "seed": st.integers(0, 10**6).map(str),
    "boost": st.sampled_from(("0", "0.125", "0.25", "0.5", "1")),
    "score": st.sampled_from(("product", "mean")),
    "widths": st.sampled_from(("two", "three", "all")),
    **{option: boolean() for option in ("values", "per_head", "eigen", "hadamard", "permute", "clip")},
}
BOOLEANS = ("centre", "values", "per_head", "eigen", "hadamard", "permute", "clip")


@st.composite
def spelled(draw) -> tuple[str, dict[str, str]]:
    """A recipe as a user would type it: (name, options)."""
    name = draw(st.sampled_from(sorted(RECIPES)))
    allowed = [] if name == "bf16" else [*COMMON, *OWN_OPTIONS[name]]
    chosen = draw(st.permutations(allowed))[: draw(st.integers(0, len(allowed)))]
    return name, {option: draw(OPTIONS[option]) for option in chosen}


def understood(option: str, text: str) -> object:
    """What the text of an option means."""
    if option in BOOLEANS:
        return text == "true"
    if option == "boost":
        return float(text)
    if option in ("score", "widths"):
        return text
    return tuple(map(int, text.split("+"))) if option == "skip" else int(text)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(spelled())
def test_parse_and_str_are_each_others_inverse(recipe):
    name, options = recipe
    parsed = parse(":".join((name, ",".join(f"{option}={text}" for option, text in options.items()))))
    assert parsed.name == name
    for option, text in options.items():
        assert getattr(parsed, option) == understood(option, text)
    untouched = set(type(parsed).model_fields) - set(options)
    assert all(getattr(parsed, field) == getattr(RECIPES[name], field) for field in untouched)
    again = parse(str(parsed))
    assert again == parsed
    assert str(again) == str(parsed)
    assert type(again) is type(parsed)


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("int4", "int4"),
        ("int4:", "int4"),
        ("saw-int4:order=64,sink=4", "saw-int4:order=64,sink=4"),
        ("saw-int4:sink=4,order=64", "saw-int4:order=64,sink=4"),
        ("saw-int4:values=false", "saw-int4"),
        ("quarot-int2:values=true", "quarot-int2"),
        ("quarot-int2:values=false", "quarot-int2:values=false"),
        ("int2: group=64 , skip=0+29 ", "int2:skip=0+29,group=64"),
        ("int4:centre=0,recent=007", "int4:recent=7,centre=false"),
        ("bf16", "bf16"),
        ("oscar-int2:sink=64,recent=256,per_head=false", "oscar-int2"),
        ("oscar-int2:recent=0,sink=0", "oscar-int2:sink=0,recent=0"),
        ("kitty-2:boost=0.25,sink=32", "kitty-2"),
        ("kitty-2:boost=0.125", "kitty-2:boost=0.125"),
        ("kivi-2:recent=128", "kivi-2"),
        ("tq-k8v1:seed=0", "tq-k8v1"),
        ("gtq-k5v2:seed=7", "gtq-k5v2:seed=7"),
    ],
)
def test_only_what_differs_from_the_default_is_printed(text, printed):
    assert str(parse(text)) == printed


def test_recipes_are_listed_under_their_own_names():
    published = ["quarot-int2", "oscar-int2", "kivi-2", "kivi-4", "kitty-2"]
    ablations = ["kmeans-int4", "kmeans-saw-int4", "hessian-int4"]
    assert list(RECIPES) == ["bf16", "int8", "int4", "int2", "saw-int4", *ablations, *published, *CODEBOOKS]
    assert all(recipe.name == name and recipe.summary for name, recipe in RECIPES.items())
    # centring is on but for the 16-bit reference and where it does harm
    assert [name for name, recipe in RECIPES.items() if not recipe.centre] == ["bf16", "kivi-2", "kivi-4", "kitty-2"]


def test_any_two_widths_make_a_codebook_recipe():
    for family in ("tq", "gtq"):
        for key_bits in range(1, 9):
            for value_bits in range(1, 9):
                recipe = parse(f"{family}-k{key_bits}v{value_bits}")
                assert (recipe.key_bits, recipe.value_bits) == (key_bits, value_bits)
                assert str(recipe) == f"{family}-k{key_bits}v{value_bits}"
                key, value = recipe.layouts(64, {})
                norms = 2 if family == "gtq" and 1 < key_bits < 8 else 1  # a bit above the average, and one below
                assert (key.slot_bytes, value.slot_bytes) == (8 * key_bits + 2 * norms, 8 * value_bits + 2)
    for text in ("tq-k0v3", "tq-k3v9", "gtq-k10v3"):
        with pytest.raises(ValueError, match=f"^{text}: keys and values take 1 to 8 bits, not"):
            parse(text)
    for text in ("tq-k3", "tq-k3v3x"):
        with pytest.raises(
            ValueError, match=f"unknown recipe '{text}': .* tq-kXvY and gtq-kXvY with widths from 1 to 8"
        ):
            parse(text)


def test_which_recipes_learn_and_what_they_are_fitted_as():
    """Windows and skipped layers do not matter to calibration; everything else does."""
    assert [name for name, recipe in RECIPES.items() if recipe.learns] == LEARNING
    assert parse("oscar-int2").fitted_as == "oscar-int2"
    assert parse("oscar-int2:sink=0,recent=7,skip=1+2").fitted_as == "oscar-int2"
    assert parse("oscar-int2:sink=0,group=32,centre=false").fitted_as == "oscar-int2:centre=false,group=32"
    assert parse("kmeans-int4:centroids=9,sink=4").fitted_as == "kmeans-int4:centroids=9"
    for name in LEARNING:
        assert parse(parse(f"{name}:sink=3,recent=5,skip=0").fitted_as) == parse(name)


def test_pages_of_a_method_have_its_own_size():
    sizes = {name: recipe.page_layouts(geometry(128))[0].page_size for name, recipe in RECIPES.items()}
    special = {"kivi-2": 32, "kivi-4": 32, "kitty-2": 128}
    assert sizes == {name: special.get(name, 16) for name in RECIPES}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("saw-int", r"unknown recipe 'saw-int': did you mean 'saw-int4'\? there are bf16, int8, int4"),
        ("INT44", r"unknown recipe 'INT44': there are bf16"),
        ("", r"unknown recipe ''"),
        ("int3", r"unknown recipe 'int3': did you mean"),
        ("zzz:sink=4", r"unknown recipe 'zzz': there are bf16"),
        ("int4:order=64", r"int4 has no option 'order'; it takes centre, group, recent, sink, skip"),
        (
            "saw-int4:bits=2",
            r"saw-int4 has no option 'bits'; it takes centre, group, order, recent, sink, skip, values",
        ),
        ("saw-int4:name=x", r"saw-int4 has no option 'name'"),
        ("bf16:sink=4", r"bf16 has no option 'sink'; it takes none"),
        ("int4:sink=-1", r"int4: sink='-1': .*greater than or equal to 0"),
        ("int4:sink=four", r"int4: sink='four': .*integer"),
        ("int4:sink=1.5", r"int4: sink='1.5': .*integer"),
        ("int4:recent=", r"int4: recent='': .*integer"),
        ("int4:centre=perhaps", r"int4: centre='perhaps': .*boolean"),
        ("int4:group=0", r"int4: group='0': .*greater than 0"),
        ("saw-int4:order=-64", r"saw-int4: order='-64': .*greater than 0"),
        ("int4:skip=1+x", r"int4: skip='x': .*integer"),
        ("int4:skip=1,2", r"write options as name=value, not '2'"),
        ("int4:skip=-1", r"int4: skip='-1': .*greater than or equal to 0"),
        ("int4:sink", r"'int4:sink': write options as name=value, not 'sink'"),
        ("int4:sink=4,sink=8", r"'int4:sink=4,sink=8': option 'sink' is given twice"),
        ("int4:sink=4, sink=8", r"'int4:sink=4, sink=8': option 'sink' is given twice"),
        ("kitty-2:boost=1.5", r"kitty-2: boost='1.5': .*less than or equal to 1"),
        ("kmeans-int4:centroids=0", r"kmeans-int4: centroids='0': .*greater than or equal to 1"),
        ("kmeans-int4:centroids=32769", r"kmeans-int4: centroids='32769': .*less than or equal to 32768"),
        ("tq-k3v3:seed=-1", r"tq-k3v3: seed='-1': .*greater than or equal to 0"),
        ("tq-k3v3:group=32", r"tq-k3v3 has no option 'group'"),
        ("int4:sink=4,", None),
    ],
)
def test_errors_of_parse_name_the_culprit(text, message):
    if message is None:
        assert parse(text) == parse(text.rstrip(","))
        return
    with pytest.raises(ValueError, match=message) as caught:
        parse(text)
    assert type(caught.value) is ValueError, "pydantic's own error is for programs, not for people"


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
        ("int4:skip=4", 64, "int4:skip=4: the model has layers 0 to 3"),
        ("int4:skip=0+17", 64, r"int4:skip=0\+17: the model has layers 0 to 3"),
    ],
)
def test_a_recipe_that_does_not_fit_the_model_is_refused(text, head_dim, message):
    recipe = parse(text)
    for refuse in (recipe.check, lambda model: recipe.sequence_bytes(model, 100)):
        with pytest.raises(ValueError, match=message):
            refuse(geometry(head_dim))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_fits_every_head_dimension(name, head_dim):
    parse(name).check(geometry(head_dim))


# --- bits


@pytest.mark.parametrize(
    ("name", "head_dim", "bits"),
    [
        ("bf16", 128, 16),
        ("bf16", 80, 16),
        ("int8", 128, 8.25),
        ("int4", 128, 4.25),
        ("saw-int4", 128, 4.25),
        ("int2", 128, 2.25),
        ("quarot-int2", 128, 2.25),
        ("int8", 64, 8.5),
        ("int4", 64, 4.5),
        ("saw-int4", 64, 4.5),
        ("int2", 64, 2.5),
        ("quarot-int2", 64, 2.5),
        ("int4", 80, 4.4),
        ("int2", 80, 2.4),
        ("int4", 256, 4.125),
        ("int2", 256, 2.125),
        ("int2:group=64", 128, 2.5),
        ("saw-int4:group=32", 128, 5),
        ("int4:skip=0", 128, (16 + 3 * 4.25) / 4),
        # the number of a centroid takes 16 bits of a slot more than int4
        ("kmeans-int4", 128, 4.375),
        ("kmeans-saw-int4", 64, 4.75),
        ("hessian-int4", 128, 4.25),
        ("hessian-int4", 64, 4.5),
        # two groups of half a head
        ("oscar-int2:sink=0,recent=0", 128, 2.5),
        ("oscar-int2:sink=0,recent=0", 64, 3),
        ("oscar-int2:sink=0,recent=0,group=128", 128, 2.25),
        # a norm of 16 bits
        ("tq-k2v2", 128, 2.125),
        ("tq-k3v3", 128, 3.125),
        ("tq-k3v3", 64, 3.25),
        ("tq-k4v4", 256, 4.0625),
        ("tq-k4v2", 64, 3.25),
        # keys of two widths have a norm for each: 48 + 4 bytes, and values 48 + 2
        ("gtq-k3v3:sink=0,widths=two", 128, 3.1875),
        ("gtq-k3v3:sink=0", 128, 3.25),  # three norms for keys
        ("gtq-k3v3:sink=0,widths=all", 128, 3.375),  # five
        ("gtq-k3v3:sink=0", 64, 3.375),
        ("gtq-k2v2:sink=0,skip=3", 64, (16 + 3 * 2.375) / 4),
        ("gtq-k1v8:sink=0", 128, 4.625),
    ],
)
def test_bits_per_element_without_windows(name, head_dim, bits):
    for context in (16, 2048, 131072):
        assert parse(name).bits_per_element(geometry(head_dim), context) == pytest.approx(bits, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "context", "bytes_per_head"),
    [
        # d = 128, pages of 16 tokens: 2176 bytes of int4 or 1152 of int2; a shadow page has 16·2·128·2 = 8192
        ("int4", 1, 2176),
        ("int4", 17, 2 * 2176),
        ("int4:sink=4", 2048, 128 * 2176 + 8192),
        ("int4:sink=16", 2048, 128 * 2176 + 8192),
        ("int4:sink=17", 2048, 128 * 2176 + 2 * 8192),
        ("int4:sink=64", 20, 2 * 2176 + 2 * 8192),
        # the last 32 tokens can be taken back, so that a query at 2016 must find 1953…: pages 122 to 127, and page 0
        ("int2:sink=4,recent=64", 2048, 128 * 1152 + 7 * 8192),
        ("int2:sink=64,recent=256", 131072, 8192 * 1152 + (4 + 18) * 8192),
        # a query at 2016 reads itself and nothing before: pages 126 and 127
        ("int2:recent=1", 2048, 128 * 1152 + 2 * 8192),
        ("int2:recent=2", 2048, 128 * 1152 + 3 * 8192),
        # everything lies in the windows
        ("int2:sink=4,recent=300", 200, 13 * 1152 + 13 * 8192),
    ],
)
def test_bytes_of_a_sequence_by_hand(text, context, bytes_per_head):
    recipe = parse(text)
    assert recipe.sequence_bytes(geometry(layers=3, kv_heads=2), context) == 6 * bytes_per_head
    # a skipped layer takes 16 bits for everything and has no shadows
    skipping = parse(text + (",skip=1" if ":" in text else ":skip=1"))
    raw = -(-context // 16) * 8192
    assert skipping.sequence_bytes(geometry(layers=3, kv_heads=2), context) == 2 * (2 * bytes_per_head + raw)
    bits = 8 * bytes_per_head / (2 * 128 * context)
    assert recipe.bits_per_element(geometry(layers=3, kv_heads=2), context) == pytest.approx(bits, rel=1e-12)


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
    (layout,) = recipe.page_layouts(geometry(head_dim, layers=1))
    assert (layout.page_size, layout.page_bytes) == (page_size, page_bytes)
    shadow = page_size * 2 * head_dim * 2
    windows = f"sink=0,recent=0{',' + text.partition(':')[2] if ':' in text else ''}"
    bare = parse(f"{recipe.name}:{windows}")
    model = geometry(head_dim, layers=1, kv_heads=1)
    # without windows, pages that are not full are in 16 bits, or become so when 32 tokens are taken back
    for pages, shadows in ((1, 1), (7, 1)):
        assert bare.sequence_bytes(model, pages * page_size) == pages * page_bytes + shadows * shadow
        assert (
            bare.sequence_bytes(model, pages * page_size - 1)
            == pages * page_bytes + min(pages, shadows + (page_size == 32)) * shadow
        )
    if recipe.name.startswith("kivi"):
        # a query at 2016 must find 1889…: pages 59 to 63
        assert recipe.sequence_bytes(model, 2048) == 64 * page_bytes + 5 * shadow
    else:
        # the sink is page 0; a query at 2016 must find 1889…: pages 14 and 15
        assert recipe.sequence_bytes(model, 2048) == 16 * page_bytes + 3 * shadow
    bits = bare.bits_per_element(model, 2**20)
    assert bits == pytest.approx(8 * page_bytes / (2 * head_dim * page_size), rel=2e-3)


def test_block_gtq_is_as_large_before_calibration_as_after():
    for text in CODEBOOKS[3:]:
        for name, head_dim, segments in ((text, 64, 2), (text, 128, 3), (f"{text}:widths=two", 128, 2)):
            key, value = parse(name).layouts(head_dim, fitted(name, head_dim, 2))
            assert (key, value) == parse(name).layouts(head_dim, {})
            assert len(key.segments) == segments


def test_block_gtq_of_many_widths_has_whole_bytes_and_five_norms_before_calibration():
    for head_dim in (128, 256, 80, 96):
        key, value = parse("gtq-k3v3:widths=all").layouts(head_dim, {})
        assert (key.code_bytes, key.meta_bytes) == (3 * head_dim // 8, 10)
        assert (value.code_bytes, value.meta_bytes) == (3 * head_dim // 8, 2)


def test_windows_hardly_count_in_long_contexts():
    recipe = parse("int2:sink=64,recent=256")
    # (8192·1152 + 22·8192)·8 / (2·128·131072)
    assert recipe.bits_per_element(geometry(), 131072) == pytest.approx(2.29296875, rel=1e-12)


def storage_bytes(cache: PagedCache) -> int:
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*cache.pools, *cache.shadows)
        if tensor.numel()
    }
    return sum(storages.values())


def allocated_after_one_step(recipe: Recipe, model: Geometry, context: int, page_size: int) -> int:
    fit = fitted(recipe.fitted_as, model.head_dim, model.kv_heads)
    codecs = [recipe.layer_codecs(layer, model.head_dim, fit) for layer in range(model.layers)]
    cache = PagedCache(codecs, model.kv_heads, 1, windows=recipe.windows, page_size=page_size)
    cache.extend([context])
    assert cache.allocated_bytes == storage_bytes(cache)
    return storage_bytes(cache)


WINDOWS = ["", "sink=4", "recent=1", "recent=70", "sink=64,recent=256", "sink=4,recent=64,skip=0+2", "skip=0+1+2"]


PLAIN = [name for name in RECIPES if name not in OWN_OPTIONS or name not in LEARNING + CODEBOOKS]
BYTES = [(name, options, head_dim) for name in PLAIN for options in WINDOWS for head_dim in (64, 80, 128)]
BYTES += [(f"{name}:centroids=9", "sink=4,recent=64,skip=0+2", 64) for name in LEARNING[:2]]
BYTES += [(name, options, 64) for name in [*LEARNING[2:], "tq-k3v2"] for options in ("sink=4,recent=70", "skip=1")]


@pytest.mark.parametrize(("name", "options", "head_dim"), BYTES)
def test_counted_bytes_are_the_allocated_bytes(name, options, head_dim):
    recipe = parse(f"{name}{',' if ':' in name else ':'}{options}" if options and name != "bf16" else name)
    model = geometry(head_dim, layers=3)
    for page_size in (2 if name.startswith("ki") else 1, 3, 16, 64):
        for context in (1, 15, 16, 17, 333, 2048):
            allocated = allocated_after_one_step(recipe, model, context, page_size)
            assert recipe.sequence_bytes(model, context, page_size) == allocated, (page_size, context)


def test_counted_bytes_are_the_allocated_bytes_at_128k():
    recipe, model = parse("int2:sink=64,recent=256"), geometry(layers=2)
    allocated = allocated_after_one_step(recipe, model, 131072, 16)
    assert allocated == 4 * (8192 * 1152 + 22 * 8192)
    assert recipe.bits_per_element(model, 131072) == 8 * allocated / (2 * 2 * 2 * 128 * 131072)


# --- layers


def test_skipped_layers_are_sixteen_bits_and_untransformed():
    means = (torch.ones(2, 64), torch.ones(2, 64))
    fit = {"key_mean": means[0], "value_mean": means[1]}
    recipe = parse("saw-int4:skip=1,values=true")
    for codec in recipe.layer_codecs(1, 64, fit, torch.float16):
        assert codec.layout.slot_bytes == 128
        assert codec.transform.mean is None
        assert codec.transform.rotation is None
        assert codec.wide == torch.float16
    for codec, mean in zip(recipe.layer_codecs(0, 64, fit, torch.float16), means, strict=True):
        assert codec.layout.slot_bytes == 36
        assert codec.transform.mean is mean
        assert codec.transform.rotation is not None
        assert codec.wide == torch.float16


def test_centring_can_be_turned_off():
    fit = {"key_mean": torch.ones(2, 64), "value_mean": torch.ones(2, 64)}
    assert all(codec.transform.mean is None for codec in parse("int4:centre=false").layer_codecs(0, 64, fit))
    assert all(codec.transform.mean is not None for codec in parse("int4").layer_codecs(0, 64, fit))
    assert all(codec.transform.mean is None for codec in parse("int4").layer_codecs(0, 64, {}))


@pytest.mark.parametrize("name", LEARNING)
def test_skipped_layers_of_recipes_that_learn(name):
    """Their tensors are there for every layer, and left alone in those."""
    recipe = parse(f"{name}:skip=0{',centroids=9' if name.startswith('kmeans') else ''}")
    for codec in recipe.layer_codecs(0, 64, fitted(recipe.fitted_as, 64, 2)):
        assert (codec.layout.slot_bytes, codec.transform.mean, codec.transform.rotation) == (128, None, None)
        assert (codec.clip, codec.centroids) == (None, None)


@pytest.mark.parametrize(
    ("text", "orders"),
    [
        ("int4", (None, None)),
        ("saw-int4", (128, None)),
        ("saw-int4:order=64", (64, None)),
        ("saw-int4:order=64,values=true", (64, 64)),
        ("quarot-int2", (128, 128)),
        ("quarot-int2:values=false", (128, None)),
    ],
)
def test_what_is_rotated(text, orders):
    codecs = parse(text).layer_codecs(0, 128, {})
    assert tuple(c.transform.rotation and c.transform.rotation.order for c in codecs) == orders


def test_recipes_cannot_be_changed_in_place():
    with pytest.raises(ValueError, match="frozen"):
        RECIPES["int4"].sink = 4
