import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from kvfold.artifact import Artifact, Fingerprint, Metadata, Provenance

SHAPE = (3, 2, 16)  # layers, kv_heads, head_dim


def llama(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    sizes = {
        "vocab_size": 60,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return llama()


def artifact(model: LlamaForCausalLM, **changes: torch.Tensor) -> Artifact:
    provenance = Provenance(tokens_sha256="00" * 32, tokens=4096, context=2048, versions={"torch": "2"})
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(SHAPE, generator=generator) for name in ("key_mean", "value_mean")}
    return Artifact(Metadata(model=Fingerprint.of(model), calibration=provenance), **{**tensors, **changes})


@pytest.fixture
def saved(model, tmp_path: Path) -> Path:
    artifact(model).save(tmp_path / "a" / "b")
    return tmp_path / "a" / "b"


def rewrite(folder: Path, change) -> None:
    """Apply `change` to the JSON of a saved artifact."""
    path = folder / "kvfold.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_save_and_load(model, saved):
    original, loaded = artifact(model), Artifact.load(saved)
    assert sorted(path.name for path in saved.iterdir()) == ["kvfold.json", "tensors.safetensors"]
    assert loaded.metadata == original.metadata
    assert torch.equal(loaded.key_mean, original.key_mean)
    assert torch.equal(loaded.value_mean, original.value_mean)
    assert loaded.key_mean.dtype == torch.float32
    loaded.metadata.model.check(model)
    for layer in range(3):
        key, value = loaded.means(layer, "cpu")
        assert torch.equal(key, original.key_mean[layer])
        assert torch.equal(value, original.value_mean[layer])


def test_saving_again_replaces_the_old(model, saved):
    artifact(model, key_mean=torch.full(SHAPE, 7.0)).save(saved)
    assert (Artifact.load(saved).key_mean == 7).all()


def test_tensors_may_be_parts_of_one(model, tmp_path):
    both = torch.randn(2, *SHAPE)
    artifact(model, key_mean=both[0], value_mean=both[1]).save(tmp_path)
    loaded = Artifact.load(tmp_path)
    assert torch.equal(loaded.key_mean, both[0])
    assert torch.equal(loaded.value_mean, both[1])


def test_tensors_need_not_be_contiguous(model, tmp_path):
    strided = torch.randn(*SHAPE[:2], 2 * SHAPE[2])[..., ::2]
    artifact(model, key_mean=strided).save(tmp_path)
    assert torch.equal(Artifact.load(tmp_path).key_mean, strided)


def test_the_json_is_readable(saved):
    content = json.loads((saved / "kvfold.json").read_text())
    assert content["schema_version"] == 1
    assert content["model"]["architecture"] == "LlamaForCausalLM"
    assert (content["model"]["layers"], content["model"]["kv_heads"], content["model"]["head_dim"]) == SHAPE
    assert content["model"]["rope"]["rope_theta"] == 10000.0
    assert content["calibration"]["tokens"] == 4096


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(surprise=1), "surprise"),
        (lambda content: content["model"].update(surprise=1), "surprise"),
        (lambda content: content["calibration"].update(surprise=1), "surprise"),
        (lambda content: content["model"].pop("weights"), "weights"),
        (lambda content: content.pop("calibration"), "calibration"),
        (lambda content: content.update(schema_version=2), "schema_version"),
        (lambda content: content["model"].update(layers="many"), "layers"),
        (lambda content: content["model"].update(layers=4), r"\(4, 2, 16\)"),
    ],
)
def test_json_that_is_not_ours_is_refused(saved, change, message):
    rewrite(saved, change)
    with pytest.raises(ValueError, match=message) as caught:
        Artifact.load(saved)
    assert f"{saved} is no valid artifact" in str(caught.value)
    assert type(caught.value) is ValueError


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_json_that_is_broken_is_refused(saved, content):
    (saved / "kvfold.json").write_bytes(content)
    with pytest.raises(ValueError, match="is no valid artifact"):
        Artifact.load(saved)


@pytest.mark.parametrize("name", ["kvfold.json", "tensors.safetensors"])
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    with pytest.raises(ValueError, match=f"is no artifact: there is no {name} in it"):
        Artifact.load(saved)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere is no artifact: there is no kvfold\.json in it"):
        Artifact.load(tmp_path / "nowhere")


def damaged(content: bytes) -> list[bytes]:
    return [b"", b"not safetensors", content[:-1], content[: len(content) // 2], b"\xff" * len(content)]


@pytest.mark.parametrize("kind", range(5))
def test_damaged_tensors_are_refused(saved, kind):
    path = saved / "tensors.safetensors"
    path.write_bytes(damaged(path.read_bytes())[kind])
    with pytest.raises(ValueError, match="is no valid artifact") as caught:
        Artifact.load(saved)
    assert type(caught.value) is ValueError


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("key_mean",), "found key_mean"),
        (("key_mean", "value_mean", "other"), "found key_mean, other, value_mean"),
        (("a", "b"), "expected tensors key_mean and value_mean, found a, b"),
    ],
)
def test_other_tensors_are_refused(saved, names, message):
    save_file({name: torch.zeros(SHAPE) for name in names}, saved / "tensors.safetensors")
    with pytest.raises(ValueError, match=message):
        Artifact.load(saved)


@pytest.mark.parametrize("name", ["key_mean", "value_mean"])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 2, 8),
        torch.zeros(2, 2, 16),
        torch.zeros(3, 32),
        torch.zeros(3, 2, 16, 1),
        torch.full(SHAPE, torch.nan),
        torch.zeros(SHAPE).index_fill(0, torch.tensor([2]), torch.inf),
        torch.zeros(SHAPE, dtype=torch.float64),
        torch.zeros(SHAPE, dtype=torch.int64),
    ],
    ids=["head_dim", "layers", "flat", "four dimensions", "nan", "inf", "float64", "int64"],
)
def test_wrong_tensors_are_refused_when_made_and_when_loaded(model, saved, name, tensor):
    with pytest.raises(ValueError, match=rf"{name} must be .*\(3, 2, 16\)"):
        artifact(model, **{name: tensor})
    tensors = {"key_mean": torch.zeros(SHAPE), "value_mean": torch.zeros(SHAPE), name: tensor}
    save_file(tensors, saved / "tensors.safetensors")
    with pytest.raises(ValueError, match=rf"is no valid artifact: {name} must be"):
        Artifact.load(saved)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_hidden_layers": 2}, "layers"),
        ({"num_attention_heads": 8}, "q_heads"),
        ({"num_key_value_heads": 4}, "kv_heads"),
        ({"head_dim": 32}, "head_dim"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, "rope"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}, "rope"),
    ],
)
def test_another_model_is_refused_and_the_field_named(model, saved, changes, field):
    other = llama(**changes)
    fingerprint = Artifact.load(saved).metadata.model
    mine, theirs = getattr(fingerprint, field), getattr(Fingerprint.of(other), field)
    assert mine != theirs
    with pytest.raises(ValueError, match="made for another model") as caught:
        fingerprint.check(other)
    assert f"its {field} is {mine}, the model's is {theirs}" in str(caught.value)


def test_the_same_model_with_other_weights_is_refused(saved):
    with pytest.raises(ValueError, match="its weights is"):
        Artifact.load(saved).metadata.model.check(llama(seed=1))


@pytest.mark.parametrize("name", ["model.layers.2.self_attn.k_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_every_parameter_counts(saved, name):
    changed = llama()
    with torch.no_grad():
        changed.get_parameter(name).view(-1)[0] += 0.5
    with pytest.raises(ValueError, match="its weights is"):
        Artifact.load(saved).metadata.model.check(changed)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_the_same_weights_in_sixteen_bits_are_the_same_model(saved, dtype):
    """An artifact made from the float32 model serves its bfloat16 copy, and the other way round."""
    Artifact.load(saved).metadata.model.check(llama().to(dtype))
