"""OSCAR against METHODS.md §5, in numpy."""

import numpy as np
import pytest
import scipy.linalg
import torch
from clipping import clipped
from random_layers import causal_weights, fitted, random_layer, softmax
from rounded_rotations import as_multiplied

from kvfold.methods.oscar import CLIPS
from kvfold.recipes import parse


def eigenbasis(moment: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(moment)
    vectors = vectors[:, np.argsort(-values)]
    return vectors * np.sign(vectors[np.abs(vectors).argmax(0), np.arange(len(moment))])


def dense(moment: np.ndarray) -> np.ndarray:
    """U·H·P for a power of two."""
    d = len(moment)
    bits = d.bit_length() - 1
    permutation = np.zeros((d, d))
    for column in range(d):
        permutation[int(f"{column:0{bits}b}"[::-1], 2), column] = 1
    return eigenbasis(moment) @ (scipy.linalg.hadamard(d) / d**0.5) @ permutation


def moments(layer, centred: bool) -> tuple[np.ndarray, np.ndarray]:
    """C_Q and C_S of each KV head; of values less their mean, the output less that mean."""
    q, out = layer.grouped(layer.q), layer.grouped(layer.out)
    if centred:
        out = out - layer.means[1].numpy()[:, None]
    return np.einsum("hni,hnj->hij", q, q) / q.shape[1], np.einsum("hni,hnj->hij", out, out) / out.shape[1]


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("centred", [False, True])
def test_rotations_are_eigenvectors_times_hadamard_times_bit_reversal(per_head, centred):
    layer = random_layer(16, kv_heads=2, ratio=3)
    recipe = parse(f"oscar-int2:per_head={str(per_head).lower()}")
    fit = recipe.fit(layer.statistics, layer.rope, layer.means if centred else (None, None))
    for name, moment in zip(("key_rotation", "value_rotation"), moments(layer, centred), strict=True):
        expected = [dense(m) for m in (moment if per_head else [moment.mean(0)])]
        assert fit[name].dtype == torch.float32
        np.testing.assert_allclose(fit[name].numpy(), np.stack(expected), atol=1e-4)


def test_out_is_softmax_times_values():
    """(1/N)·VᵀSᵀSV, with S the causal softmax, is the second moment of what attention returns."""
    layer = random_layer(16)
    weights = causal_weights(layer.q, layer.k, layer.scale)
    out = np.einsum("htj,jhd->thd", weights, np.repeat(layer.v, layer.ratio, axis=1))
    moment = layer.grouped(out)
    moment = np.einsum("hni,hnj->hij", moment, moment) / moment.shape[1]
    np.testing.assert_allclose(layer.statistics.out.second().numpy(), moment, rtol=1e-4, atol=1e-5 * moment.max())


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ("eigen=false", "hp"),
        ("hadamard=false", "up"),
        ("permute=false", "uh"),
        ("eigen=false,permute=false", "h"),
        ("hadamard=false,permute=false", "u"),
    ],
)
def test_ablations_leave_a_part_out(options, parts):
    layer = random_layer(16)
    fit = parse(f"oscar-int2:{options}").fit(layer.statistics, layer.rope, (None, None))
    full = dense(moments(layer, False)[0].mean(0))
    u, h = eigenbasis(moments(layer, False)[0].mean(0)), scipy.linalg.hadamard(16) / 4
    p = h.T @ u.T @ full
    expected = np.eye(16)
    for part in parts:
        expected = expected @ {"u": u, "h": h, "p": p}[part]
    np.testing.assert_allclose(fit["key_rotation"][0].numpy(), expected, atol=1e-4)
    assert "key_clip" in fit
    assert "key_clip" not in parse("oscar-int2:clip=false").fit(layer.statistics, layer.rope, (None, None))


def int2(y: np.ndarray, group: int, clip: float) -> np.ndarray:
    """Clipped 2-bit integers of groups, with a scale and an offset of 16 bits."""
    parts = clipped(y.reshape(*y.shape[:-1], -1, group), clip)
    low, high = parts.min(-1, keepdims=True), parts.max(-1, keepdims=True)
    scale, offset = (x.astype(np.float16).astype(np.float64) for x in ((high - low) / 3, low))
    codes = np.clip(np.round((parts - offset) / np.maximum(scale, 2**-24)), 0, 3)
    return (codes * scale + offset).reshape(y.shape)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("group", [16, 8])
@pytest.mark.parametrize("seed", [0, 1])
def test_clips_are_the_largest_that_lose_hardly_more_than_the_best(centred, group, seed):
    """The divergence of weights and the error of outputs, of every clip on the grid by brute force. The queries are
    those of the second half of 60 tokens. They read the first 4 tokens and the last 15 as they are."""
    layer = random_layer(16, seed=seed)
    recipe = parse(f"oscar-int2:group={group}")
    means = layer.means if centred else (None, None)
    fit = recipe.fit(layer.statistics, layer.rope, means)
    tokens, asking = np.arange(60), np.arange(30, 60)
    far = (tokens >= 4) & (tokens <= asking[:, None] - 15)
    weights = causal_weights(layer.q, layer.k, layer.scale)[:, asking]
    losses = np.zeros((2, len(CLIPS)))
    for i, clip in enumerate(CLIPS):
        decoded = []
        for x, mean, rotation in zip((layer.k, layer.v), means, ("key_rotation", "value_rotation"), strict=True):
            matrix, centre = as_multiplied(fit[rotation][0].double().numpy()), 0 if mean is None else mean.numpy()
            decoded.append(int2((x - centre) @ matrix, group, clip) @ np.linalg.inv(matrix) + centre)
        for head, own in enumerate(weights):
            of = head // layer.ratio
            logits = np.where(
                far, layer.q[asking, head] @ decoded[0][:, of].T, layer.q[asking, head] @ layer.k[:, of].T
            )
            other = softmax(np.where(tokens <= asking[:, None], layer.scale * logits, -np.inf))
            read = own > 0
            losses[0, i] += (own[read] * np.log(own[read] / other[read])).sum()
            losses[1, i] += np.square((own * far) @ (decoded[1] - layer.v)[:, of]).sum()
    for name, loss in zip(("key_clip", "value_clip"), losses, strict=True):
        assert fit[name].shape == (1,)
        chosen = np.isclose(CLIPS, fit[name].item()).nonzero()[0].item()
        assert loss[chosen] <= 1.1 * loss.min() * 1.002, (name, dict(zip(CLIPS, loss, strict=True)))
        assert (loss[chosen + 1 :] >= 1.1 * loss.min() * 0.998).all(), (name, dict(zip(CLIPS, loss, strict=True)))
        assert len(set(loss)) > 1


def test_each_group_is_clipped_alone():
    """28 ones and four numbers of 6, 6, 6 and -6, and the same times 8: √(Σx⁴/Σx²) is √(5212/172)."""
    fit = dict(fitted("oscar-int2:group=32", 64, 2, centred=False))
    fit["key_clip"], fit["value_clip"] = torch.tensor([0.9]), torch.tensor([2.0])
    y = torch.ones(32)
    y[5:8], y[30] = 6, -6
    for codec, limit in zip(
        parse("oscar-int2:group=32").codecs(64, 64, fit), (0.9 * (5212 / 172) ** 0.5, 6), strict=True
    ):
        codes, meta = codec.quantize(torch.cat((y, 8 * y)).expand(2, 1, 64))
        first, second = codec.dequantize(codes, meta).split(32, dim=-1)
        for decoded, bound in ((first, limit), (second, 8 * limit)):
            np.testing.assert_allclose(decoded[..., 5:8], bound, rtol=2**-10)
            np.testing.assert_allclose(decoded[..., 30], -bound, rtol=2**-10)
            np.testing.assert_allclose(decoded[..., :5], bound / 3, rtol=2**-9)


@pytest.mark.parametrize(("d", "group"), [(64, 32), (128, 64), (256, 128)])
def test_groups_are_half_a_head(d, group):
    key, value = parse("oscar-int2").layouts(d, d, {})
    assert [segment.dims for segment in key.segments] == [group, group]
    assert key == value
    assert parse("oscar-int2").block == 256


def test_a_folded_value_rotation_leaves_none():
    fit = {name: tensor for name, tensor in fitted("oscar-int2", 16, 2).items() if name != "value_rotation"}
    with pytest.raises(KeyError, match="value_rotation"):
        parse("oscar-int2").codecs(16, 16, fit)
    fit["value_folded"] = torch.ones(1)
    key, value = parse("oscar-int2").codecs(16, 16, fit)
    assert key.transform.rotation is not None
    assert value.transform.rotation is None
