"""TurboQuant-MSE against METHODS.md §6, in numpy."""

import numpy as np
import pytest
import torch

from kvfold.quantizers.lloyd_max import levels
from kvfold.recipes import parse


@pytest.mark.parametrize("d", [16, 64, 80])
@pytest.mark.parametrize("text", ["tq-k3v2", "tq-k1v8:seed=3"])
def test_by_definition(text, d):
    """n = ‖x·R‖; codes of x·R/n for N(0, 1/d); x̂ = n/‖ŷ‖·ŷ·R⁻¹ with ŷ the decoded unit vector.

    R is a rotation, rounded where it has more than signs, as for d = 80.
    """
    recipe = parse(text)
    x = np.random.default_rng(0).standard_t(4, (300, 2, d)).astype(np.float32)
    for bits, codec in zip((recipe.key_bits, recipe.value_bits), recipe.codecs(d, d, {}), strict=True):
        matrix = codec.transform.forward(torch.eye(d).unsqueeze(1)).squeeze(1).double().numpy()
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(d), atol=2e-3 if d == 80 else 1e-6)
        n = np.linalg.norm(x @ matrix, axis=-1, keepdims=True)
        unit = (x / n) @ matrix
        codebook = np.array(levels(bits)) / d**0.5  # of N(0, 1/d)
        y = codebook[np.abs(unit[..., None] - codebook).argmin(-1)]
        expected = n / np.linalg.norm(y, axis=-1, keepdims=True) * y @ np.linalg.inv(matrix)
        got = codec.decode(codec.encode(torch.from_numpy(x))).double().numpy()
        close = np.abs(got - expected).max(-1) <= 2**-10 * n[..., 0]
        assert close.mean() > 0.99, "but for codes on a boundary"
        np.testing.assert_allclose(np.linalg.norm(got @ matrix, axis=-1), n[..., 0], rtol=2**-10)


def test_rotations_come_from_the_seed_and_differ_for_keys_and_values():
    def matrices(text: str) -> list[torch.Tensor]:
        return [codec.transform.rotation.matrix for codec in parse(text).codecs(64, 64, {})]

    first = matrices("tq-k3v3")
    assert all(torch.equal(a, b) for a, b in zip(first, matrices("tq-k2v4"), strict=True))
    other = matrices("tq-k3v3:seed=1")
    distinct = [*first, *other]
    assert all(not torch.equal(a, b) for i, a in enumerate(distinct) for b in distinct[:i])
    assert all(m.shape == (1, 64, 64) for m in distinct)
