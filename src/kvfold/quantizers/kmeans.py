"""k-means: centroids to subtract before the residual is quantized (SAW, §k-means). One centroid is the mean."""

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

CHUNK = 4096  # rows at a time, which bounds memory
SAMPLES = 8  # rows per centroid, from which the initial centroids are drawn
TINY = torch.finfo(torch.float64).tiny


def fit(x: Tensor, centroids: int, seed: int, iterations: int = 10) -> Tensor:
    """float[n, m] -> float32[centroids, m]: k-means++ with `seed`, then at most `iterations` Lloyd iterations."""
    if not 1 <= centroids <= len(x):
        raise ValueError(f"{len(x)} vectors have 1 to {len(x)} centroids, not {centroids}")
    if not x.sum(dtype=torch.float64).isfinite():
        raise ValueError("cannot fit centroids to NaN or Inf")
    *_, (means, _) = islice(lloyd(x, seeds(x, centroids, seed)), iterations + 1)
    return means.float()


def nearest(x: Tensor, centroids: Tensor) -> Tensor:
    """float[n, m], float[centroids, m] -> int64[n]: the id of the nearest centroid. Ties go to the lowest id.

    An id must not depend on the batch, but the order in which a matrix product adds does. So rows and centroids are
    rounded to integers. These are small enough that float64 adds their products exactly, in any order: 20 bits at
    m = 8192, more below.
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
        ids.append((squares - 2 * size / scale * products).argmin(-1))  # ‖x − c‖² − ‖x‖², in units of the grid
    return torch.cat(ids)


def seeds(x: Tensor, centroids: int, seed: int) -> Tensor:
    """Initial centroids float64[centroids, m] by k-means++ (Arthur and Vassilvitskii 2007) on a sample: the probability
    of a row is in proportion to its squared distance from the nearest row already drawn."""
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
    """Lloyd's iterations from `means` until the centroids stay. Yields centroids and the sum of squared distances."""
    before = None
    while before is None or not torch.equal(means, before):
        ids = nearest(x, means)
        chunks = list(zip(x.split(CHUNK), ids.split(CHUNK), strict=True))
        distances = torch.cat([(rows - means[part]).square().sum(-1) for rows, part in chunks])
        yield means, distances.sum().item()
        sums = torch.zeros_like(means).index_add_(0, ids, x.double())  # samples are on the CPU, which adds in order
        counts = ids.bincount(minlength=len(means))
        empty = counts == 0
        before, means = means, sums / counts[:, None]
        means[empty] = x[distances.argsort(descending=True, stable=True)[: empty.sum()]].double()
