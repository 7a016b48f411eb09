"""Folding leaves the model as it was, and stores the same bytes without a rotation."""

from collections.abc import Callable
from copy import deepcopy
from typing import NamedTuple

import numpy as np
import pytest
import torch
from page_views import value_views
from rounded_rotations import as_multiplied, eight_bits
from scipy.linalg import block_diag, hadamard
from tiny_models import HYBRIDS, random_tokens, tiny

from kvfold.artifact import Artifact
from kvfold.calibration import calibrate
from kvfold.engines.transformers import PackedCache, cache
from kvfold.folding import fold_values
from kvfold.geometry import UnsupportedModel
from kvfold.recipe import Recipe
from kvfold.recipes import parse

ARCHITECTURES = {
    "Llama": {"attention_bias": True},  # of all four projections
    "Qwen2": {},  # of queries, keys and values
    "Qwen3": {"hidden_size": 48, "num_attention_heads": 6},
}
RECIPES = [
    f"oscar-int2:block=0,per_head={per_head},centre={centre}"
    for per_head in ("false", "true")
    for centre in ("false", "true")
]
TOKENS = 96  # six pages, all full: there is no byte that was not written


class Folded(NamedTuple):
    recipe: Recipe
    plain: torch.nn.Module
    artifact: Artifact  # of the plain model
    model: torch.nn.Module
    own: Artifact  # of the folded one


def fold(name: str, recipe: str, **options: object) -> Folded:
    parsed, options = parse(recipe), {**ARCHITECTURES.get(name, {}), **options}
    plain, model = tiny(name, **options), tiny(name, **options)
    artifact = calibrate(plain, random_tokens(200, seed=2), 100, [parsed, parse("gtq-k3v3")])
    return Folded(parsed, plain, artifact, model, fold_values(model, parsed, artifact))


@pytest.fixture(scope="module")
def folded() -> Callable[[str, str], Folded]:
    made: dict[tuple[str, str], Folded] = {}

    def get(name: str, recipe: str) -> Folded:
        if (name, recipe) not in made:
            made[name, recipe] = fold(name, recipe)
        return made[name, recipe]

    return get


@torch.no_grad()
def logits(model: torch.nn.Module, packed: PackedCache | None = None) -> torch.Tensor:
    tokens = random_tokens(TOKENS).unsqueeze(0)
    return model(tokens, past_key_values=packed, use_cache=packed is not None).logits[0]


def values(packed: PackedCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of 2 bits and metadata of all values of a layer, by page."""
    layout = packed.paged.layouts[layer]
    pages = packed.paged.pools[layer][packed.paged.tables.pages[0]]
    codes, meta = value_views(layout, pages)
    return torch.stack([codes >> shift & 3 for shift in (0, 2, 4, 6)]), meta


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_model_computes_what_it_did(folded, name, recipe):
    case = folded(name, recipe)
    before, after = logits(case.plain), logits(case.model)
    assert (before - after).abs().max() < 1e-4 * before.abs().max()
    for old, new in zip(case.plain.model.layers, case.model.model.layers, strict=True):
        for projection in ("v_proj", "o_proj"):
            weights = [getattr(layer.self_attn, projection).weight for layer in (old, new)]
            assert (weights[0] - weights[1]).norm() > 0.1 * weights[0].norm(), "it was not rotated"
        for projection in ("q_proj", "k_proj"):
            assert torch.equal(*(getattr(layer.self_attn, projection).weight for layer in (old, new)))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_values_come_out_rotated(folded, name, recipe):
    """v' = v·R of the KV head, bias included, for the same input."""
    case = folded(name, recipe)
    heads, d = case.own.metadata.model.kv_heads, case.own.metadata.model.value_dim
    states = torch.randn(5, case.plain.config.hidden_size, generator=torch.Generator().manual_seed(0))
    for layer in range(2):
        fitted = case.artifact.tensors[f"{case.recipe.fitted_as}/value_rotation"][layer]
        rotation = torch.from_numpy(as_multiplied(fitted.numpy()))
        v, turned = (model.model.layers[layer].self_attn.v_proj(states).double() for model in (case.plain, case.model))
        for head in range(heads):
            part = slice(head * d, (head + 1) * d)
            expected = v[:, part] @ rotation[head if len(rotation) > 1 else 0]
            assert torch.allclose(turned[:, part], expected, atol=1e-5 * float(v.abs().max()))
            mean = case.artifact.tensors["value_mean"][layer, head].double()
            expected = mean @ rotation[head if len(rotation) > 1 else 0]
            assert torch.allclose(case.own.tensors["value_mean"][layer, head].double(), expected, atol=1e-5)


@pytest.mark.parametrize("block", [0, 20])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_packed_cache_holds_the_same_values_and_gives_the_same_logits(folded, name, recipe, block):
    case = folded(name, recipe)
    packing = parse(recipe.replace("block=0", f"block={block}"))
    exact = logits(case.plain)
    old, new = cache(case.plain, packing, case.artifact), cache(case.model, packing, case.own)
    assert all(value.transform.rotation is not None for _, value in old.codecs.values())
    assert all(value.transform.rotation is None for _, value in new.codecs.values())
    before, after = logits(case.plain, old), logits(case.model, new)
    noise = (before - exact).norm()
    assert noise > 0.01 * exact.norm(), "nothing was quantized"
    assert (after - before).norm() < 0.2 * noise
    (codes, meta), (new_codes, new_meta) = values(old, 0), values(new, 0)
    assert (codes == new_codes).double().mean() > 0.995
    assert (codes.int() - new_codes.int()).abs().max() <= 1
    assert torch.allclose(meta.float(), new_meta.float(), rtol=2e-3, atol=2e-3 * float(meta.float().abs().max()))


@pytest.mark.parametrize("recipe", RECIPES[-1:])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_new_artifact_is_of_the_folded_model_alone(folded, name, recipe, tmp_path):
    case = folded(name, recipe)
    fitted = case.recipe.fitted_as
    case.own.metadata.model.check(case.model)
    case.artifact.metadata.model.check(case.plain)
    for artifact, model in ((case.own, case.plain), (case.artifact, case.model)):
        with pytest.raises(ValueError, match="made for another model: its weights are others"):
            cache(model, case.recipe, artifact)
    assert case.own.metadata.recipes == (fitted,)
    new = ("value_mean", f"{fitted}/value_folded")
    others = {name: tensor for name, tensor in case.own.tensors.items() if name not in new}
    kept = {
        "key_mean",
        "key_first",
        "text",
        f"{fitted}/key_rotation",
    }
    assert set(others) == kept | {f"{fitted}/key_clip", f"{fitted}/value_clip"}
    assert all(torch.equal(tensor, case.artifact.tensors[name]) for name, tensor in others.items())
    assert f"{fitted}/value_rotation" in case.artifact.tensors, "the old artifact stays as it was"
    case.own.save(tmp_path)
    loaded = Artifact.load(tmp_path)
    assert torch.equal(
        logits(case.model, cache(case.model, case.recipe, loaded)),
        logits(case.model, cache(case.model, case.recipe, case.own)),
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_a_map_that_is_not_orthogonal_is_folded(name, tmp_path):
    """fold's directions of values, mixed by Hadamard matrices of each width: W_V takes the map, W_O its inverse."""
    case = fold(name, "fold3")
    exact, d = logits(case.plain), case.own.metadata.model.value_dim
    assert (logits(case.model) - exact).abs().max() < 1e-4 * exact.abs().max()
    mixing = block_diag(*[hadamard(d // 2) * (d // 2) ** -0.5] * 2)  # half of the coordinates have 4 bits, half 2
    states = torch.randn(5, case.plain.config.hidden_size, generator=torch.Generator().manual_seed(0))
    for layer in range(2):
        basis = case.artifact.tensors["fold3/value_basis"][layer].double().numpy()
        v, turned = (
            model.model.layers[layer].self_attn.v_proj(states).unflatten(1, (-1, d)).double().numpy()
            for model in (case.plain, case.model)
        )
        means = (artifact.tensors["value_mean"][layer].double().numpy() for artifact in (case.artifact, case.own))
        for head, (mean, turned_mean) in enumerate(zip(*means, strict=True)):
            matrix = eight_bits(basis[head] @ mixing)
            assert np.abs(matrix @ matrix.T - np.eye(d)).max() > 0.1, "it is a rotation"
            np.testing.assert_allclose(turned[:, head], v[:, head] @ matrix, atol=1e-4)
            np.testing.assert_allclose(turned_mean, mean @ matrix, atol=1e-4)
    own = ("key_order", "key_scale", "value_folded")
    assert set(case.own.tensors) == {"key_mean", "value_mean", "key_first", "text", *(f"fold3/{name}" for name in own)}
    case.own.save(tmp_path)
    recipe, made = parse("fold3:block=4"), Artifact.load(tmp_path)
    before = logits(case.plain, cache(case.plain, recipe, case.artifact))
    after = logits(case.model, cache(case.model, recipe, made))
    assert (before - exact).norm() > 0.01 * exact.norm(), "nothing was quantized"
    assert (after - before).norm() < 0.2 * (before - exact).norm()


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def unchanged(model: torch.nn.Module, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("saw-int4", "learns no rotation of values that could be folded"),
        ("hessian-int4", "learns no rotation of values that could be folded"),
        ("oscar-int2:per_head=true", "was not calibrated for oscar-int2:per_head=true"),
    ],
)
def test_without_a_rotation_of_values_there_is_nothing_to_fold(recipe, reason):
    model = tiny()
    artifact = calibrate(model, random_tokens(60), 60, [parse("hessian-int4"), parse("oscar-int2")])
    before = weights(model)
    with pytest.raises(ValueError, match=reason) as caught:
        fold_values(model, parse(recipe), artifact)
    assert recipe in str(caught.value)
    assert unchanged(model, before)


def test_folding_twice_is_refused(folded):
    case = folded("Qwen2", RECIPES[0])
    before = weights(case.model)
    for artifact, message in ((case.own, "has no rotation of values"), (case.artifact, "made for another model")):
        with pytest.raises(ValueError, match=message):
            fold_values(case.model, case.recipe, artifact)
    assert unchanged(case.model, before)


def test_an_artifact_of_another_model_is_refused():
    recipe = parse("oscar-int2")
    artifact = calibrate(tiny(), random_tokens(60), 60, [recipe])
    for model, field in ((tiny("Qwen3"), "model_type"), (tiny(num_hidden_layers=3), "layers")):
        before = weights(model)
        with pytest.raises(ValueError, match=f"made for another model: its {field} is"):
            fold_values(model, recipe, artifact)
        assert unchanged(model, before)


def test_quantized_weights_are_refused():
    model, recipe = tiny(), parse("oscar-int2")
    artifact = calibrate(model, random_tokens(60), 60, [recipe])
    model.config.quantization_config = {"quant_method": "fp8"}
    before = weights(model)
    with pytest.raises(UnsupportedModel, match="cannot be folded into quantized weights"):
        fold_values(model, recipe, artifact)
    assert unchanged(model, before)


def test_fused_projections_are_refused():
    model, recipe = tiny("Phi3"), parse("oscar-int2")
    artifact = calibrate(model, random_tokens(60), 60, [recipe])
    before = weights(model)
    with pytest.raises(UnsupportedModel, match=r"Phi3.*: values cannot be folded, .* no plain v_proj and o_proj"):
        fold_values(model, recipe, artifact)
    assert unchanged(model, before)


@pytest.mark.parametrize("name", ["Gemma3", "GptOss", "MiMoV2Flash"])
def test_only_packed_layers_are_folded(name):
    """Also with biases, sinks, and values of another dimension than keys."""
    recipe = "oscar-int2:block=4"
    case = fold(name, recipe)
    before, after = logits(case.plain), logits(case.model)
    assert (before - after).abs().max() < 1e-4 * before.abs().max()
    for number, (old, new) in enumerate(zip(case.plain.model.layers, case.model.model.layers, strict=True)):
        for one, other in zip(old.parameters(), new.parameters(), strict=True):
            assert torch.equal(one, other) or number in HYBRIDS[name][1]
        rotated = not torch.equal(old.self_attn.v_proj.weight, new.self_attn.v_proj.weight)
        assert rotated == (number in HYBRIDS[name][1])
    noise = (logits(case.plain, cache(case.plain, recipe, case.artifact)) - before).norm()
    error = logits(case.model, cache(case.model, recipe, case.own)) - logits(
        case.plain, cache(case.plain, recipe, case.artifact)
    )
    assert error.norm() < 0.3 * noise


@pytest.mark.parametrize("name", ["Qwen3Next", "Gemma3n"])  # a gate behind attention; layers that share values
def test_models_whose_output_would_change_are_refused(name):
    model, recipe = tiny(name), parse("oscar-int2")
    artifact = calibrate(model, random_tokens(60), 60, [recipe])
    before = weights(model)
    with pytest.raises(UnsupportedModel, match="something else than o_proj reads what attention returns"):
        fold_values(model, recipe, artifact)
    assert unchanged(model, before)


@pytest.mark.parametrize("name", ["oscar-int2", "fold4"])
@torch.no_grad()
def test_a_real_model_in_bfloat16_is_folded(embedded, name):
    """Rounding alone turns the outputs of its control tokens. That must not look like a fold gone wrong."""
    recipe, model = parse(name), deepcopy(embedded[0])
    words = embedded[1]("Any text will do, as long as it is one.", return_tensors="pt").input_ids
    before = model.bfloat16().float()(words).logits
    artifact = calibrate(model.bfloat16(), random_tokens(200), 100, [recipe])
    fold_values(model, recipe, artifact)
    assert (model.float()(words).logits - before).norm() < 0.02 * before.norm()
