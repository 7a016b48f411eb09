"""Calibration as a whole: one pass over a text, and an artifact with what every recipe asked for."""

import hashlib
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from tiny_models import random_tokens, tiny

import kvfold
from kvfold.artifact import Artifact
from kvfold.calibration import calibrate
from kvfold.calibration.capture import capture
from kvfold.calibration.describe import describe
from kvfold.engines.transformers import cache
from kvfold.recipes import parse

LAYERS, KV_HEADS, D = 2, 2, 32
CONTEXT = 50
TOKENS = 180  # three whole passages and part of one
PANEL = {  # with the shape of every tensor behind [layers]
    "oscar-int2": {
        "key_rotation": (1, D, D),
        "key_clip": (1,),
        "value_rotation": (1, D, D),
        "value_clip": (1,),
    },
    "oscar-int2:per_head=true,clip=false": {
        "key_rotation": (KV_HEADS, D, D),
        "value_rotation": (KV_HEADS, D, D),
    },
    "kmeans-int4:centroids=6": {"key_centroids": (KV_HEADS, 6, D), "value_centroids": (KV_HEADS, 6, D)},
    "hessian-int4": None,
    "gtq-k3v3": None,
    "gtq-k3v2:widths=all,per_head=true": None,
}


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return random_tokens(TOKENS)


@pytest.fixture(scope="module")
def artifact(model, tokens) -> Artifact:
    return calibrate(model, tokens, CONTEXT, [parse(name) for name in PANEL])


def same(one: Artifact, other: Artifact) -> bool:
    return (
        one.metadata == other.metadata
        and one.tensors.keys() == other.tensors.keys()
        and all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())
    )


def test_centres_are_the_mean_key_and_the_mean_of_values_as_read(model, tokens, artifact):
    for layer, key, value, first in zip(
        capture(model, tokens, CONTEXT).layers,
        artifact.tensors["key_mean"],
        artifact.tensors["value_mean"],
        artifact.tensors["key_first"],
        strict=True,
    ):
        assert key.shape == value.shape == first.shape == (KV_HEADS, D)
        assert torch.equal(first, layer.first.float())
        assert torch.equal(key, layer.k.mean.float())
        assert torch.equal(value, layer.read_v.mean.float())
        assert (value - layer.v.mean).abs().max() > 1e-4, "what is read makes a difference"


def test_names_and_shapes_of_the_tensors(artifact):
    assert artifact.metadata.recipes == tuple(PANEL)
    found: dict[str, dict[str, tuple]] = {}
    for name, tensor in artifact.tensors.items():
        recipe, _, own = name.rpartition("/")
        assert tensor.isfinite().all()
        if recipe:
            assert tensor.dtype == (torch.float32 if tensor.is_floating_point() else tensor.dtype)
            assert len(tensor) == LAYERS
            found.setdefault(recipe, {})[own] = tuple(tensor.shape[1:])
    assert list(found) == list(PANEL)
    for recipe, shapes in PANEL.items():
        assert found[recipe]
        assert shapes in (None, found[recipe])
    assert artifact.tensors["text"].shape == (TOKENS // 32,)  # a hash of every whole block of 32


def test_what_is_recorded(model, tokens, artifact):
    made = artifact.metadata.calibration
    assert made.tokens_sha256 == hashlib.sha256(np.array(tokens.tolist(), dtype="<i8").tobytes()).hexdigest()
    assert (made.tokens, made.context, made.seed) == (TOKENS, CONTEXT, None)
    assert made.versions["kvfold"] == kvfold.__version__
    assert set(made.versions) == {"kvfold", "torch", "transformers"}
    assert (artifact.metadata.rope.layout, artifact.metadata.rope.rotary_dim) == ("half", D)
    artifact.metadata.model.check(model)
    assert calibrate(model, tokens, CONTEXT, seed=7).metadata.calibration.seed == 7


@pytest.mark.parametrize("name", PANEL)
def test_fitted_together_or_alone_is_the_same(model, tokens, artifact, name):
    alone = calibrate(model, tokens, CONTEXT, [parse(name)])
    assert alone.metadata.recipes == (name,)
    for tensor, found in alone.tensors.items():
        assert torch.equal(found, artifact.tensors[tensor])


def test_open_blocks_and_skipped_layers_are_not_fitted(model, tokens, artifact):
    """One fit serves all of them; and what learns nothing has none."""
    panel = ["oscar-int2:block=8", "oscar-int2:skip=1", "oscar-int2", "saw-int4", "bf16"]
    found = calibrate(model, tokens, CONTEXT, [parse(name) for name in panel])
    assert found.metadata.recipes == ("oscar-int2",)
    assert {name for name in found.tensors if "/" in name} == {f"oscar-int2/{name}" for name in PANEL["oscar-int2"]}
    assert torch.equal(found.tensors["oscar-int2/key_rotation"], artifact.tensors["oscar-int2/key_rotation"])
    means = calibrate(model, tokens, CONTEXT)
    assert set(means.tensors) == {"key_mean", "value_mean", "key_first", "text"}


def test_without_centring_the_fit_is_another(model, tokens, artifact):
    """The mean of values is in the second moment of the output then, and no mean in its codecs."""
    recipe = parse("oscar-int2:centre=false")
    found = calibrate(model, tokens, CONTEXT, [recipe])
    assert not torch.allclose(
        found.tensors["oscar-int2:centre=false/value_rotation"], artifact.tensors["oscar-int2/value_rotation"]
    )
    assert torch.equal(found.tensors["value_mean"], artifact.tensors["value_mean"])
    codecs = cache(model, recipe, found).codecs.values()
    assert all(codec.transform.mean is None for both in codecs for codec in both)


def test_progress_is_shares_of_one(model, tokens):
    shares: list[float] = []
    calibrate(model, tokens, CONTEXT, [parse(name) for name in list(PANEL)[:2]], progress=shares.append)
    assert sum(shares) == pytest.approx(1)
    assert min(shares) > 0


@torch.no_grad()
def test_saved_and_loaded_it_runs_the_same(model, artifact, tmp_path):
    artifact.save(tmp_path)
    loaded = Artifact.load(tmp_path)
    assert same(loaded, artifact)
    ids = random_tokens(40, seed=3).unsqueeze(0)
    exact = model(ids).logits
    for name in [*PANEL, "saw-int4"]:
        recipe = parse(name).model_copy(update={"block": 0})
        first, second = (model(ids, past_key_values=cache(model, recipe, a)).logits for a in (artifact, loaded))
        assert torch.equal(first, second)
        assert first.isfinite().all()
        assert 0 < (first - exact).norm() < exact.norm(), name


# What an artifact holds


def test_a_row_for_each_recipe_and_layer(artifact):
    rows = describe(artifact)
    assert [(row["recipe"], row["layer"]) for row in rows] == [(name, layer) for name in PANEL for layer in range(2)]
    by_name = {(row["recipe"], row["layer"]): row for row in rows}
    for layer in range(LAYERS):
        oscar = by_name["oscar-int2", layer]
        assert (oscar["key dims×bits"], oscar["value dims×bits"]) == ("32×2", "32×2")
        for side in ("key", "value"):
            assert oscar[f"{side} clip"] == pytest.approx(float(artifact.tensors[f"oscar-int2/{side}_clip"][layer]))
        assert "key clip" not in by_name["oscar-int2:per_head=true,clip=false", layer]
        kmeans = by_name["kmeans-int4:centroids=6", layer]
        assert (kmeans["key centroids"], kmeans["value centroids"]) == (6, 6)
        assert kmeans["key dims×bits"] == "32×4"
        widths = [tuple(map(int, part.split("×"))) for part in by_name["gtq-k3v3", layer]["key dims×bits"].split()]
        assert sum(dims for dims, _ in widths) == D
        assert sum(dims * bits for dims, bits in widths) == 3 * D, "3 bits on average"
        assert widths == sorted(widths, key=lambda width: width[1])
        assert by_name["gtq-k3v3", layer]["value dims×bits"] == "32×3"
        own = by_name["gtq-k3v2:widths=all,per_head=true", layer]["key dims×bits"]
        widths = [tuple(map(int, part.split("×"))) for part in own.split()]
        assert sum(dims for dims, _ in widths) == KV_HEADS * D, "each head has its own, and all are counted"
        assert sum(dims * bits for dims, bits in widths) == 3 * KV_HEADS * D


def test_means_alone_have_no_rows(model, tokens):
    assert describe(calibrate(model, tokens, CONTEXT)) == []


def pixels(path: Path) -> np.ndarray:
    """int[height, width, 3]"""
    assert path.read_bytes().startswith(b"\x89PNG")
    return (255 * matplotlib.image.imread(path)[..., :3]).round().astype(int)


def test_recipes_come_beside_those_of_an_artifact(model, tokens):
    first, second = [parse(name) for name in list(PANEL)[:2]]
    alone = calibrate(model, tokens, CONTEXT, [first])
    added = calibrate(model, tokens, CONTEXT, [second], into=alone)
    assert added.metadata.recipes == (first.fitted_as, second.fitted_as)
    assert same(added, calibrate(model, tokens, CONTEXT, [first, second]))
    with pytest.raises(ValueError, match="another model, text or version; write to another folder"):
        calibrate(model, tokens[:-1], CONTEXT, [second], into=alone)


def test_recipes_that_do_not_fit_the_model_are_refused_before_the_run(model, tokens):
    ran = []
    hook = model.model.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(ValueError, match="does not divide the head dimension"):
        calibrate(model, tokens, CONTEXT, [parse("oscar-int2:group=7")])
    hook.remove()
    assert not ran
