"""What quantized keys do to attention, against loops in float64 over the keys and queries of a tiny model."""

import math
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest
import torch
import transformers
from page_views import key_views
from tiny_models import random_tokens, tiny
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvfold.calibration import calibrate
from kvfold.engines.transformers import cache
from kvfold.evaluate.layer_attention import FAR, OFFSETS, PAIRS, _logit_error, diagnose
from kvfold.evaluate.run import evaluate
from kvfold.recipes import parse
from kvfold.rope import Rope

TOKENS = 45  # neither even nor a whole number of pages
THETA = 10000.0
STILL = Rope(32, (), ())  # as if there were no RoPE


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return tiny()


@pytest.fixture(scope="module")
def states(model) -> list[tuple[np.ndarray, np.ndarray]]:
    """q [q_heads, n, d] and k [kv_heads, n, d] of each layer, after RoPE, from the projections of a plain pass."""
    config, seen = model.config, {}
    hooks = [
        getattr(layer.self_attn, name).register_forward_hook(
            lambda module, inputs, out, key=(index, name): seen.__setitem__(key, out)
        )
        for index, layer in enumerate(model.model.layers)
        for name in ("q_proj", "k_proj")
    ]
    with torch.no_grad():
        model(random_tokens(TOKENS).unsqueeze(0), use_cache=False)
        cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(TOKENS).unsqueeze(0))
        result = []
        for index in range(config.num_hidden_layers):
            q, k = (seen[index, name].unflatten(-1, (-1, config.head_dim)) for name in ("q_proj", "k_proj"))
            q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
            result.append((q[0].double().numpy(), k[0].double().numpy()))
    for hook in hooks:
        hook.remove()
    return result


def by_token(bits: int) -> Callable[[np.ndarray], np.ndarray]:
    """Integers of each token alone, [kv_heads, n, d] -> the same, with scale and offset in 16 bits."""

    def rounded(k: np.ndarray) -> np.ndarray:
        low, high = k.min(-1, keepdims=True), k.max(-1, keepdims=True)
        return _affine(k, low, high, bits)

    return rounded


def by_channel(bits: int, page: int) -> Callable[[np.ndarray], np.ndarray]:
    """Integers of each channel over whole pages; what does not fill one stays."""

    def rounded(k: np.ndarray) -> np.ndarray:
        result = k.copy()
        for start in range(0, k.shape[1] // page * page, page):
            part = k[:, start : start + page]
            low, high = part.min(1, keepdims=True), part.max(1, keepdims=True)
            result[:, start : start + page] = _affine(part, low, high, bits)
        return result

    return rounded


def _affine(x: np.ndarray, low: np.ndarray, high: np.ndarray, bits: int) -> np.ndarray:
    scale = ((high - low) / (2**bits - 1)).astype(np.float16).astype(np.float64)
    offset = low.astype(np.float16).astype(np.float64)
    return scale * np.clip(np.round((x - offset) / scale), 0, 2**bits - 1) + offset


def to_bfloat16(k: np.ndarray) -> np.ndarray:
    return torch.from_numpy(k).bfloat16().double().numpy()


def expected(q: np.ndarray, k: np.ndarray, rounded: np.ndarray, theta: float | None = THETA) -> tuple[float, ...]:
    """Softmax KL, share of the top 10 that is kept, mean error of logits: one query, one pair at a time."""
    n, ratio, scale = k.shape[1], len(q) // len(k), k.shape[2] ** -0.5
    kl, kept = [], []
    for head in range(len(q)):
        for t in range(n // 2, n):
            exact, other = (
                [math.exp(scale * float(q[head, t] @ keys[head // ratio, j])) for j in range(t + 1)]
                for keys in (k, rounded)
            )
            p, r = np.array(exact) / sum(exact), np.array(other) / sum(other)
            kl.append(sum(float(a) * math.log(a / b) for a, b in zip(p, r, strict=True)))
            kept.append(len(set(np.argsort(-p)[:10]) & set(np.argsort(-r)[:10])) / 10)
    generator = torch.Generator().manual_seed(0)
    at, of = torch.randint(n, (2, PAIRS), generator=generator).tolist()
    offsets = np.linspace(-FAR, FAR, OFFSETS)
    errors = [
        np.abs(turned(rounded[head // ratio, j] - k[head // ratio, j], offsets - (j - i), theta) @ q[head, i])
        for head in range(len(q))
        for i, j in zip(at, of, strict=True)
    ]
    return float(np.mean(kl)), float(np.mean(kept)), float(np.mean(errors))


def turned(x: np.ndarray, positions: np.ndarray, theta: float | None) -> np.ndarray:
    """x[d] moved by each of `positions`, with the frequencies of Llama: coordinate i turns with i + d/2."""
    if theta is None:
        return np.tile(x, (len(positions), 1))
    half = len(x) // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate((x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin), axis=1)


@pytest.mark.parametrize(
    ("recipe", "page_size", "rounded"),
    [
        ("int4:centre=false,block=20", None, by_token(4)),  # the open block does not matter
        ("int2:centre=false", None, by_token(2)),
        ("kivi-2:centre=false,group=8", None, by_channel(2, 32)),
        ("kivi-2:centre=false,group=8", 4, by_channel(2, 4)),
        ("kivi-4:centre=false,group=8", 64, by_channel(4, 64)),  # no page is full
        ("bf16", None, to_bfloat16),
    ],
)
def test_by_definition(model, states, recipe, page_size, rounded):
    packed = cache(model, recipe)
    packed.page_size = page_size or packed.page_size
    rows = diagnose(model, random_tokens(TOKENS), {"it": packed})["it"]
    assert [row.layer for row in rows] == [0, 1]
    for row, (q, k) in zip(rows, states, strict=True):
        kl, top10, logit_mae = expected(q, k, rounded(k))
        assert row.softmax_kl == pytest.approx(kl, rel=1e-2, abs=1e-6)
        assert row.top10 == pytest.approx(top10, abs=5e-3)
        assert row.logit_mae == pytest.approx(logit_mae, rel=1e-3, abs=1e-6)
        if page_size == 64:
            assert (row.softmax_kl, row.top10, row.logit_mae) == (0, 1, 0)


def test_sixteen_bits_are_nearly_exact_and_fewer_bits_are_worse(model):
    names = ("bf16", "int8:centre=false", "int4:centre=false", "int2:centre=false")
    caches = {name: cache(model, name) for name in names}
    found = diagnose(model, random_tokens(TOKENS), caches)
    assert list(found) == list(names)
    for layer in range(2):
        rows = [found[name][layer] for name in names]
        assert rows[0].softmax_kl < 1e-4
        assert rows[0].top10 > 0.97
        for better, worse in pairwise(rows[1:]):
            assert better.softmax_kl < worse.softmax_kl
            assert better.top10 > worse.top10
            assert better.logit_mae < worse.logit_mae
        assert rows[0].logit_mae < 0.02 * rows[-1].logit_mae


def test_logit_errors_are_those_at_other_positions(model, states):
    """With RoPE an error counts at every offset. Without, only where the key stands: that is another number."""
    packed = {"it": cache(model, "int2:centre=false")}
    with_rope = diagnose(model, random_tokens(TOKENS), packed)["it"]
    without = diagnose(model, random_tokens(TOKENS), packed, STILL)["it"]
    for turning, still, (q, k) in zip(with_rope, without, states, strict=True):
        rounded = by_token(2)(k)
        assert still.logit_mae == pytest.approx(expected(q, k, rounded, theta=None)[2], rel=1e-3)
        assert turning.logit_mae != pytest.approx(still.logit_mae, rel=2e-3)
        assert (turning.softmax_kl, turning.top10) == (still.softmax_kl, still.top10)


def test_logit_errors_of_a_constant_error():
    """Of queries and errors that are all ones: 2·Σcos(f·Δ), Δ from where the key stands. Without RoPE: d."""
    n, rope = 30, Rope(4, ((0, 2), (1, 3)), (0.7, 0.01))
    queries, error = torch.ones(1, 2, n, 4), torch.ones(1, n, 4)
    at, of = torch.randint(n, (2, PAIRS), generator=torch.Generator().manual_seed(0)).tolist()
    logits = [
        abs(sum(2 * math.cos(frequency * (offset - j + i)) for frequency in rope.frequencies))
        for i, j in zip(at, of, strict=True)
        for offset in np.linspace(-FAR, FAR, OFFSETS)
    ]
    assert _logit_error(queries, error, rope) == pytest.approx(fmean(logits), rel=1e-6)
    assert fmean(logits) < 2
    assert _logit_error(queries, error, Rope(4, (), ())) == 4


def test_centred_and_fitted_recipes_are_read_as_the_cache_reads_them(model, states):
    """What a cache has stored in its pages decodes to the keys that were compared."""
    recipes = ["saw-int4", "oscar-int2:block=0", "gtq-k3v3", "kmeans-int4:centroids=8"]
    panel = [parse(recipe) for recipe in recipes]
    artifact = calibrate(model, random_tokens(80, seed=2), 80, panel)
    caches = {str(recipe): cache(model, recipe, artifact) for recipe in panel}
    found = diagnose(model, random_tokens(TOKENS), caches, artifact.metadata.rope)
    for packed, rows in zip(caches.values(), found.values(), strict=True):
        with torch.no_grad():
            model(random_tokens(TOKENS).unsqueeze(0), past_key_values=packed)
        q, k = states[0]  # of the first layer, whose keys do not depend on the cache
        pages = packed.paged.pools[0][packed.paged.tables.pages[0]]  # [pages, kv_heads, page_bytes]
        codes, meta = key_views(packed.paged.layouts[0], pages)
        codec = packed.codecs[0][0]
        slots = torch.cat((codes, meta.contiguous().view(torch.uint8)), dim=-1)  # [pages, kv_heads, page_size, bytes]
        decoded = codec.decode(slots.transpose(1, 2).flatten(0, 1))[:TOKENS]
        decoded[0] += artifact.tensors["key_first"][0] - artifact.tensors["key_mean"][0]
        stored = decoded.transpose(0, 1).double().numpy()
        kl, top10, logit_mae = expected(q, k, stored)
        assert rows[0].softmax_kl == pytest.approx(kl, rel=2e-2, abs=1e-6)
        assert rows[0].top10 == pytest.approx(top10, abs=1e-2)
        assert rows[0].logit_mae == pytest.approx(logit_mae, rel=1e-2)


def test_the_first_key_has_a_centre_of_its_own(model, states):
    """Against integers of k − mean, and of k0 − first, in float64."""
    artifact = calibrate(model, random_tokens(80, seed=2), 80)
    found = diagnose(model, random_tokens(TOKENS), {"it": cache(model, "int2", artifact)}, artifact.metadata.rope)
    for layer, (row, (q, k)) in enumerate(zip(found["it"], states, strict=True)):
        centres = np.repeat(artifact.tensors["key_mean"][layer, :, None].double().numpy(), TOKENS, axis=1)
        plain = by_token(2)(k - centres) + centres
        centres[:, 0] = artifact.tensors["key_first"][layer].double().numpy()
        kl, top10, logit_mae = expected(q, k, by_token(2)(k - centres) + centres)
        assert row.softmax_kl == pytest.approx(kl, rel=1e-2, abs=1e-6)
        assert row.top10 == pytest.approx(top10, abs=5e-3)
        assert row.logit_mae == pytest.approx(logit_mae, rel=1e-3, abs=1e-6)
        assert 10 * abs(row.softmax_kl - kl) < abs(kl - expected(q, k, plain)[0]), "it makes a difference"


def test_an_evaluation_looks_into_layers_where_asked(embedded):
    _, tokenizer = embedded
    small = tiny(vocab_size=len(tokenizer), num_hidden_layers=1)
    report = evaluate(small, tokenizer, [parse("int2:centre=false")], random_tokens(64), 48, layers=True)
    (exact,), (packed,) = (row.layers for row in report.rows)
    assert exact.softmax_kl < packed.softmax_kl
    with torch.no_grad():
        direct = diagnose(small, random_tokens(64)[:48], {"it": cache(small, "int2:centre=false")})["it"]
    assert [packed] == direct, "one passage of the text"


def test_too_few_tokens_to_have_ten_are_refused_early(model, embedded):
    """The first query of the second half sees ten."""
    packed = {"it": cache(model, "int2:centre=false")}
    with pytest.raises(ValueError, match="takes at least 20 tokens, not 19"):
        diagnose(model, random_tokens(19), packed)
    assert 0 < diagnose(model, random_tokens(20), packed)["it"][0].top10 <= 1
    with pytest.raises(ValueError, match="at least 20 tokens, not 12"):
        evaluate(model, embedded[1], [], random_tokens(64), 12, layers=True, advance=lambda _: pytest.fail("too late"))
