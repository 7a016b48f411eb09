import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.geometry import Geometry
from kvfold.paged import PagedCache
from kvfold.recipe import Recipe
from kvfold.recipes import RECIPES, parse

INTEGERS = ("int8", "int4", "int2")
ROTATED = ("saw-int4", "quarot-int2")


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
    "values": boolean(),
}


@st.composite
def spelled(draw) -> tuple[str, dict[str, str]]:
    """A recipe as a user would type it: (name, options)."""
    name = draw(st.sampled_from(sorted(RECIPES)))
    allowed = [] if name == "bf16" else ["sink", "recent", "centre", "skip", "group"]
    allowed += ["order", "values"] if name in ROTATED else []
    chosen = draw(st.permutations(allowed))[: draw(st.integers(0, len(allowed)))]
    return name, {option: draw(OPTIONS[option]) for option in chosen}


def understood(option: str, text: str) -> object:
    """What the text of an option means."""
    if option in ("centre", "values"):
        return text == "true"
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
    ],
)
def test_only_what_differs_from_the_default_is_printed(text, printed):
    assert str(parse(text)) == printed


def test_recipes_are_listed_under_their_own_names():
    assert list(RECIPES) == ["bf16", "int8", "int4", "int2", "saw-int4", "quarot-int2"]
    assert all(recipe.name == name and recipe.summary for name, recipe in RECIPES.items())
    # centring is on wherever there are means, and off for the 16-bit reference
    assert [name for name, recipe in RECIPES.items() if not recipe.centre] == ["bf16"]


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
        ("int2:group=2", 64, "2 codes of 2 bits do not fill whole bytes"),
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
    RECIPES[name].check(geometry(head_dim))


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
    codecs = [recipe.layer_codecs(layer, model.head_dim) for layer in range(model.layers)]
    cache = PagedCache(codecs, model.kv_heads, 1, windows=recipe.windows, page_size=page_size)
    cache.extend([context])
    assert cache.allocated_bytes == storage_bytes(cache)
    return storage_bytes(cache)


WINDOWS = ["", "sink=4", "recent=1", "recent=70", "sink=64,recent=256", "sink=4,recent=64,skip=0+2", "skip=0+1+2"]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("options", WINDOWS)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_counted_bytes_are_the_allocated_bytes(name, options, head_dim):
    recipe = parse(f"{name}:{options}" if options and name != "bf16" else name)
    model = geometry(head_dim, layers=3)
    for page_size in (1, 3, 16, 64):
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
    recipe = parse("saw-int4:skip=1,values=true")
    for codec in recipe.layer_codecs(1, 64, torch.float16, means):
        assert codec.layout.slot_bytes == 128
        assert codec.transform.mean is None
        assert codec.transform.rotation is None
        assert codec.wide == torch.float16
    for codec, mean in zip(recipe.layer_codecs(0, 64, torch.float16, means), means, strict=True):
        assert codec.layout.slot_bytes == 36
        assert codec.transform.mean is mean
        assert codec.transform.rotation is not None
        assert codec.wide == torch.float16


def test_centring_can_be_turned_off():
    means = (torch.ones(2, 64), torch.ones(2, 64))
    assert all(codec.transform.mean is None for codec in parse("int4:centre=false").layer_codecs(0, 64, means=means))
    assert all(codec.transform.mean is not None for codec in parse("int4").layer_codecs(0, 64, means=means))


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
    codecs = parse(text).layer_codecs(0, 128)
    assert tuple(c.transform.rotation and c.transform.rotation.order for c in codecs) == orders


def test_recipes_cannot_be_changed_in_place():
    with pytest.raises(ValueError, match="frozen"):
        RECIPES["int4"].sink = 4
