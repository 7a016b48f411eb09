"""Hessian-aware rotation in numpy: METHODS.md §4, but with the moment of queries before their Hadamard rotation."""

import numpy as np
import pytest
import scipy.linalg
import torch
from random_layers import FIRST, random_layer

from kvfold.recipes import parse


def eigenbasis(moment: np.ndarray) -> np.ndarray:
    """Columns by descending eigenvalue, the largest entry of each positive."""
    values, vectors = np.linalg.eigh(moment)
    vectors = vectors[:, np.argsort(-values)]
    return vectors * np.sign(vectors[np.abs(vectors).argmax(0), np.arange(len(moment))])


@pytest.mark.parametrize(("d", "order"), [(16, 16), (24, 8)])
@pytest.mark.parametrize("centred", [False, True])
def test_rotation_by_definition(d, order, centred):
    layer = random_layer(d, kv_heads=2, ratio=3)
    q = layer.q[FIRST:].reshape(-1, d)  # all query heads of the layer
    h = np.kron(np.eye(d // order), scipy.linalg.hadamard(order)) / order**0.5
    moment = q.T @ q / len(q)
    moment += 0.01 * np.diag(moment).mean() * np.eye(d)
    recipe = parse("hessian-int4")
    fit = recipe.fit(layer.statistics, layer.rope, layer.means if centred else (None, None))
    rotation = fit["key_rotation"]
    assert rotation.shape == (1, d, d)
    assert rotation.dtype == torch.float32
    np.testing.assert_allclose(rotation[0].numpy(), h @ eigenbasis(moment), atol=1e-5)
    np.testing.assert_allclose(rotation[0] @ rotation[0].T, np.eye(d), atol=1e-5)
