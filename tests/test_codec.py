import numpy as np
import pytest
import torch
from clipping import clipped
from decoded_slots import decoded_by_hand
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import fitted
from rounded_rotations import as_multiplied, hadamard

from kvfold.format.codec import Codec
from kvfold.format.layout import Segment, SlotLayout, affine_slot, channel_slot, codebook_slot, mixed_slot, raw_slot
from kvfold.quantizers import affine, lloyd_max
from kvfold.recipes import RECIPES, parse
from kvfold.transforms import Hadamard, Matrix, Transform, random_rotation

HEAD_DIMS = [64, 80, 96, 128, 256]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def heavy_tailed(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_t(3, shape).astype(np.float32))


def error_bound(y: np.ndarray, bits: int) -> np.ndarray:
    """What |ŷ − y| may be at most for float64[..., n] of one group; [..., 1].

    With s = (max − min)/L, L = 2^bits − 1, the stored scale s' = s + e and offset o' = min + f are 16-bit roundings:
    |e| ≤ max(2^-11·s, 2^-25) and |f| ≤ max(2^-11·|min|, 2^-25), the second of each for subnormals.
    A number between o' and o' + L·s' is at most s'/2 from the grid; one below it at most |f|, one above it at most
    max − (o' + L·s') = −f − L·e. Then float32 arithmetic on numbers up to max |y|.
    """
    levels = 2**bits - 1
    low, high = y.min(-1, keepdims=True), y.max(-1, keepdims=True)
    scale = (high - low) / levels
    e, f = np.maximum(scale * 2**-11, 2**-25), np.maximum(np.abs(low) * 2**-11, 2**-25)
    float32 = 4 * 2**-24 * (np.abs(y).max(-1, keepdims=True) + high - low)
    return np.maximum((scale + e) / 2, f + levels * e) * (1 + 2**-10) + float32


def is_codebook_decoding(by_hand: np.ndarray, y: np.ndarray, bits: int, slack: np.ndarray) -> bool:
    """Whether `by_hand` [..., n] is norm·level of the level nearest to √n·y/‖y‖ everywhere, with norm = ‖y‖/‖level‖ in
    16 bits. A number halfway between two levels may go to either."""
    length = np.linalg.norm(y, axis=-1, keepdims=True)
    unit = y * y.shape[-1] ** 0.5 / np.maximum(length, 1e-300)
    table = np.array(lloyd_max.levels(bits))
    distances = np.abs(unit[..., None] - table)
    order = np.argsort(distances, axis=-1)[..., :2]
    levels, distances = table[order], np.take_along_axis(distances, order, axis=-1)
    norm = length / np.linalg.norm(levels[..., 0], axis=-1, keepdims=True)
    bound = 2**-10 * np.abs(by_hand) + 2**-24 * 4 + slack
    first = np.abs(by_hand - norm * levels[..., 0]) <= bound
    tie = distances[..., 1] - distances[..., 0] <= 1e-5 + 4 * slack / np.maximum(norm, 1e-300)
    if tie.any():  # the norm may be that of the other levels, too
        rows = tie.any(-1)
        first[rows] |= np.abs(by_hand - norm * levels[..., 0])[rows] <= 0.2 * np.abs(by_hand)[rows]
    return bool((first | (tie & (np.abs(by_hand - norm * levels[..., 1]) <= bound + 0.2 * np.abs(by_hand)))).all())


def keeps_products(by_hand: np.ndarray, y: np.ndarray, bits: int) -> bool:
    """Whether the product of y [..., n] with `by_hand` is that with itself, but for an 8-bit scale. 8-bit codes do not
    make up for clamped outliers. Where scales are too small, the product may be zero.

    That levels are the nearest: tests/quantizers/test_even.py."""
    own, product = (y * y).sum(-1), (y * by_hand).sum(-1)
    small = np.linalg.norm(y, axis=-1) < 2**-7 * 200
    return bool(
        (np.abs(product - own) <= (2**-4 if bits < 8 else 0.2) * own + np.where(small & (product == 0), own, 0)).all()
    )


# --- the quantizer


def finite(limit: float) -> st.SearchStrategy[float]:
    return st.floats(-limit, limit, width=32)


@st.composite
def vectors(draw) -> np.ndarray:
    """float32 vectors of every kind that is hard to quantize."""
    n = draw(st.sampled_from((1, 2, 8, 33, 64)))
    seed = np.random.default_rng(draw(st.integers(0, 2**32)))
    noise = seed.standard_normal(n)
    kind = draw(
        st.sampled_from(("any", "constant", "huge", "tiny", "outlier", "offset", "two values", "subnormal scale"))
    )
    if kind == "any":
        size = draw(st.sampled_from((2.0**-100, 2.0**-20, 1.0, 60000.0)))
        x = np.array(draw(st.lists(finite(size), min_size=n, max_size=n)))
    elif kind == "constant":
        x = np.full(n, draw(finite(65504)))
    elif kind == "huge":
        x = seed.uniform(-60000, 60000, n)
        x[0], x[-1] = 60000, -60000
    elif kind == "tiny":
        x = noise * 10.0 ** -draw(st.integers(3, 40))
    elif kind == "outlier":
        x = noise * 0.01
        x[seed.integers(n)] = draw(finite(60000))
    elif kind == "offset":
        x = draw(finite(60000)) + noise * 10.0 ** -draw(st.integers(0, 6))
    elif kind == "two values":
        x = np.where(noise > 0, draw(finite(30000)), draw(finite(30000)))
    else:
        x = seed.uniform(0, 1, n) * draw(st.integers(1, 400)) * 2.0**-26
    return x.astype(np.float32)


@settings(deadline=None, derandomize=True, max_examples=600)
@given(vectors(), st.integers(2, 8))
def test_codes_are_the_nearest_and_metadata_is_rounded_once(x, bits):
    levels = 2**bits - 1
    codes, meta = affine.quantize(torch.from_numpy(x), bits)
    assert codes.dtype == torch.uint8
    assert codes.shape == x.shape
    assert meta.dtype == torch.float16
    assert meta.shape == (2,)

    exact = x.astype(np.float64)
    expected = np.array([(exact.max() - exact.min()) / levels, exact.min()])
    spacing = np.maximum(2.0 ** (np.floor(np.log2(np.maximum(np.abs(expected), 2.0**-14))) - 10), 2.0**-24)
    stored = meta.double().numpy()
    # exactly rounded, but for float32 arithmetic on the way to a number that lies between two of float16
    assert (np.abs(stored - expected) <= spacing / 2 * (1 + 2**-9)).all()

    scale, offset = stored
    grid = scale * np.arange(levels + 1) + offset
    decoded = affine.dequantize(codes, meta).double().numpy()
    assert np.abs(decoded - grid[codes.numpy()]).max() <= 2**-23 * np.abs(grid).max()
    error = np.abs(decoded - exact)
    nearest = np.abs(exact[:, None] - grid).min(axis=1)
    slack = 2**-22 * (np.abs(exact).max() + np.abs(grid).max())
    assert (error <= nearest + slack).all()
    assert (error <= error_bound(exact, bits)).all()


@pytest.mark.parametrize("bits", range(1, 9))
def test_constants_of_sixteen_bits_decode_exactly(bits):
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    constants = halves[torch.isfinite(halves)].float()[:, None].expand(-1, 8).contiguous()
    assert len(constants) == 2 * 31 * 1024
    codes, meta = affine.quantize(constants, bits)
    assert (meta[:, 0] == 0).all()
    assert torch.equal(affine.dequantize(codes, meta), constants)


@pytest.mark.parametrize("dims", [1, 3, 8, 33, 64])
@pytest.mark.parametrize("tokens", [0, 1, 7, 130])
def test_every_code_is_its_multiple_of_the_scale_rounded_once(tokens, dims):
    """A code of 8 bits times a scale of 11 is exact in float32, so that only the sum is rounded."""
    generator = torch.Generator().manual_seed(dims)
    codes = torch.randint(0, 256, (dims, 2, tokens), dtype=torch.uint8, generator=generator).permute(2, 1, 0)
    meta = torch.randn(tokens, 2, 6, generator=generator).half()[..., 2:4]  # as a slot of three segments has them
    expected = (codes.double() * meta[..., :1].double() + meta[..., 1:].double()).float()
    decoded = affine.dequantize(codes, meta)
    assert decoded.dtype == torch.float32
    assert torch.equal(decoded, expected)


def test_what_lies_on_the_grid_decodes_exactly():
    for bits in range(1, 9):
        grid = torch.arange(2**bits).float() * 0.25 - 3.5
        codes, meta = affine.quantize(grid, bits)
        assert codes.tolist() == list(range(2**bits))
        assert meta.tolist() == [0.25, -3.5]
        assert torch.equal(affine.dequantize(codes, meta), grid)


BAD = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_nan_and_inf_are_refused_wherever_they_are(bad, bits):
    for place in range(72):  # past whatever vectors of numbers the processor works on at once
        x = heavy_tailed(1, 72)
        x[0, place] = bad
        with pytest.raises(ValueError, match="NaN, Inf or numbers beyond"):
            Codec(affine_slot(72, bits)).encode(x)


@pytest.mark.parametrize("low", [-65520.0, -1e5, -3e38])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_numbers_that_sixteen_bit_metadata_cannot_hold_are_refused(low, bits):
    x = heavy_tailed(3, 64)
    x[1, 40] = low
    high = torch.zeros(1, 64)
    high[0, 1] = 3e38
    for vectors in (x, torch.full((1, 64), -low), high):
        with pytest.raises(ValueError, match="numbers beyond the range of 16-bit floats"):
            Codec(affine_slot(64, bits)).encode(vectors)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_float16_is_accepted(bits):
    x = torch.tensor([-65504.0, 65504.0, 0.0, 1.0])
    decoded = affine.dequantize(*affine.quantize(x, bits))
    assert (np.abs(decoded.double().numpy() - x.numpy()) <= error_bound(x.double().numpy(), bits)).all()


@pytest.mark.parametrize("bits", [2, 4])
def test_sixteen_bit_metadata_costs_little(bits):
    """Squared error against the same integers with float64 metadata: within half a percent, offsets included."""
    for offset in (0.0, 8.0):
        x = heavy_tailed(4096, 128, seed=bits) + offset
        exact = x.double()
        low, high = exact.aminmax(dim=-1, keepdim=True)
        scale = (high - low) / (2**bits - 1)
        ideal = ((exact - low) / scale).round() * scale + low
        decoded = affine.dequantize(*affine.quantize(x, bits)).double()
        ratio = float((decoded - exact).square().sum() / (ideal - exact).square().sum())
        assert ratio < 1.005, f"{bits} bits, offset {offset}: {ratio}"


# --- the whole way


def with_groups(name: str, dims: int) -> list[str]:
    """The recipe, and variants of it that fit the head dimension."""
    if name.startswith("kivi"):
        return [f"{name}:group={dims // 4}"]
    if name.startswith("kitty"):
        return [f"{name}:boost={8 / dims}"]
    if name.startswith("kmeans"):
        return [
            f"{name}:centroids=9",
            f"{name}:centroids=9,group=16" + (",order=16,values=true" if "saw" in name else ""),
        ]
    variants = [name]
    variants += [f"{name}:group={dims // 2}"] if "group" in RECIPES[name].options else []
    variants += [f"{name}:order=16,values=true,group=16"] if "order" in RECIPES[name].options else []
    if name.startswith("gtq"):
        return [name, f"{name}:widths=all,per_head=true"]
    return variants + ([f"{name}:per_head=true,group={dims}"] if "per_head" in RECIPES[name].options else [])


CASES = [
    (text, dims)
    for name in RECIPES
    for dims in (HEAD_DIMS if not name.endswith(("k2v2", "k4v4")) else [80])
    if not (name.startswith("fold") and dims % 32)
    for text in with_groups(name, dims)
]
KV_HEADS = 3


def matrices(text: str, dims: int, which: int, fit: dict[str, torch.Tensor], codec: Codec) -> list[np.ndarray]:
    """The linear map of a recipe and its inverse, from its definition."""
    recipe, name = parse(text), name_of(text)
    if name in ("saw-int4", "quarot-int2", "kmeans-saw-int4") and (which == 0 or recipe.values):
        matrix = hadamard(dims, recipe.order or min(dims & -dims, 128))
    elif name == "oscar-int2" or (name == "hessian-int4" and which == 0):
        matrix = fit[("key_rotation", "value_rotation")[which]].double().numpy()
    elif name.startswith("tq") or (name.startswith("gtq") and which == 1):
        matrix = random_rotation(dims, which).numpy()
    elif name.startswith(("fold", "gtq")):  # tests/methods builds it by hand
        matrix = codec.transform.rotation.matrix.double().numpy()
    else:
        matrix = np.eye(dims)
    matrix = as_multiplied(matrix)
    return [matrix, np.linalg.inv(matrix)]


def mapped(x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """x [..., kv_heads, d] times one matrix, or one for each KV head."""
    return np.einsum("...hd,hde->...he", x, np.broadcast_to(matrix, (x.shape[-2], *matrix.shape[-2:])))


@pytest.mark.parametrize("text", ["int4", "saw-int4", "oscar-int2", "gtq-k3v3", "fold4", "kmeans-int4:centroids=9"])
def test_keys_at_the_first_position_are_read_by_their_difference_from_the_first_key(text):
    """In the keys' own coordinates: k0 − first + mean is encoded. Decoded, first − mean is added to it again."""
    fit = fitted(text, 64, KV_HEADS)
    shift = fit["key_first"] - fit["key_mean"]
    assert shift.norm() > 5 * heavy_tailed(1, KV_HEADS, 64).norm() / 10, "the first key is far from the mean"
    position = torch.tensor([4, 0, 1, 7, 0, 2])
    x = fit["key_mean"] + 0.1 * heavy_tailed(6, KV_HEADS, 64)
    x[position == 0] += shift
    key, value = parse(text).codecs(64, 64, fit)
    read = key.read_packed(x, position)
    for token, expected in enumerate(x):
        own = shift if position[token] == 0 else torch.zeros_like(shift)
        decoded = key.decode(key.encode((expected - own)[None]))[0] + own
        torch.testing.assert_close(read[token], decoded, rtol=0, atol=1e-5 * float(expected.abs().max()))
    lost = (read - x).flatten(1).norm(dim=1)
    assert lost[position == 0].max() < 2 * lost[position > 0].max()
    assert torch.equal(value.read_packed(x, position), value.decode(value.encode(x)))


@pytest.mark.parametrize(("text", "dims"), CASES)
@pytest.mark.parametrize("centred", [False, True])
def test_recipes_encode_and_decode_within_the_bound(text, dims, centred):
    recipe = parse(text)
    fit = fitted(text, dims, KV_HEADS, centred)
    x = heavy_tailed(2, 20, KV_HEADS, dims, seed=dims)
    largest = 10 if name_of(text).startswith("fold") else 60000  # 8-bit scales have a smaller range
    x[0, 0] = largest * x[0, 0] / x[0, 0].abs().max()
    x[0, 1] = 1.5
    x[0, 2] *= 1e-6
    x[0, 3, :, 7] = min(largest, 500)
    if centred and recipe.centre:
        x[0, 4:6] += fit["key_mean"]
    for which, codec in enumerate(recipe.codecs(dims, dims, fit)):
        if codec.layout.per_page:  # tests/quantizers/test_channelwise.py
            with pytest.raises(ValueError, match="a token alone has no slot"):
                codec.encode(x)
            continue
        slots = codec.encode(x)
        assert slots.dtype == torch.uint8
        assert slots.shape == (2, 20, KV_HEADS, codec.layout.slot_bytes)
        decoded = codec.decode(slots)
        assert decoded.dtype == torch.float32
        assert decoded.shape == x.shape

        matrix, inverse = matrices(text, dims, which, fit, codec)
        exact = x.double().numpy()
        mean = fit[("key_mean", "value_mean")[which]].double().numpy() if centred and recipe.centre else 0.0
        transformed = mapped(exact - mean, matrix)

        by_hand = decoded_by_hand(slots, codec.layout, torch.bfloat16, codec.centroids)
        # float32 sums of dims terms, as large as the matrix and the vectors make them
        size = np.linalg.norm(exact - mean, axis=-1, keepdims=True) * np.linalg.norm(matrix, ord=2, axis=(-2, -1)).max()
        back = np.linalg.norm(by_hand, axis=-1, keepdims=True) * np.linalg.norm(inverse, ord=2, axis=(-2, -1)).max()
        float32 = dims * 2**-24 * (np.maximum(size, back) + np.abs(mean).max())
        assert (np.abs(decoded.numpy() - (mapped(by_hand, inverse) + mean)) <= float32).all()

        if codec.layout.centroid:  # the nearest over all heads together, less which the rest is quantized
            distances = np.square(transformed[..., None, :] - codec.centroids.double().numpy()).sum((-1, -3))
            centroid = codec.centroids.double().numpy()[:, distances.argmin(-1)]  # [kv_heads, 2, 20, d]
            transformed, by_hand = (y - np.moveaxis(centroid, 0, 2) for y in (transformed, by_hand))
        if codec.clip is not None:
            assert codec.clip == fit[("key_clip", "value_clip")[which]]
        for head in range(KV_HEADS):
            for segment in (codec.layout.heads[head] if codec.layout.heads else codec.layout).segments:
                part = (..., head, slice(segment.start, segment.stop))
                y, rounding = transformed[part], float32[..., head, :]
                if codec.clip is not None:
                    y = clipped(y, codec.clip)
                if segment.rule == "codebook":
                    assert is_codebook_decoding(by_hand[part], y, segment.bits, rounding)
                    continue
                if segment.rule == "even":
                    assert keeps_products(by_hand[part], y, segment.bits)
                    continue
                bound = 2**-8 * np.abs(y) if text == "bf16" else error_bound(y, recipe.bits)
                assert (np.abs(by_hand[part] - y) <= bound + 2 * rounding).all()


def name_of(text: str) -> str:
    return text.partition(":")[0]


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a - b).abs() <= 2**-20 * b.norm(dim=-1, keepdim=True)).all())


ROW_BY_ROW = [
    "bf16",
    "int8",
    "int4:group=32",
    "int2",
    "saw-int4",
    "quarot-int2:order=16",
    "kmeans-saw-int4:centroids=20",
    "hessian-int4",
    "oscar-int2:per_head=true",
    "tq-k3v5",
    "gtq-k3v2",
    "gtq-k2v2:widths=all,per_head=true",
    "fold4",
    "fold3",
]


@pytest.mark.pairs
@pytest.mark.parametrize("text", ROW_BY_ROW)
@pytest.mark.parametrize("dims", [64, 96, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_by_row_is_all_at_once_bit_for_bit(text, dims, dtype):
    x = heavy_tailed(36, 2, dims, seed=dims).to(dtype)
    for codec in parse(text).codecs(dims, dims, fitted(text, dims, 2)):
        slots = codec.encode(x)
        # what is stored and read is the same; a product with a matrix for each head may add up in another order
        rotation = codec.transform.rotation
        same = close if isinstance(rotation, Matrix) and len(rotation.matrix) > 1 else torch.equal
        for rows in (1, 5):
            parts = x.split(rows)
            assert torch.equal(torch.cat([codec.encode(part) for part in parts]), slots)
            assert same(torch.cat([codec.decode(part) for part in slots.split(rows)]), codec.decode(slots))
        assert torch.equal(codec.encode(x[13]), slots[13])
        batch, batch_slots = x.unflatten(0, (4, 9)).transpose(0, 1), slots.unflatten(0, (4, 9)).transpose(0, 1)
        assert torch.equal(codec.encode(batch), batch_slots)
        assert same(codec.decode(batch_slots), codec.decode(slots).unflatten(0, (4, 9)).transpose(0, 1))


@pytest.mark.parametrize("raw_dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_slots_keep_sixteen_bit_numbers(raw_dtype):
    x = heavy_tailed(50, 2, 80).to(raw_dtype)
    codec = Codec(raw_slot(80), raw_dtype=raw_dtype)
    slots = codec.encode(x)
    assert torch.equal(slots, x.view(torch.uint8))
    assert torch.equal(codec.decode(slots), x.float())
    assert np.array_equal(decoded_by_hand(slots, codec.layout, raw_dtype), x.double().numpy())


@pytest.mark.parametrize("raw_dtype", [torch.bfloat16, torch.float16])
def test_slots_of_many_widths(raw_dtype):
    """Every width in one slot, a raw segment in the middle: all segments decode from the bytes as documented."""
    bounds = [(0, 8, 1), (8, 24, 2), (24, 32, 3), (32, 40, 4), (56, 64, 5), (64, 72, 6), (72, 80, 7), (80, 96, 8)]
    segments = [Segment(*bound) for bound in bounds]
    segments.insert(4, Segment(40, 56, 16, "raw"))
    codec = Codec(SlotLayout(tuple(segments)), Transform(heavy_tailed(2, 96, seed=1), Hadamard(32)), raw_dtype)
    # codes 1 + 4 + 3 + 4 + 32 + 5 + 6 + 7 + 16, metadata 8·4
    assert codec.layout.slot_bytes == 78 + 32
    x = heavy_tailed(30, 2, 96, seed=2)
    slots = codec.encode(x)
    by_hand = decoded_by_hand(slots, codec.layout, raw_dtype)
    y = (x.double() - codec.transform.mean.double()).numpy() @ hadamard(96, 32)
    for segment in segments:
        part = slice(segment.start, segment.stop)
        raw = segment.rule == "raw"
        bound = 2**-8 * np.abs(y[..., part]) if raw else error_bound(y[..., part], segment.bits)
        assert (np.abs(by_hand[..., part] - y[..., part]) <= bound + 1e-5).all()
    back = by_hand @ hadamard(96, 32).T + codec.transform.mean.double().numpy()
    np.testing.assert_allclose(codec.decode(slots).numpy(), back, atol=1e-5)


def test_codebook_segments_of_many_widths():
    """Widths 1 to 8 in one slot, of sizes that fill whole bytes and others."""
    widths = [(16, 8), (8, 7), (8, 6), (24, 5), (6, 4), (18, 3), (2, 2), (14, 1)]
    y = heavy_tailed(30, 2, 96, seed=2).double().numpy()
    codec = Codec(codebook_slot(widths))
    # codes 16 + 7 + 6 + 15 + 4 + 9 + 2 + 2
    assert codec.layout.slot_bytes == 61 + 2 * 8
    slots = codec.encode(torch.from_numpy(y).float())
    by_hand = decoded_by_hand(slots, codec.layout, torch.bfloat16)
    np.testing.assert_allclose(codec.decode(slots).numpy(), by_hand, rtol=1e-6, atol=1e-6)
    for segment in codec.layout.segments:
        part = slice(segment.start, segment.stop)
        assert is_codebook_decoding(by_hand[..., part], y[..., part], segment.bits, np.array(1e-5))
        lengths = (np.linalg.norm(values[..., part], axis=-1) for values in (by_hand, y))
        np.testing.assert_allclose(*lengths, rtol=2**-10)


@pytest.mark.parametrize("heads", [-3, -5])
def test_heads_with_layouts_of_their_own(heads):
    """Each is quantized as it would be alone, wherever the dimension of heads lies."""
    layouts = [codebook_slot(widths) for widths in ([(16, 4), (16, 1)], [(32, 2)], [(10, 4), (6, 3), (16, 1)])]
    codec, y = Codec(mixed_slot(layouts)), heavy_tailed(20, 3, 1, 32, seed=2)
    codes, meta = codec.quantize(y)
    expected = torch.cat(
        [Codec(layout).dequantize(*Codec(layout).quantize(y[:, i : i + 1])) for i, layout in enumerate(layouts)], dim=1
    )
    if heads == -3:
        got = codec.dequantize(codes, meta)
    else:
        codes, meta = (array.permute(1, 2, 0, 3).unflatten(2, (4, 5)) for array in (codes, meta))
        got = codec.dequantize(codes, meta, heads=-5).flatten(2, 3).permute(2, 0, 1, 3)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("heads", [-3, -5])
def test_centroids_are_added_for_their_own_head_wherever_that_dimension_lies(heads):
    """[tokens, kv_heads, sides, …], as `quantize` has it, and [kv_heads, sides, pages, page_size, …]."""
    centroids = heavy_tailed(3, 7, 16, seed=1)
    codec = Codec(SlotLayout(affine_slot(16, 4).segments, centroid=True), centroids=centroids)
    y = heavy_tailed(20, 3, 1, 16, seed=2)
    codes, meta = codec.quantize(y)
    assert codes.shape == (20, 3, 1, 8)
    assert meta.shape == (20, 3, 1, 3)
    numbers = meta[..., 2].contiguous().view(torch.int16).long()
    assert (numbers == numbers[:, :1]).all(), "one centroid for all heads of a token"
    residuals = codec.layout.segments
    plain = Codec(SlotLayout(residuals)).dequantize(codes, meta[..., :2])
    expected = torch.stack([plain[i, :, 0] + centroids[:, numbers[i, 0, 0]] for i in range(20)])
    if heads == -3:
        got = codec.dequantize(codes, meta)[:, :, 0]
    else:
        codes, meta = (array.permute(1, 2, 0, 3).unflatten(2, (4, 5)) for array in (codes, meta))
        got = codec.dequantize(codes, meta, heads=-5)[:, 0].flatten(1, 2).transpose(0, 1)
    assert torch.equal(got, expected)


def test_keys_and_values_go_together_only_where_they_are_quantized_alike():
    codec = Codec(affine_slot(16, 4))
    centroids = torch.zeros(1, 2, 16)
    assert codec.quantizes_like(Codec(affine_slot(16, 4), Transform(torch.ones(1, 16), Hadamard(16))))
    for other in (
        Codec(affine_slot(16, 2)),
        Codec(affine_slot(16, 4), clip=0.9),
        Codec(affine_slot(16, 4), centroids=centroids),
        Codec(channel_slot(16, 4)),
    ):
        assert not codec.quantizes_like(other)
        assert not other.quantizes_like(codec)
    assert not Codec(affine_slot(16, 4), centroids=centroids).quantizes_like(
        Codec(affine_slot(16, 4), centroids=centroids)
    )


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("bad", BAD)
def test_recipes_refuse_nan_and_inf(name, bad):
    text = f"{name}:centroids=9" if name.startswith("kmeans") else name
    for codec in parse(text).codecs(64, 64, fitted(text, 64, 2)):
        x = heavy_tailed(5, 2, 64)

        def store(x: torch.Tensor, codec: Codec = codec) -> None:
            codec.quantize(
                codec.transform.forward(x)[None, :, :, None]
            )  # the five tokens are one page, where that counts

        store(x)
        x[3, 1, 63] = bad
        with pytest.raises(ValueError, match="NaN, Inf or numbers beyond"):
            store(x)


def test_sixteen_bit_slots_refuse_what_their_type_cannot_hold():
    x = torch.full((2, 64), 70000.0)
    Codec(raw_slot(64)).encode(x)
    with pytest.raises(ValueError, match="beyond the range of 16-bit floats"):
        Codec(raw_slot(64), raw_dtype=torch.float16).encode(x)
    with pytest.raises(ValueError, match="beyond the range of 16-bit floats"):
        Codec(raw_slot(64)).encode(torch.full((2, 64), 3.4e38))


def test_vectors_of_another_size_are_refused():
    with pytest.raises(ValueError, match="vectors of 80 dims do not fit a slot of 64"):
        Codec(affine_slot(64, 4)).encode(torch.zeros(2, 80))


@pytest.mark.parametrize(
    "text", ["bf16", "int4:group=32", "saw-int4", "kmeans-int4:centroids=9", "hessian-int4", "oscar-int2", "gtq-k3v3"]
)
def test_no_tokens_are_no_slots(text):
    for codec in parse(text).codecs(64, 64, fitted(text, 64, 2)):
        slots = codec.encode(torch.zeros(0, 2, 64))
        assert slots.shape == (0, 2, codec.layout.slot_bytes)
        assert codec.decode(slots).shape == (0, 2, 64)
