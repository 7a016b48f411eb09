from itertools import islice, pairwise, permutations

import pytest
import torch

from kvfold.quantizers.kmeans import CHUNK, fit, lloyd, nearest, seeds


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_one_centroid_is_the_mean():
    x = 3 + normal(CHUNK + 100, 7)
    assert torch.allclose(fit(x, 1, seed=0), x.mean(0, keepdim=True), atol=1e-6)


def test_separated_clusters_are_found():
    centres = 100 * normal(12, 16)
    x = (centres + normal(50, 12, 16, seed=1)).flatten(0, 1)
    found = fit(x, 12, seed=0)
    assert torch.cdist(centres, found).amin(1).max() < 1


def test_error_never_rises_and_falls_to_the_reported_one():
    x = normal(2000, 8)
    steps = list(islice(lloyd(x, seeds(x, 20, seed=0)), 26))
    errors = [error for _, error in steps]
    assert all(after <= before * (1 + 1e-9) for before, after in pairwise(errors))
    assert errors[-1] < 0.95 * errors[0]
    assert torch.equal(fit(x, 20, seed=0, iterations=25), steps[-1][0].float())
    assert errors[-1] == pytest.approx(torch.cdist(x.double(), steps[-1][0]).amin(1).square().sum().item())


def test_iterations_by_hand():
    x = torch.tensor([[0.0], [1.0], [10.0], [14.0]])
    (_, start), (means, end) = lloyd(x, torch.tensor([[0.0], [11.0]]).double())
    assert means.tolist() == [[0.5], [12.0]]
    assert (start, end) == (0 + 1 + 1 + 9, 0.25 + 0.25 + 4 + 4)


def test_empty_clusters_move_to_the_farthest_rows():
    x = torch.tensor([[0.0], [1.0], [2.0], [9.0], [20.0]])
    start = torch.tensor([[1.0], [500.0], [-500.0]]).double()
    (_, before), (means, after) = islice(lloyd(x, start), 2)
    assert means.tolist() == [[6.4], [20.0], [9.0]]
    assert after < before


def test_more_centroids_than_distinct_rows():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).repeat(10, 1)
    found = fit(x, 5, seed=0)
    assert {tuple(row) for row in found.tolist()} == {(1.0, 2.0), (3.0, 4.0)}


def test_fit_depends_on_nothing_but_the_seed():
    x = normal(3000, 4)
    first = fit(x, 8, seed=5, iterations=2)
    torch.manual_seed(99)
    assert torch.equal(fit(x, 8, seed=5, iterations=2), first)
    assert not torch.equal(fit(x, 8, seed=6, iterations=2), first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [1e-3, 1, 1e3])
def test_nearest_by_brute_force(dtype, scale):
    x, centroids = normal(500, 24).to(dtype), scale * normal(33, 24, seed=1)
    distances = (x.double()[:, None] - centroids.double()).square().sum(-1)
    assert torch.equal(nearest(x, centroids), distances.argmin(1))


def test_nearest_does_not_depend_on_the_batch():
    """Rows of four equal quarters, and centroids that differ in the order of theirs: all are equally near, but sums in
    another order differ in their last bits."""
    quarters = normal(4, 96)
    centroids = torch.stack([quarters[list(order)].flatten() for order in permutations(range(4))])
    x = normal(CHUNK + 1, 96, seed=1).repeat(1, 4)
    assert (nearest(x, centroids) == 0).all()
    for size in (1, 7, 64):
        assert not torch.cat([nearest(rows, centroids) for rows in x[:200].split(size)]).any()


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(ValueError, match="3 vectors have 1 to 3 centroids, not 4"):
        fit(torch.zeros(3, 2), 4, seed=0)
    with pytest.raises(ValueError, match="NaN or Inf"):
        fit(torch.tensor([[1.0], [float("nan")]]), 1, seed=0)
