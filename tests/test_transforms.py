import numpy as np
import pytest
import scipy.linalg
import torch
from random_layers import fitted
from rounded_rotations import eight_bits, hadamard

from kvfold.recipes import RECIPES, parse
from kvfold.transforms import Hadamard, Matrix, Transform, random_rotation
from kvfold.transforms.covariance import bit_reversal, eigenvectors

ORDERS = [1, 2, 4, 8, 16, 32, 64, 128, 256]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Heavy-tailed float32: what keys look like."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_t(3, shape).astype(np.float32))


@pytest.mark.parametrize("order", ORDERS)
def test_hadamard_is_scipys_matrix_in_every_block(order):
    h = scipy.linalg.hadamard(order) / np.sqrt(order)
    assert np.array_equal(h, hadamard(order, order))
    for blocks in (1, 2, 3):
        x = numbers(7, 2, blocks * order, seed=order)
        expected = x.double().numpy() @ np.kron(np.eye(blocks), h)
        got = Hadamard(order).apply(x)
        assert got.dtype == torch.float32
        # one rounding to float32 of an exact sum
        np.testing.assert_allclose(got.double().numpy(), expected, rtol=2**-23, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dims", "order"), [(64, 64), (80, 16), (96, 32), (128, 128), (256, 128), (256, 256)])
@pytest.mark.parametrize("centred", [False, True])
def test_a_row_does_not_depend_on_the_rows_beside_it(dims, order, dtype, centred):
    """Bit for bit: alone, in odd chunks, or all at once; whatever the layout in memory."""
    x = numbers(61, 2, dims, seed=dims).to(dtype)
    mean = numbers(2, dims, seed=3) if centred else None
    transform = Transform(mean, Hadamard(order))
    together = transform.forward(x)
    assert together.dtype == torch.float32
    for rows in (1, 2, 7, 50):
        assert torch.equal(torch.cat([transform.forward(part) for part in x.split(rows)]), together)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(transform.forward(strided), together)
    assert torch.equal(transform.forward(x.expand(3, *x.shape)), together.expand(3, *together.shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotated_sums_are_exact(dtype):
    """Against integer arithmetic: float64 sums of ±x lose nothing where magnitudes differ by 2^20."""
    generator = torch.Generator().manual_seed(7)
    exponents = torch.randint(-10, 11, (40, 128), generator=generator)
    x = (torch.randn(40, 128, generator=generator).clamp(-4, 4).sign() * 2.0**exponents).to(dtype)
    x *= 1 + torch.randint(0, 128, x.shape, generator=generator).to(dtype) / 128  # all 8 bits of a bfloat16
    got = Hadamard(64).apply(x) * 8  # √64: a power of two, so exact
    scaled = (x.double() * 2**30).to(torch.int64).tolist()  # exact integers
    signs = [[1 - 2 * ((i & j).bit_count() % 2) for j in range(64)] for i in range(64)]
    for row, ints in enumerate(scaled):
        for start in (0, 64):
            block = ints[start : start + 64]
            sums = [sum(value * signs[i][j] for i, value in enumerate(block)) for j in range(64)]
            expected = torch.tensor(sums, dtype=torch.int64).double() / 2**30
            assert torch.equal(got[row, start : start + 64], expected.float())


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Float64 attention of [n, d] queries over [tokens, d]."""
    return torch.softmax(q.double() @ k.double().T / 8, dim=-1) @ v.double()


@pytest.mark.parametrize("order", [4, 16, 64])
@pytest.mark.parametrize("values", [False, True])
def test_centring_and_rotation_leave_attention_unchanged(order, values):
    """Numbers and means are small multiples of 1/16 and √order is a power of two, so that every float32 result is exact
    and only float64 attention itself rounds."""
    generator = torch.Generator().manual_seed(order)
    q, k, v = (torch.randint(-64, 65, (n, 64), generator=generator) / 16 for n in (5, 40, 40))
    means = torch.randint(-512, 513, (2, 1, 64), generator=generator) / 16
    keys = Transform(means[0], Hadamard(order))
    value_transform = Transform(means[1], Hadamard(order) if values else None)
    mixed = attention(keys.dual(q), keys.forward(k), value_transform.forward(v))
    inverse = mixed @ torch.from_numpy(hadamard(64, order)) if values else mixed
    expected = attention(q, k, v)
    assert torch.allclose(inverse + means[1].double(), expected, rtol=0, atol=1e-12)
    # and by the transform's own, float32 inverse, of vectors as long as the mean
    got = value_transform.inverse(mixed.float()).double()
    assert torch.allclose(got, expected, rtol=0, atol=2**-21 * float(means[1].norm()))


def test_each_kv_head_has_its_own_mean():
    mean = numbers(3, 64, seed=5)
    x = numbers(10, 3, 64, seed=6)
    y = Transform(mean).forward(x)
    for head in range(3):
        assert torch.equal(y[:, head], x[:, head] - mean[head])
    assert torch.allclose(Transform(mean).inverse(y), x, atol=1e-5)
    assert torch.equal(Transform(mean).dual(x), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_mean_and_rotation_nothing_changes(dtype):
    x = numbers(4, 2, 80).to(dtype)
    for apply in (Transform().forward, Transform().dual):
        assert apply(x).dtype == torch.float32
        assert torch.equal(apply(x), x.float())
    assert torch.equal(Transform().inverse(x.float()), x.float())


def test_forward_does_not_change_its_input():
    x = numbers(4, 2, 64)
    before = x.clone()
    Transform(numbers(2, 64, seed=9), Hadamard(64)).forward(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("dims", "order"), [(64, 64), (80, 16), (96, 32), (128, 128), (256, 128), (512, 128), (1, 1), (3, 1)]
)
def test_default_order_is_the_largest_power_of_two_that_divides(dims, order):
    rotation, _ = parse("saw-int4").rotations(dims, dims, {})
    assert rotation.order == order
    assert order == max(o for o in (1, 2, 4, 8, 16, 32, 64, 128) if dims % o == 0)


@pytest.mark.parametrize("order", [-2, 0, 3, 12, 48, 80, 96])
def test_an_order_that_is_no_power_of_two_is_refused(order):
    with pytest.raises(ValueError, match=f"order={order} is not a power of two"):
        Hadamard(order)


@pytest.mark.parametrize(("dims", "order"), [(80, 32), (96, 64), (64, 128), (128, 256)])
def test_an_order_that_does_not_divide_is_refused(dims, order):
    rotation = Hadamard(order)
    for apply in (rotation.apply, rotation.invert, rotation.dual):
        with pytest.raises(ValueError, match=f"order={order} does not divide the head dimension {dims}"):
            apply(torch.zeros(2, dims))


# --- dense maps


def orthogonal(heads: int, dims: int, seed: int = 0) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((heads, dims, dims)))[0]


@pytest.mark.parametrize("heads", [1, 2])
def test_matrices_of_each_kv_head(heads):
    """Keys have 2 heads, queries 3 for each of them; against numpy, head by head. The maps need not be orthogonal."""
    exactly = orthogonal(heads, 24) * np.geomspace(0.25, 4, 24)
    matrices = eight_bits(exactly)
    rotation = Matrix(torch.from_numpy(exactly).float())
    k, q = numbers(7, 2, 24, seed=1), numbers(5, 6, 24, seed=2)
    forward, dual, back = rotation.apply(k), rotation.dual(q), rotation.invert(q)
    assert (forward.dtype, dual.dtype, back.dtype) == (torch.float32,) * 3
    for head in range(6):
        inverse, exact = np.linalg.inv(matrices[head // 3 % heads]), q[:, head].double().numpy()
        np.testing.assert_allclose(dual[:, head].numpy(), exact @ inverse.T, atol=2e-5)
        np.testing.assert_allclose(back[:, head].numpy(), exact @ inverse, atol=2e-5)
    for head in range(2):
        exact = k[:, head].double().numpy() @ matrices[head % heads]
        np.testing.assert_allclose(forward[:, head].numpy(), exact, atol=2e-5)
    logits = np.einsum("qhgd,khd->hgqk", dual.unflatten(1, (2, 3)).double().numpy(), forward.double().numpy())
    expected = np.einsum("qhgd,khd->hgqk", q.unflatten(1, (2, 3)).double().numpy(), k.double().numpy())
    np.testing.assert_allclose(logits, expected, atol=2e-4)


@pytest.mark.parametrize(("dims", "signs"), [((32, 16), True), ((24, 24), False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_matrix_is_exact(dims, signs, dtype):
    """Blocks of signs, with a permutation per head, are one term for queries too. Other random rotations are rounded
    first, and queries have two terms."""
    blocks = torch.block_diag(*(random_rotation(each, 5) for each in dims)).float()
    matrices = torch.stack([blocks, blocks.roll(7, dims=0)])
    rotation = Matrix.of_signs(matrices).to("cpu")
    matrix, duals, factors = rotation.terms(sum(dims), dtype, matrices.device)
    assert [term.dtype for term in (matrix, *duals)] == [dtype] * (2 if signs else 3)
    expected = matrices.double().numpy() if signs else eight_bits(matrices.numpy())
    np.testing.assert_array_equal((factors * matrix.double()).numpy(), expected)
    of_queries = np.linalg.inv(expected).swapaxes(1, 2)
    product = factors * torch.stack(duals).double().sum(dim=0)
    np.testing.assert_allclose(product.numpy(), of_queries, rtol=0, atol=2**-17)
    np.testing.assert_allclose(rotation.dense(sum(dims), matrices.device), of_queries, rtol=0, atol=2**-23)
    assert np.abs(expected - matrices.numpy()).max() <= 2**-9  # entries are below 1


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_times_a_matrix_does_not_depend_on_the_rows_beside_it(heads, dtype):
    transform = Transform(numbers(2, 80, seed=3), Matrix(torch.from_numpy(orthogonal(heads, 80)).float()))
    x = numbers(61, 2, 80).to(dtype)
    together = transform.forward(x)
    for rows in (1, 2, 7, 50):
        assert torch.equal(torch.cat([transform.forward(part) for part in x.split(rows)]), together)


@pytest.mark.parametrize("dims", [8, 16, 64, 128, 24, 80, 96])
def test_random_rotations(dims):
    rotation = random_rotation(dims, 5)
    assert rotation.dtype == torch.float64
    assert torch.allclose(rotation @ rotation.T, torch.eye(dims, dtype=torch.float64), atol=1e-12)
    assert torch.equal(rotation, random_rotation.__wrapped__(dims, 5)), "drawn from the seed alone"
    assert not torch.equal(rotation, random_rotation(dims, 6))
    if dims & (dims - 1) == 0:
        signs = rotation[:, :1].sign()  # the first column of a Hadamard matrix is all ones
        assert np.allclose(rotation.numpy(), signs.numpy() * hadamard(dims, dims), atol=1e-12)
        assert 0 < (signs > 0).sum() < dims
    else:
        assert rotation.abs().max() > 1.5 * dims**-0.5, "as no Hadamard matrix"


def test_random_rotations_are_the_same_everywhere():
    """Pinned numbers: what was stored on another machine must be readable here."""
    signs = random_rotation(16, 0)[:, 0].sign().int().tolist()
    assert signs == [-1, 1, 1, -1, 1, 1, 1, 1, 1, 1, 1, -1, -1, 1, -1, -1]


# --- rotations out of moments


def test_eigenvectors_by_descending_eigenvalue_with_fixed_signs():
    x = np.random.default_rng(0).standard_normal((3, 50, 12)) * np.exp(np.linspace(-2, 2, 12))
    moments = np.einsum("hni,hnj->hij", x, x)
    vectors = eigenvectors(torch.from_numpy(moments)).numpy()
    for moment, columns in zip(moments, vectors, strict=True):
        values = np.diag(columns.T @ moment @ columns)
        np.testing.assert_allclose(columns.T @ moment @ columns, np.diag(values), atol=1e-9 * values.max())
        np.testing.assert_allclose(columns.T @ columns, np.eye(12), atol=1e-12)
        assert (np.diff(values) < 0).all()
        for column in columns.T:
            assert column[np.abs(column).argmax()] > 0


def test_bit_reversal():
    assert bit_reversal(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    assert bit_reversal(2).tolist() == [0, 1]
    for dims in (16, 64, 128):
        bits = dims.bit_length() - 1
        assert bit_reversal(dims).tolist() == [int(f"{i:0{bits}b}"[::-1], 2) for i in range(dims)]
    for dims in (24, 80, 96):  # where there is none: still a permutation, which spreads neighbours
        order = bit_reversal(dims).tolist()
        assert sorted(order) == list(range(dims))
        assert [i for i in order if i < 8] != list(range(8))


# --- every recipe


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dims", [64, 96])
@pytest.mark.parametrize("centred", [False, True])
def test_every_recipe_keeps_logits_and_outputs(name, dims, centred):
    """dual(q)·forward(k) is q·k but for a constant of each query, which centring adds; inverse undoes forward."""
    text = f"{name}:centroids=9" if name.startswith("kmeans") else name
    key, value = parse(text).codecs(dims, dims, fitted(text, dims, 2, centred))
    q, k, v = numbers(9, 4, dims, seed=1), numbers(11, 2, dims, seed=2), numbers(11, 2, dims, seed=3)
    got = torch.einsum(
        "qhgd,khd->hgqk",
        key.transform.dual(q).unflatten(1, (2, 2)).double(),
        key.transform.forward(k).double(),
    )
    expected = torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (2, 2)).double(), k.double())
    shift = (got - expected).mean(-1, keepdim=True)
    if centred and parse(text).centre:
        mean = torch.einsum("qhgd,hd->hgq", q.unflatten(1, (2, 2)).double(), key.transform.mean.double())
        assert torch.allclose(-shift[..., 0], mean, atol=1e-3)
    else:
        assert key.transform.mean is None
        assert shift.abs().max() < 1e-4
    size = q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max()
    assert (got - expected - shift).abs().max() <= 1e-5 * size
    back = value.transform.inverse(value.transform.forward(v))
    assert ((back - v).norm(dim=-1) <= 1e-5 * (v.norm(dim=-1) + 10)).all()
