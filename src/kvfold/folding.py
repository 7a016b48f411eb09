"""Folding: the rotation of values moves into a model's weights, so that no value is rotated when the model runs."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvfold.artifact import Artifact, Fingerprint
from kvfold.geometry import UnsupportedModel
from kvfold.recipe import Recipe

ALLOWED = 0.1  # relative change of the output; rounding of folded weights to 16 bits explains less

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_foldable(recipe: Recipe, config: Mapping[str, Any]) -> None:
    """Refuse a recipe or a model that cannot be folded. Needs only the model's config.json."""
    if not recipe.folds:
        raise ValueError(
            f"{recipe} learns no rotation of values that could be folded: take oscar-int2 or fold2 to fold4"
        )
    if config.get("quantization_config"):
        raise UnsupportedModel("values cannot be folded into quantized weights: take the model that they were made of")
    if config.get("text_config"):
        raise UnsupportedModel("values of multimodal models cannot be folded yet: their processors would not be saved")


@torch.no_grad()
def fold_values(model: "PreTrainedModel", recipe: Recipe, artifact: Artifact) -> Artifact:
    """Rotate the value and output projections of `model`, in place, by the value rotation R of `recipe`.

    With v' = v·R in the cache, attention returns o·R. So W_V ← Rᵀ·W_V and W_O ← W_O·R⁻ᵀ do not change the model's
    output. Keys cannot be folded: RoPE stands between their projection and the cache. Products are computed in float64
    and rounded once, to the dtype of the weights.

    Only packed layers are rotated. In some models a gate stands between attention and W_O, or other layers read the
    same values. Their output would change, so they are refused.

    Returns the artifact of the folded model. It has no value rotation, and its mean values are rotated.
    """
    check_foldable(recipe, model.config.to_dict())
    artifact.metadata.model.check(model)
    layers, packed = model.get_decoder().layers, artifact.metadata.model.packed
    rotations = [_value_rotation(recipe, artifact, number) for number in packed]
    attentions = [_projections(layers[number], type(model).__name__) for number in packed]
    saved = [(weight, weight.clone()) for both in attentions for linear in both for weight in linear.parameters()]
    before = _output(model)
    for (value, output), rotation in zip(attentions, rotations, strict=True):
        matrices = rotation.to(value.weight.device).expand(artifact.metadata.model.kv_heads, -1, -1)
        _rotate_rows(value, matrices)
        groups = artifact.metadata.model.q_heads // len(matrices)
        heads = output.weight.double().unflatten(1, (len(matrices) * groups, -1))  # [hidden, q_heads, d]
        inverse = torch.linalg.inv(matrices).mT.repeat_interleave(groups, dim=0)
        turned = torch.einsum("nhd,hde->nhe", heads, inverse)
        output.weight.copy_(turned.flatten(1))
    if (_output(model) - before).norm() > ALLOWED * before.norm():
        for weight, was in saved:
            weight.copy_(was)
        raise UnsupportedModel(
            f"{type(model).__name__}: values cannot be folded, something else than o_proj reads what attention returns"
        )
    means = artifact.tensors["value_mean"].double().unsqueeze(2) @ torch.stack(rotations)
    done = [f"{recipe.fitted_as}/{name}" for name in ("value_rotation", "value_basis")]
    own = {
        key: tensor
        for key, tensor in artifact.tensors.items()
        if key not in done and key.rpartition("/")[0] in ("", recipe.fitted_as)
    }
    folded = {
        f"{recipe.fitted_as}/value_folded": torch.ones(len(attentions), 1),
        "value_mean": means.squeeze(2).float(),
    }
    changed = {"model": Fingerprint.of(model), "recipes": (recipe.fitted_as,), "checks": {}}
    return Artifact(artifact.metadata.model_copy(update=changed), {**own, **folded})


def _value_rotation(recipe: Recipe, artifact: Artifact, layer: int) -> Tensor:
    """float64[kv_heads or 1, d, d]"""
    shape = artifact.metadata.model
    _, rotation = recipe.rotations(shape.key_dim, shape.value_dim, artifact.fit(recipe, layer))
    if rotation is None:
        raise ValueError(f"{recipe} has no rotation of values left that could be folded")
    terms = rotation.terms(shape.value_dim, torch.float64, torch.device("cpu"))
    return terms.matrix * terms.factors


def _output(model: "PreTrainedModel") -> Tensor:
    """What the decoder computes for a few tokens.

    They are of the middle of the vocabulary. The first are often control tokens that training never saw: rounding to 16
    bits alone may turn their output.
    """
    ids = torch.arange(16, device=model.device).unsqueeze(0) + model.config.vocab_size // 2
    return model.get_decoder()(ids, use_cache=False).last_hidden_state.float()


def _projections(layer: torch.nn.Module, model: str) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    attention = getattr(layer, "self_attn", None)
    value, output = getattr(attention, "v_proj", None), getattr(attention, "o_proj", None)
    if not isinstance(value, torch.nn.Linear) or not isinstance(output, torch.nn.Linear):
        raise UnsupportedModel(f"{model}: values cannot be folded, its layers have no plain v_proj and o_proj")
    return value, output


def _rotate_rows(linear: torch.nn.Linear, matrices: Tensor) -> None:
    """Make a projection return y·R per KV head instead of y [kv_heads·d]."""
    weight = linear.weight.double().unflatten(0, (len(matrices), -1))  # [kv_heads, d, hidden]
    linear.weight.copy_((matrices.mT @ weight).flatten(0, 1))
    if linear.bias is not None:
        bias = linear.bias.double().unflatten(0, (len(matrices), 1, -1))
        linear.bias.copy_((bias @ matrices).flatten())
