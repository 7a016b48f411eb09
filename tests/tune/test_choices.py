"""What is chosen per layer, as an artifact: its bytes, its fits, and the text it was chosen on."""

import itertools
from pathlib import Path

import pytest
import tiny_models
import torch

import kvfold
from kvfold.artifact import TEXT
from kvfold.calibration.text_overlap import check_disjoint
from kvfold.fitted import Fitted
from kvfold.format.layout import PageLayout, even_slot
from kvfold.geometry import Geometry
from kvfold.methods.allocation import runs
from kvfold.methods.fold import widths_of
from kvfold.recipes import TUNED, parse
from kvfold.tune.choices import CHOICES, EQUAL, OPTIONS, sizes, with_choices

MIXED = ((0, 2), (3, 0))  # for the two layers: few bits for keys and many for values, and the other way round


@pytest.fixture(scope="module")
def calibrated():
    """A tiny model, its geometry, an artifact with the fits of named recipes, and more text."""
    model = tiny_models.tiny("Llama")
    tokens = tiny_models.random_tokens(300)
    artifact = kvfold.calibrate(model, tokens[:200], 200, [parse(name) for name in EQUAL])
    return model, Geometry.from_config(model.config.to_dict()), artifact, tokens[200:]


@torch.no_grad()
def test_sizes_are_what_is_allocated(calibrated):
    model, geometry, artifact, text = calibrated
    tuned = with_choices(artifact, geometry, MIXED, text)
    for context in (48, 300, 500):
        cache = kvfold.cache(model, "fold", tuned)
        model(tiny_models.random_tokens(context)[None], past_key_values=cache)
        each = sizes(geometry, context)
        wanted = sum(each[CHOICES.index(choice)] for choice in MIXED)
        assert Fitted.of(TUNED, geometry, tuned).sequence_bytes(context) == wanted
        # in transformers, 64 tokens can be taken back, and in engines 16
        more = 48 * 2 * geometry.elements_per_token
        assert cache.allocated_bytes == wanted + more


@pytest.mark.parametrize("dims", [128, 256])
def test_the_fast_kernel_reads_all_choices(dims: int):
    """As far as it can be told without a GPU."""
    pytest.importorskip("triton")
    from kvfold.ops.attend.gluon.decode_step import unsupported

    for key, value in itertools.product(*OPTIONS.values()):
        slots = (even_slot(runs(widths_of(option.quarters, dims))) for option in (key, value))
        assert unsupported(PageLayout(*slots, 64), ratio=4) is None


@torch.no_grad()
def test_equal_choices_are_the_named_recipes(calibrated):
    model, geometry, artifact, text = calibrated
    ids = tiny_models.random_tokens(80, seed=2)[None]
    for name, choice in EQUAL.items():
        tuned = with_choices(artifact, geometry, (choice, choice), text)
        caches = kvfold.cache(model, f"{name}:block=4", tuned), kvfold.cache(model, "fold:block=4", tuned)
        own, same = (model(ids, past_key_values=cache).logits for cache in caches)
        assert torch.equal(own, same)


def test_the_artifact_is_saved_and_read_back(calibrated, tmp_path: Path):
    _, geometry, artifact, text = calibrated
    tuned = with_choices(artifact, geometry, MIXED, text)
    tuned.save(tmp_path)
    again = kvfold.Artifact.load(tmp_path)
    assert again.metadata.recipes == ("fold2", "fold3", "fold4", "fold")
    assert again.metadata.calibration == artifact.metadata.calibration
    first, second = (again.fit(TUNED, layer) for layer in geometry.packed)
    quarters = (first["key_widths"], first["value_widths"], second["key_widths"], second["value_widths"])
    assert [widths[0, ::8].tolist() for widths in quarters] == [[2, 2, 1, 1], [4] * 4, [8, 4, 4, 2], [2] * 4]
    for side, like, own in (("key", "fold4", ("order", "scale")), ("value", "fold2", ("basis",))):
        names = {f"{side}_{name}" for name in own}
        assert names | {f"{side}_mean", f"{side}_widths"} == {
            name for name in second if name.startswith(side) and name != "key_first"
        }
        assert all(torch.equal(second[name], artifact.fit(parse(like), 1)[name]) for name in names)
    assert torch.equal(second["key_first"], artifact.tensors["key_first"][1])
    twice = with_choices(again, geometry, MIXED[::-1], text)
    assert twice.metadata.recipes == again.metadata.recipes
    assert torch.equal(twice.tensors[TEXT], again.tensors[TEXT])


def test_text_that_was_tuned_on_is_not_evaluated(calibrated):
    _, geometry, artifact, text = calibrated
    check_disjoint(text, artifact.tensors[TEXT])
    with pytest.raises(ValueError, match="were calibrated on"):
        check_disjoint(text, with_choices(artifact, geometry, MIXED, text).tensors[TEXT])


def test_fold_without_what_was_chosen(calibrated):
    model, _, artifact, _ = calibrated
    with pytest.raises(ValueError, match=r"not calibrated for fold, .* run `kvfold tune MODEL --bits 3 --out DIR`"):
        kvfold.cache(model, "fold", artifact)
    with pytest.raises(ValueError, match="fold: its widths are chosen per layer: run `kvfold tune MODEL --bits 3"):
        kvfold.cache(model, "fold")
