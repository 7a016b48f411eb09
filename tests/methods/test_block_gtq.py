"""The published core of Block-GTQ against METHODS.md §7, in numpy: scores, greedy widths, and RoPE blocks kept whole.

The paper is `score=mean,widths=all,per_head=true`; without `per_head`, heads share a histogram of widths; the default
score is the product, the default widths are three at 128 dims, and below the two next to the average.
"""

import numpy as np
import pytest
import torch
from random_layers import FIRST, half_rope, random_layer

from kvfold.recipes import parse
from kvfold.rope import Rope

UNIT = 4  # blocks that get their bits together
INTERLEAVED = Rope(32, tuple((2 * i, 2 * i + 1) for i in range(8)), (0.5,) * 8)  # half of the head does not turn
ROPES = {"half": half_rope(32), "partial": half_rope(32, rotary=16), "interleaved": INTERLEAVED}


def blocks_of(name: str) -> list[tuple[int, int]]:
    if name == "half":
        return [(i, i + 16) for i in range(16)]
    turning = [(i, i + 8) for i in range(8)] if name == "partial" else [(2 * i, 2 * i + 1) for i in range(8)]
    return [*turning, *((i, i + 1) for i in range(16, 32, 2))]


def scores_of(layer, blocks: list[tuple[int, int]], centred: bool, score: str = "mean") -> np.ndarray:
    """½(E‖q_i‖² + E‖k_i‖²), or E‖q_i‖²·E‖k_i‖², of each KV head and block, [kv_heads, blocks]."""
    q, k = layer.grouped(layer.q), layer.k[FIRST:].transpose(1, 0, 2)
    if centred:
        k = k - layer.means[0].numpy()[:, None]
    energies = [np.square(x[..., blocks]).sum(-1).mean(1) for x in (q, k)]  # [kv_heads, blocks]
    return energies[0] * energies[1] if score == "product" else (energies[0] + energies[1]) / 2


def greedy(scores: np.ndarray, budget: int) -> list[int]:
    """From 1 bit, one more for the largest ¾·s·4^(−b), ties to the lowest index."""
    bits = [1] * len(scores)
    while sum(bits) < budget:
        gains = [0.75 * s * 4.0**-b if b < 8 else -1 for s, b in zip(scores, bits, strict=True)]
        bits[int(np.argmax(gains))] += 1
    return bits


def fit_of(text: str, rope: str = "half", centred: bool = True, kv_heads: int = 2, seed: int = 0):
    layer = random_layer(32, kv_heads, 3, seed=seed, rope=ROPES[rope])
    return layer, parse(text).fit(layer.statistics, layer.rope, layer.means if centred else (None, None))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("score", ["mean", "product"])
@pytest.mark.parametrize("per_head", [False, True])
def test_widths_and_order_by_definition(rope, centred, bits, score, per_head):
    """Of each head alone, or shared: each head ranks its own blocks, and widths follow from the sums by rank."""
    text = f"gtq-k{bits}v2:score={score},widths=all,per_head={str(per_head).lower()}"
    layer, fit = fit_of(text, rope, centred)
    blocks = blocks_of(rope)
    scores = scores_of(layer, blocks, centred, score)
    ranked = np.argsort(-scores, axis=1, kind="stable")
    by_rank = np.take_along_axis(scores, ranked, axis=1)
    if per_head:
        expected = [np.repeat(greedy(row, len(row) * bits), 2) for row in by_rank]
    else:
        units = by_rank.sum(0).reshape(-1, UNIT).sum(1)
        expected = [np.repeat(greedy(units, len(units) * bits), 2 * UNIT)]
    assert np.array_equal(fit["key_widths"].numpy(), np.stack(expected))
    for widths in expected:
        assert widths.sum() == 32 * bits, "the budget is spent in full"
        assert (np.diff(widths) <= 0).all()
    order = fit["key_order"].numpy()
    for head in range(2):
        assert sorted(order[head].tolist()) == list(range(32))
        assert [tuple(pair) for pair in order[head].reshape(-1, 2)] == [blocks[i] for i in ranked[head]]


@pytest.mark.parametrize("bits", range(2, 7))
def test_three_widths(bits):
    """A quarter of the coordinates, the strongest, two bits above the average, a quarter at it, half a bit below."""
    _, fit = fit_of(f"gtq-k{bits}v2:widths=three")
    assert fit["key_widths"].tolist() == [[bits + 2] * 8 + [bits] * 8 + [bits - 1] * 16]
    assert sum(fit["key_widths"].flatten().tolist()) == 32 * bits


@pytest.mark.parametrize(("text", "dims"), [("gtq-k7v2", 32), ("gtq-k3v2", 48), ("gtq-k3v2:per_head=true", 32)])
def test_three_widths_where_they_do_not_fit(text, dims):
    with pytest.raises(ValueError, match="widths=three is for 2 to 6 bits"):
        parse(f"{text}{',' if ':' in text else ':'}widths=three").layouts(dims, dims, {})


@pytest.mark.parametrize("bits", range(1, 9))
def test_two_widths_by_default(bits):
    """Half of the coordinates a bit above the average, half a bit below; the stronger ones above."""
    _, fit = fit_of(f"gtq-k{bits}v2")
    expected = [bits + 1] * 16 + [bits - 1] * 16 if 1 < bits < 8 else [bits] * 32
    assert fit["key_widths"].tolist() == [expected]


@pytest.mark.parametrize("rope", ROPES)
def test_blocks_of_one_width_are_one_vector_and_rope_pairs_stay_together(rope):
    """A stored segment depends on the coordinates of its own blocks alone, and on all of them."""
    text = "gtq-k3v3:widths=all"
    _, fit = fit_of(text, rope)
    key, _ = parse(text).codecs(32, 32, fit)
    widths = fit["key_widths"].flatten()
    assert len(key.layout.segments) == len(set(widths.tolist())) > 1
    rows = [key.transform.forward(row.expand(2, 32)) for row in torch.eye(32)]
    matrix = torch.stack(rows)  # [input, kv_heads, output]
    if key.transform.mean is not None:
        matrix = matrix - key.transform.forward(torch.zeros(2, 32))
    for head in range(2):
        for segment in key.layout.segments:
            part = slice(segment.start, segment.stop)
            inputs = (matrix[:, head, part].abs().amax(1) > 1e-6).nonzero().flatten().tolist()
            mine = fit["key_order"][head, part].tolist()
            assert inputs == sorted(mine)
            assert (widths[part] == segment.bits).all()
            assert all((i in mine) == (j in mine) for i, j in blocks_of(rope))


def test_slots_of_heads_alone_hold_their_own_widths():
    text = "gtq-k3v3:widths=all,per_head=true"
    _, fit = fit_of(text)
    key, _ = parse(text).layouts(32, 32, fit)
    for head, widths in zip(key.heads, fit["key_widths"].tolist(), strict=True):
        assert [bits for segment in head.segments for bits in [segment.bits] * segment.dims] == widths
    assert key.code_bytes == max(head.code_bytes for head in key.heads)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("options", ["", ":widths=all", ":widths=all,per_head=true"])
def test_logits_are_kept_and_decoding_undoes_the_map(options, centred):
    text = f"gtq-k8v8{options}"
    layer, fit = fit_of(text, centred=centred)
    means = {"key_mean": layer.means[0].float(), "value_mean": layer.means[1].float()} if centred else {}
    key, _ = parse(text).codecs(32, 32, {**fit, **means})
    q, k = (torch.from_numpy(x[FIRST:]).float() for x in (layer.q, layer.k))
    transformed = torch.einsum(
        "qhgd,khd->hgqk", key.transform.dual(q).unflatten(1, (2, 3)).double(), key.transform.forward(k).double()
    )
    exact = torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (2, 3)).double(), k.double())
    difference = transformed - exact
    size = q.norm(dim=-1).max() * k.norm(dim=-1).max()
    assert (difference - difference.mean(-1, keepdim=True)).abs().max() <= 1e-5 * size
    # at 8 bits, hardly anything is lost
    assert (key.decode(key.encode(k)) - k).norm() < 0.02 * k.norm()


def test_more_bits_go_where_the_energy_is_and_lower_the_logit_error():
    """Against the same budget spread evenly (TurboQuant), on the layer it was fitted to."""
    layer, fit = fit_of("gtq-k3v3")
    means = {"key_mean": layer.means[0].float(), "value_mean": layer.means[1].float()}
    q, k = (torch.from_numpy(x[FIRST:]).float() for x in (layer.q, layer.k))
    errors = []
    for text, tensors in (("gtq-k3v3", {**fit, **means}), ("tq-k3v3", means)):
        key, _ = parse(text).codecs(32, 32, tensors)
        lost = key.decode(key.encode(k)) - k
        errors.append(torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (2, 3)), lost).square().mean())
    assert errors[0] < errors[1]
