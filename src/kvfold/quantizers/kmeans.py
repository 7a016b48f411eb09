"""k-means: centroids to subtract before the residual is quantized (SAW, §k-means). One centroid is the mean."""

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

CHUNK = 4096  # rows at a time, which bounds memory
SAMPLES = 8  # rows for each centroid among which the first centroids are chosen
TINY = torch.finfo(torch.float64).tiny


def fit(x: Tensor, centroids: int, seed: int, iterations: int = 10) -> Tensor:
    """float[n, m] -> float32[centroids, m], at most `iterations` of Lloyd, from the centroids that `seed` draws."""
    if not 1 <= centroids <= len(x):
        raise ValueError(f"{len(x)} vectors have 1 to {len(x)} centroids, not {centroids}")
    if not x.sum(dtype=torch.float64).isfinite():
        raise ValueError("cannot fit centroids to NaN or Inf")
    *_, (means, _) = islice(lloyd(x, seeds(x, centroids, seed)), iterations + 1)
    return means.float()


def nearest(x: Tensor, centroids: Tensor) -> Tensor:
    """float[n, m], float[centroids, m] -> int64[n], the lowest id among the nearest centroids.

    An id must not depend on how many rows are asked for at once, but the order in which a matrix product adds does.
    So rows and centroids are rounded to integers small enough for their products to add up exactly in float64, in any
    order: 20 bits at m = 8192, more below.
    """
    grid = 2.0 ** ((53 - (x.shape[-1] - 1).bit_length()) // 2)
    scale = centroids.double().abs().amax().clamp_min(TINY)
    codes = (centroids.double() / scale * grid).round()
    squares = codes.square().sum(-1)
    ids = []
    for part in x.split(CHUNK):
        rows = part.double()
        size = rows.abs().amax(-1, keepdim=True).clamp_min(TINY)
        products = (rows / size * grid).round() @ codes.T  # [rows, centroids]
        ids.append((squares - 2 * size / scale * products).argmin(-1))  # ‖x − c‖² less ‖x‖², in units of the grid
    return torch.cat(ids)


def seeds(x: Tensor, centroids: int, seed: int) -> Tensor:
    """k-means++ (Arthur and Vassilvitskii 2007) on a sample: rows drawn in proportion to their squared distance from
    those already drawn. float64[centroids, m]"""
    generator = torch.Generator().manual_seed(seed)  # on the CPU, so that every device draws the same
    order = torch.randperm(len(x), generator=generator)[: SAMPLES * centroids]
    sample = x[order.to(x.device)].double()
    drawn = [sample[:1]]
    distances = (sample - drawn[0]).square().sum(-1)
    while len(drawn) < centroids:
        weights = distances.cpu() + TINY  # not all zero, even if every row has been drawn
        drawn.append(sample[torch.multinomial(weights, 1, generator=generator)])
        distances = torch.minimum(distances, (sample - drawn[-1]).square().sum(-1))
    return torch.cat(drawn)


def lloyd(x: Tensor, means: Tensor) -> Iterator[tuple[Tensor, float]]:
    """Lloyd's iterations from `means`, until they stay: the centroids, and the sum of squared distances to them."""
    before = None
    while before is None or not torch.equal(means, before):
        ids = nearest(x, means)
        chunks = list(zip(x.split(CHUNK), ids.split(CHUNK), strict=True))
        distances = torch.cat([(rows - means[part]).square().sum(-1) for rows, part in chunks])
        yield means, distances.sum().item()
        sums = torch.zeros_like(means).index_add_(0, ids, x.double())  # in a fixed order on a CPU, where samples lie
        counts = ids.bincount(minlength=len(means))
        empty = counts == 0
        before, means = means, sums / counts[:, None]
        means[empty] = x[distances.argsort(descending=True, stable=True)[: empty.sum()]].double()
