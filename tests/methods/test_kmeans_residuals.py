"""k-means residuals against METHODS.md §3, in numpy."""

import numpy as np
import pytest
import scipy.linalg
import torch
from random_layers import FIRST, random_layer

from kvfold.recipes import parse


@pytest.mark.parametrize("text", ["kmeans-int4:centroids=7", "kmeans-saw-int4:centroids=7,values=true"])
@pytest.mark.parametrize("centred", [False, True])
def test_centroids_are_means_of_their_own_samples(text, centred):
    """Lloyd's condition, in transformed coordinates, of all KV heads concatenated."""
    layer = random_layer(16, kv_heads=3)
    recipe = parse(text)
    fit = recipe.fit(layer.statistics, layer.rope, layer.means if centred else (None, None))
    h = scipy.linalg.hadamard(16) / 4 if "saw" in text else np.eye(16)
    for side, x, mean in zip(("key", "value"), (layer.k, layer.v), layer.means, strict=True):
        y = (x[FIRST:] - (mean.numpy() if centred else 0)) @ h  # [tokens, kv_heads, d]
        centroids = fit[f"{side}_centroids"]
        assert centroids.shape == (3, 7, 16)
        assert centroids.dtype == torch.float32
        joined = centroids.double().numpy().transpose(1, 0, 2).reshape(7, -1)
        rows = y.reshape(len(y), -1)
        ids = np.square(rows[:, None] - joined).sum(-1).argmin(1)
        assert len(set(ids.tolist())) == 7
        for number in range(7):
            np.testing.assert_allclose(joined[number], rows[ids == number].mean(0), atol=1e-4)


def test_the_nearest_of_all_heads_together_and_not_of_each():
    """Head 0 is nearer to centroid 0, head 1 to centroid 1 by more."""
    centroids = torch.zeros(2, 2, 16)
    centroids[:, 1] = 1.0
    x = torch.zeros(1, 2, 16)
    x[0, 0], x[0, 1] = 0.4, 0.8
    key, _ = parse("kmeans-int4:centroids=2").codecs(16, 16, {"key_centroids": centroids, "value_centroids": centroids})
    codes, meta = key.quantize(key.transform.forward(x).unsqueeze(-2))
    assert meta[..., -1].contiguous().view(torch.int16).flatten().tolist() == [1, 1]
    # what is left is constant over each head, and decodes exactly but for 16 bits
    assert torch.allclose(key.dequantize(codes, meta).squeeze(-2), x, atol=2**-11)
    x[0, 1] = 0.55  # now head 0 decides
    _, meta = key.quantize(key.transform.forward(x).unsqueeze(-2))
    assert meta[..., -1].contiguous().view(torch.int16).flatten().tolist() == [0, 0]


def test_residuals_are_quantized_as_integers():
    """4 bits of what the nearest centroid leaves, with a scale and offset for each head."""
    layer = random_layer(16)
    recipe = parse("kmeans-saw-int4:centroids=9")
    fit = recipe.fit(layer.statistics, layer.rope, (None, None))
    key, _ = recipe.codecs(16, 16, fit)
    x = torch.from_numpy(layer.k[FIRST:]).float()
    y = layer.k[FIRST:] @ (scipy.linalg.hadamard(16) / 4)
    centroids = fit["key_centroids"].double().numpy()  # [kv_heads, centroids, d]
    ids = np.square(y[:, :, None] - centroids).sum((1, 3)).argmin(1)
    residual = y - centroids[:, ids].transpose(1, 0, 2)
    low, high = residual.min(-1, keepdims=True), residual.max(-1, keepdims=True)
    scale = (high - low) / 15
    expected = np.round((residual - low) / scale) * scale + low + y - residual
    codes, meta = key.quantize(key.transform.forward(x).unsqueeze(-2))
    got = key.dequantize(codes, meta).squeeze(-2).double().numpy()
    # 16-bit metadata moves the grid by 2^-11 of what lies in it; a number near a boundary may go to the next level
    assert (np.abs(got - y) <= scale * 0.51 + 2**-9 * np.abs(residual).max()).all()
    assert (np.abs(got - expected) <= 2**-9 * np.abs(residual).max()).mean() > 0.97


def test_too_few_samples_are_refused():
    layer = random_layer(16)
    with pytest.raises(ValueError, match="56 samples are too few for centroids=57: calibrate on more --tokens"):
        parse("kmeans-int4:centroids=57").fit(layer.statistics, layer.rope, (None, None))


def test_the_seed_decides():
    layer = random_layer(16)

    def centroids(text: str) -> torch.Tensor:
        return parse(text).fit(layer.statistics, layer.rope, (None, None))["key_centroids"]

    assert torch.equal(centroids("kmeans-int4:centroids=9"), centroids("kmeans-int4:centroids=9"))
    assert not torch.equal(centroids("kmeans-int4:centroids=9"), centroids("kmeans-int4:centroids=9,seed=1"))
