import datetime
import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from kvfold.artifact import (
    Artifact,
    CheckResult,
    Fingerprint,
    Measure,
    Metadata,
    Provenance,
    digest_model,
)
from kvfold.recipes import parse
from kvfold.rope import Rope

SHAPE = (3, 2, 16)  # layers, kv_heads, head_dim
MEANS = "key_mean", "value_mean", "key_first"
ROPE = Rope(16, tuple((i, i + 8) for i in range(8)), tuple(10000.0 ** (-i / 8) for i in range(8)))


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


def randn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def own_tensors() -> dict[str, torch.Tensor]:
    """Tensors of two recipes: for each head, and for all heads together."""
    order = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(seed)) for seed in range(6)])
    return {
        "oscar-int2/key_rotation": torch.linalg.qr(randn(3, 1, 16, 16, seed=2)).Q,
        "oscar-int2/value_rotation": torch.linalg.qr(randn(3, 1, 16, 16, seed=3)).Q,
        "oscar-int2/key_clip": torch.tensor([[0.9], [0.95], [1.1]]),
        "gtq-k3v3:seed=4/key_order": order.to(torch.int16).view(3, 2, 16),
        "gtq-k3v3:seed=4/key_widths": torch.tensor([4] * 8 + [2] * 8, dtype=torch.uint8).expand(3, 1, 16),
    }


def artifact(model: LlamaForCausalLM, recipes: tuple[str, ...] = (), **changes: torch.Tensor) -> Artifact:
    provenance = Provenance(tokens_sha256="00" * 32, tokens=4096, context=2048, seed=None, versions={"torch": "2"})
    tensors = {name: randn(*SHAPE, seed=seed) for seed, name in enumerate(MEANS, start=1)}
    metadata = Metadata(model=Fingerprint.of(model), rope=ROPE, calibration=provenance, recipes=recipes)
    return Artifact(metadata, {**tensors, "text": torch.arange(50), **changes})


def fitted_artifact(model: LlamaForCausalLM) -> Artifact:
    return artifact(model, ("oscar-int2", "gtq-k3v3:seed=4"), **own_tensors())


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


def rewrite_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Others than those of a saved artifact, with their checksum."""
    save_file(tensors, folder / "tensors.safetensors")
    checksum = hashlib.sha256((folder / "tensors.safetensors").read_bytes()).hexdigest()
    rewrite(folder, lambda content: content.update(tensors_sha256=checksum))


def test_save_and_load(model, saved):
    original, loaded = artifact(model), Artifact.load(saved)
    assert sorted(path.name for path in saved.iterdir()) == ["kvfold.json", "tensors.safetensors"]
    assert loaded.metadata == original.metadata
    assert loaded.metadata.rope == ROPE
    assert loaded.tensors.keys() == original.tensors.keys() == {*MEANS, "text"}
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in original.tensors.items())
    assert loaded.tensors["key_mean"].dtype == torch.float32
    loaded.metadata.model.check(model)
    for layer in range(3):
        fit = loaded.fit(parse("int4"), layer)
        assert fit.keys() == set(MEANS)
        assert all(torch.equal(fit[name], original.tensors[name][layer]) for name in MEANS)


def test_each_recipe_gets_its_own_tensors(model, tmp_path):
    original = fitted_artifact(model)
    original.save(tmp_path)
    loaded, own = Artifact.load(tmp_path), own_tensors()
    assert loaded.metadata == original.metadata
    assert loaded.tensors.keys() == original.tensors.keys()
    assert all(same(loaded.tensors[name], tensor) for name, tensor in original.tensors.items())
    for layer in range(3):
        fit = loaded.fit(parse("oscar-int2:block=0,skip=1"), layer)  # neither is fitted
        assert fit.keys() == {*MEANS, "key_rotation", "value_rotation", "key_clip"}
        assert same(fit["key_rotation"], own["oscar-int2/key_rotation"][layer])
        assert same(fit["key_clip"], own["oscar-int2/key_clip"][layer])
        fit = loaded.fit(parse("gtq-k3v3:seed=4"), layer)
        assert fit.keys() == {*MEANS, "key_order", "key_widths"}
        assert same(fit["key_order"], own["gtq-k3v3:seed=4/key_order"][layer])
        assert loaded.fit(parse("saw-int4"), layer).keys() == set(MEANS)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("text", ["hessian-int4", "gtq-k3v3", "gtq-k2v2:seed=4", "oscar-int2:centre=false"])
def test_a_recipe_that_was_not_calibrated_is_refused(model, text):
    with pytest.raises(ValueError, match=f"not calibrated for {text}, it holds oscar-int2, gtq-k3v3:seed=4: run"):
        fitted_artifact(model).fit(parse(text), 0)
    with pytest.raises(ValueError, match="it holds means alone"):
        artifact(model).fit(parse(text), 0)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"hessian-int4/key_rotation": torch.zeros(3, 1, 16, 16)}, "belongs to none of the recipes"),
        ({"oscar-int2/key_rotation": torch.zeros(2, 1, 16, 16)}, r"\(3, 1 or 2, 16, 16\), not .* of \(2, 1, 16, 16\)"),
        ({"oscar-int2/key_rotation": torch.zeros(3, 3, 16, 16)}, r"\(3, 1 or 2, 16, 16\), not .* of \(3, 3, 16, 16\)"),
        ({"oscar-int2/key_clip": torch.zeros(3)}, r"key_clip must be torch.float32 of shape \(3, 1 or 2\), not"),
        ({"oscar-int2/key_surprise": torch.zeros(3, 1)}, "unknown tensor oscar-int2/key_surprise"),
        ({"oscar-int2/key_clip": torch.full((3, 1), torch.nan)}, "oscar-int2/key_clip must be finite"),
        ({"surprise": torch.zeros(SHAPE)}, "unknown tensor surprise"),
        ({}, "there is no tensor of oscar-int2"),
    ],
)
def test_tensors_that_belong_to_no_recipe_are_refused(model, tensors, message):
    with pytest.raises(ValueError, match=message):
        artifact(model, ("oscar-int2",), **tensors)


# --- shards


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_has_its_own_kv_heads(model, tmp_path, rank):
    whole = fitted_artifact(model)
    shard = whole.shard(rank, 2)
    shard.save(tmp_path)
    loaded = Artifact.load(tmp_path)
    assert (loaded.metadata.shard.rank, loaded.metadata.shard.ranks) == (rank, 2)
    for name in ("key_mean", "value_mean", "gtq-k3v3:seed=4/key_order"):
        assert same(loaded.tensors[name], whole.tensors[name][:, rank : rank + 1])
    for name in ("oscar-int2/key_rotation", "oscar-int2/key_clip", "text"):  # for all heads, or for none
        assert same(loaded.tensors[name], whole.tensors[name])
    loaded.metadata.model.check(model)
    with pytest.raises(ValueError, match="no part 0 of 1"):
        loaded.shard(0, 1)


@pytest.mark.parametrize(("rank", "ranks"), [(2, 2), (-1, 2), (0, 4), (0, 0), (0, 3)])
def test_impossible_shards_are_refused(model, rank, ranks):
    with pytest.raises(ValueError, match=f"2 KV heads have no part {rank} of {ranks} equal ones"):
        artifact(model).shard(rank, ranks)


def test_centroids_cannot_be_split(model):
    centroids = {"kmeans-int4/key_centroids": randn(3, 2, 5, 16)}
    whole = artifact(model, ("kmeans-int4", "oscar-int2", "gtq-k3v3:seed=4"), **centroids, **own_tensors())
    part = whole.shard(0, 2)
    assert part.metadata.recipes == ("oscar-int2", "gtq-k3v3:seed=4")
    assert not any("kmeans" in name for name in part.tensors)
    with pytest.raises(ValueError, match="not calibrated for kmeans-int4"):
        part.fit(parse("kmeans-int4"), 0)
    assert same(whole.shard(0, 1).tensors["kmeans-int4/key_centroids"], centroids["kmeans-int4/key_centroids"])


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"oscar-int2/value_rotation": None}, "the tensors of oscar-int2 are not what it needs: 'value_rotation'"),
        ({"gtq-k3v3:seed=4/key_widths": None}, "the tensors of gtq-k3v3:seed=4 are not what it needs"),
    ],
)
def test_tensors_that_a_recipe_cannot_use_are_refused_on_loading(model, tmp_path, tensors, message):
    kept = {name: tensor for name, tensor in {**own_tensors(), **tensors}.items() if tensor is not None}
    artifact(model, ("oscar-int2", "gtq-k3v3:seed=4"), **kept).save(tmp_path)
    with pytest.raises(ValueError, match=message):
        Artifact.load(tmp_path)


def test_the_hashes_of_the_text_are_required(model):
    with pytest.raises(ValueError, match="text must be the hashes"):
        artifact(model, text=torch.zeros(3, 4, dtype=torch.int64))


# --- the Hub


@pytest.fixture
def _hub_that_answers(monkeypatch):
    monkeypatch.setattr("kvfold.hub._answers", lambda *_: True)


@pytest.mark.usefixtures("_hub_that_answers")
def test_an_id_that_neither_a_folder_nor_the_hub_has(monkeypatch):
    def download(hub_id, allow_patterns):
        raise OSError("no such repository")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ValueError, match="owner/fits is neither a folder nor what the Hugging Face Hub gives: no such"):
        Artifact.load("owner/fits")


@pytest.mark.usefixtures("_hub_that_answers")
def test_load_by_the_id_of_the_hub(model, saved, monkeypatch, tmp_path):
    asked = []

    def download(hub_id, allow_patterns):
        asked.append((hub_id, sorted(allow_patterns)))
        return str(saved)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    loaded = Artifact.load("someone/artifact")
    assert asked == [("someone/artifact", ["README.md", "kvfold.json", "tensors.safetensors"])]
    assert same(loaded.tensors["key_mean"], artifact(model).tensors["key_mean"])
    Artifact.load(saved)
    assert len(asked) == 1, "a folder that is there is not asked for"


def test_saving_again_replaces_the_old(model, saved):
    artifact(model, key_mean=torch.full(SHAPE, 7.0)).save(saved)
    assert (Artifact.load(saved).tensors["key_mean"] == 7).all()


@pytest.mark.parametrize("name", ["kvfold.json", "tensors.safetensors"])
def test_a_full_disk_leaves_what_was_there(model, saved, tmp_path, name, monkeypatch):
    monkeypatch.setattr("kvfold.files.token_hex", lambda _: "x")
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    new = tmp_path / "new"
    new.mkdir()
    for folder in (saved, new):
        (folder / f".{name}.x.kvfold-partial").symlink_to("/dev/full")
        with pytest.raises(OSError, match=f"^cannot write {folder}: No space left on device$"):
            artifact(model, key_mean=torch.full(SHAPE, 7.0)).save(folder)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert list(new.iterdir()) == []


def test_tensors_may_be_parts_of_one(model, tmp_path):
    both = torch.randn(2, *SHAPE)
    artifact(model, key_mean=both[0], value_mean=both[1]).save(tmp_path)
    loaded = Artifact.load(tmp_path)
    assert torch.equal(loaded.tensors["key_mean"], both[0])
    assert torch.equal(loaded.tensors["value_mean"], both[1])


def test_tensors_need_not_be_contiguous(model, tmp_path):
    strided = torch.randn(*SHAPE[:2], 2 * SHAPE[2])[..., ::2]
    artifact(model, key_mean=strided).save(tmp_path)
    assert torch.equal(Artifact.load(tmp_path).tensors["key_mean"], strided)


# Checks


def checked(artifact: Artifact, recipe: str, loss: float) -> CheckResult:
    measure = Measure(
        name="needles", unit="share", value=0.9 - loss, reference=0.9, loss=loss, low=loss, high=loss, allowed=0.03
    )
    return CheckResult(
        context=2048,
        date=datetime.date(2026, 11, 17),
        versions={"kvfold": "0.2"},
        fit_sha256=artifact.fit_sha256(parse(recipe)),
        measures=(measure,),
    )


def test_checks_are_kept_by_recipe_and_replaced(model, tmp_path):
    made, recipe, other = fitted_artifact(model), parse("oscar-int2:block=64"), parse("int4:block=16")
    bad, good = checked(made, "oscar-int2", 0.2), checked(made, "oscar-int2", 0.01)
    assert (bad.verdict, good.verdict) == ("failed", "passed")
    made.with_check(recipe, bad).with_check(other, checked(made, "int4", 0.0)).save(tmp_path)
    kept = Artifact.load(tmp_path)
    assert kept.check_result(recipe) == bad
    assert kept.check_result(parse("oscar-int2")) is None, "the open block is part of what was checked"
    kept.with_check(recipe, good).save(tmp_path)
    again = Artifact.load(tmp_path)
    assert again.check_result(recipe) == good
    assert again.check_result(other) == checked(made, "int4", 0.0)
    assert list(again.metadata.checks) == ["oscar-int2:block=64", "int4:block=16"]
    assert again.shard(0, 2).check_result(recipe) is None, "a rank has a part of what was checked"


@pytest.mark.parametrize(
    ("name", "recipes"),
    [
        ("key_mean", ()),
        ("key_first", ()),
        ("oscar-int2/key_clip", ("int4", "gtq-k3v3:seed=4")),
        ("text", ("int4", "oscar-int2", "gtq-k3v3:seed=4")),
    ],
)
def test_a_check_counts_for_the_tensors_that_it_was_made_with(model, name, recipes):
    """Changing a tensor leaves the checks of these recipes."""
    made = fitted_artifact(model)
    every = ("int4", "oscar-int2", "gtq-k3v3:seed=4")
    for recipe in every:
        made = made.with_check(parse(recipe), checked(made, recipe, 0.0))
    changed = made.tensors[name].clone()
    changed.view(-1)[-1] -= 0.25 if changed.is_floating_point() else 1
    made = Artifact(made.metadata, {**made.tensors, name: changed})
    assert tuple(recipe for recipe in every if made.check_result(parse(recipe))) == recipes


def test_an_artifact_from_before_there_were_checks_is_read(model, saved):
    rewrite(saved, lambda content: content.pop("checks"))
    kept = Artifact.load(saved)
    assert kept.metadata.checks == {}
    kept.save(saved)
    assert json.loads((saved / "kvfold.json").read_text())["checks"] == {}


def test_the_json_is_readable(saved):
    content = json.loads((saved / "kvfold.json").read_text())
    assert list(content)[:2] == ["schema_version", "tensors_sha256"]
    assert content["schema_version"] == 6
    assert content["tensors_sha256"] == hashlib.sha256((saved / "tensors.safetensors").read_bytes()).hexdigest()
    assert content["model"]["model_type"] == "llama"
    assert len(content["model"]["weights"]["layers.0.self_attn.k_proj.weight"]) == 16
    assert (content["model"]["layers"], content["model"]["kv_heads"], content["model"]["key_dim"]) == SHAPE
    assert content["model"]["packed"] == [0, 1, 2]
    assert content["model"]["rope"]["rope_theta"] == 10000.0
    assert content["calibration"]["tokens"] == 4096
    assert content["rope"]["pairs"][:2] == [[0, 8], [1, 9]]
    assert content["recipes"] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(surprise=1), "surprise: "),
        (lambda content: content["model"].update(surprise=1), "model.surprise: "),
        (lambda content: content["rope"].update(surprise=1), "rope.surprise: "),
        (lambda content: content["model"].pop("weights"), "model.weights: "),
        (lambda content: content.pop("tensors_sha256"), "tensors_sha256: "),
        (lambda content: content.update(tensors_sha256="x" * 64), "tensors_sha256: "),
        (lambda content: content.pop("schema_version"), "schema_version: Field required"),
        (lambda content: content.update(schema_version="6"), "schema_version: "),
        (lambda content: content.update(recipes=["oscar"]), "unknown recipe 'oscar'"),
        (lambda content: content.update(recipes=["oscar-int2:block=64"]), "recipes: oscar-int2:block=64 are not as"),
        (lambda content: content.update(recipes=["oscar-int2", "oscar-int2"]), "recipes: .* each once"),
        (lambda content: content.update(shard={"rank": 2, "ranks": 2}), "shard: 2 KV heads have no part 2 of 2"),
        (lambda content: content.update(shard={"rank": 0, "ranks": 3}), "shard: 2 KV heads have no part 0 of 3"),
        (lambda content: content.update(shard={"rank": 0, "ranks": 0}), "shard.ranks: "),
        (lambda content: content["calibration"].update(tokens=0), "calibration.tokens: "),
        (lambda content: content["calibration"].update(tokens=64.5), "calibration.tokens: "),
        (lambda content: content["calibration"].update(tokens=True), "calibration.tokens: "),
        (lambda content: content["calibration"].update(seed=-1), "calibration.seed: "),
        (lambda content: content["calibration"].update(tokens_sha256="00"), "calibration.tokens_sha256: "),
        (lambda content: content["calibration"].update(versions={"torch": 2}), "calibration.versions.torch: "),
        (
            lambda content: content["rope"]["frequencies"].__setitem__(3, float("nan")),
            r"rope\.frequencies\.3: .*finite",
        ),
        (
            lambda content: content["rope"]["frequencies"].__setitem__(0, float("inf")),
            r"rope\.frequencies\.0: .*finite",
        ),
        (lambda content: content["rope"]["frequencies"].pop(), "rope: there are 7 frequencies for 8 pairs"),
        (lambda content: content["rope"]["pairs"].__setitem__(0, [0, 16]), "rope: pairs must be of different"),
        (lambda content: content["rope"]["pairs"].__setitem__(0, [1, 9]), "rope: pairs must be of different"),
        (lambda content: content["rope"].update(head_dim=32), r"rope\.head_dim is 32, and model\.key_dim 16"),
        (lambda content: content.update(checks={"int4": {}}), r"checks\.int4\.context: Field required"),
        (lambda content: content.update(checks=[]), "checks: "),
        (lambda content: content["model"].update(layers="many"), "model.layers: "),
        (
            lambda content: content["model"].update(layers=2),
            "model: packed: the model has layers 0 to 1, and no layer 2",
        ),
        (lambda content: content["model"].update(packed=[0, 2, 1]), "model: packed: .* are not ascending"),
        (lambda content: content["model"].update(packed=[]), "model: all its layers are linear"),
        (lambda content: content["model"].update(kv_heads=3), "model: num_key_value_heads is 3, which does not"),
        (lambda content: content["model"].update(layers=300_000_000), "model.layers: .* less than or equal to 10000"),
        (lambda content: content["model"].update(key_dim=513), "model.key_dim: .* less than or equal to 512"),
        (lambda content: content["model"].update(q_heads=4096, kv_heads=2048), "model: kv_heads: no model has 2048 KV"),
        (lambda content: content["model"].update(model_type="[/x]"), "model.model_type: "),
        (lambda content: content["model"].update(model_type="\x1b]0;x\x07"), "model.model_type: "),
        (lambda content: content["model"].update(model_type="x" * 201), "model.model_type: "),
        (lambda content: content["model"]["rope"].update(factor="`id`"), "model.rope: no model has such"),
        (
            lambda content: content["model"]["rope"].update(factor=[1] * 9999),
            "model.rope: no model has such",
        ),
        (lambda content: content["model"]["weights"].update({"$(id)": "0" * 16}), "model.weights.*: "),
        (lambda content: content["calibration"]["versions"].update({"\x07": "1"}), "calibration.versions.*: "),
        (lambda content: content["calibration"].update(tokens=2**63), "calibration.tokens: "),
        (lambda content: content.update(recipes=["int4"] * 33), "recipes: .*at most 32"),
        (lambda content: content.update(recipes=["gtq-k3v3:seed=99999999999"]), "seed='99999999999': .* less than"),
        (lambda content: content.update({"\x1b[31m" * 1000: 1}), r"Extra inputs|…; copy the artifact again"),
        (lambda content: content.update(x=[0] * 50_000), "it is larger than any model needs"),
        (lambda content: content.update(x="0" * 2**22), "it is larger than any model needs"),
    ],
)
def test_json_that_is_not_ours_is_refused(saved, change, message):
    rewrite(saved, change)
    with pytest.raises(ValueError, match=rf"^{saved}/kvfold\.json is not valid: .*{message}") as caught:
        Artifact.load(saved)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000
    assert type(caught.value) is ValueError


def test_a_recipe_without_end_is_refused_before_it_is_read(saved):
    rewrite(saved, lambda content: content.update(recipes=["fold4:" + "block=1," * 9_000]))
    with pytest.raises(ValueError, match=r"recipes\.0: String should have at most 4096 characters"):
        Artifact.load(saved)


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5, 7])
def test_an_artifact_of_another_schema_names_the_command_that_makes_a_new_one(model, tmp_path, version):
    fitted_artifact(model).save(tmp_path)
    rewrite(tmp_path, lambda content: content.update(schema_version=version))
    with pytest.raises(
        ValueError, match=f"kvfold.json is of another kvfold: its schema_version is {version}"
    ) as caught:
        Artifact.load(tmp_path)
    command = "`kvfold calibrate MODEL --recipe oscar-int2 --recipe gtq-k3v3:seed=4 --out ANOTHER_DIR`"
    assert command in str(caught.value)


@pytest.mark.parametrize("recipes", [["x; rm -rf ~", "oscar-int2", "$(id)"], ["oscar-int2:block=1;id", "oscar-int2"]])
def test_what_an_older_artifact_calls_a_recipe_is_no_part_of_a_command(saved, recipes):
    rewrite(saved, lambda content: content.update(schema_version=4, recipes=recipes))
    with pytest.raises(ValueError, match=r": `kvfold calibrate MODEL --recipe oscar-int2 --out ANOTHER_DIR`$"):
        Artifact.load(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(recipes=["oscar-int2"]), "there is no tensor of oscar-int2"),
        (lambda content: content.update(shard={"rank": 0, "ranks": 2}), r"\(3, 1, 16\)"),
        (lambda content: content["model"].update(layers=4, packed=[0, 1, 2, 3]), r"\(4, 2, 16\)"),
    ],
)
def test_json_that_does_not_go_with_the_tensors_is_refused(saved, change, message):
    rewrite(saved, change)
    with pytest.raises(ValueError, match=rf"^{saved}/tensors\.safetensors is not valid: .*{message}"):
        Artifact.load(saved)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_json_that_is_broken_is_refused(saved, content):
    (saved / "kvfold.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"kvfold\.json is not valid"):
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
    with pytest.raises(ValueError, match=f"^{path} is damaged, or not the one that kvfold.json was written with"):
        Artifact.load(saved)
    checksum = hashlib.sha256(path.read_bytes()).hexdigest()
    rewrite(saved, lambda content: content.update(tensors_sha256=checksum))
    with pytest.raises(ValueError, match=f"^{path} is not valid") as caught:
        Artifact.load(saved)
    assert type(caught.value) is ValueError


@pytest.mark.parametrize("place", [0.3, 0.6, 0.9])
def test_a_flipped_bit_is_noticed(model, tmp_path, place):
    fitted_artifact(model).save(tmp_path)
    path = tmp_path / "tensors.safetensors"
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path} is damaged"):
        Artifact.load(tmp_path)


def stretched(ratio: float) -> torch.Tensor:
    """Invertible matrices that are not orthogonal: bfloat16[3, 2, 16, 16]. Two singular values have this ratio."""
    turns = torch.linalg.qr(randn(3, 2, 16, 16, seed=6)).Q
    return (turns * torch.tensor([1.0] * 15 + [1 / ratio])).bfloat16()


OWN = own_tensors()
BASIS, SCALE = stretched(2.0**3), torch.logspace(-12, 12, 16, base=2).expand(3, 2, 16).contiguous()
ROTATION, ORDER, WIDTHS = (
    OWN[name] for name in ("oscar-int2/key_rotation", "gtq-k3v3:seed=4/key_order", "gtq-k3v3:seed=4/key_widths")
)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("oscar-int2/key_rotation", torch.zeros(3, 1, 16, 16), "must hold orthogonal matrices"),
        ("oscar-int2/key_rotation", 3 * ROTATION, "must hold orthogonal matrices"),
        ("oscar-int2/value_rotation", ROTATION.index_fill(0, torch.tensor([2]), 0.25), "must hold orthogonal matrices"),
        ("oscar-int2/key_rotation", ROTATION.double(), r"must be torch\.float32 of shape \(3, 1 or 2, 16, 16\)"),
        ("oscar-int2/key_rotation", torch.zeros(3, 1, 3, 5), r"of shape \(3, 1 or 2, 16, 16\)"),
        ("oscar-int2/key_clip", torch.tensor([[0.9], [-0.9], [1.0]]), "must be positive"),
        ("oscar-int2/value_clip", torch.tensor([[0.9], [0.0], [1.0]]), "must be positive"),
        ("oscar-int2/value_clip", torch.tensor([[0.9], [1e5], [1.0]]), "must be positive and at most 65,504"),
        ("gtq-k3v3:seed=4/key_centroids", torch.full((3, 2, 5, 16), -1e5), "must be at most 65,504"),
        ("key_mean", torch.full(SHAPE, 1e38), "must be at most 65,504, which 16 bits hold"),
        ("value_mean", torch.full(SHAPE, -65536.0), "must be at most 65,504, which 16 bits hold"),
        ("key_first", torch.full(SHAPE, 1e6), "must be at most 65,504, which 16 bits hold"),
        ("oscar-int2/value_folded", torch.zeros(3, 1), "must be 1"),
        ("gtq-k3v3:seed=4/key_order", torch.zeros_like(ORDER), "must hold permutations"),
        ("gtq-k3v3:seed=4/key_order", ORDER - 1, "must hold permutations"),
        ("gtq-k3v3:seed=4/key_order", ORDER.long(), r"must be torch\.int16"),
        ("gtq-k3v3:seed=4/key_widths", torch.zeros_like(WIDTHS), "must hold widths from 8 bits down to 1"),
        ("gtq-k3v3:seed=4/key_widths", torch.full_like(WIDTHS, 9), "must hold widths from 8 bits down to 1"),
        ("gtq-k3v3:seed=4/key_widths", WIDTHS.flip(2), "the largest first"),
        ("gtq-k3v3:seed=4/key_centroids", torch.zeros(3, 2, 5, 8), r"of shape \(3, 1 or 2, centroids, 16\)"),
        ("gtq-k3v3:seed=4/key_scale", SCALE.index_fill(2, torch.tensor([5]), 0.0), "must be from 1/32,768 to 32,768"),
        ("gtq-k3v3:seed=4/key_scale", SCALE.index_fill(1, torch.tensor([1]), -1.0), "must be from 1/32,768 to 32,768"),
        (
            "gtq-k3v3:seed=4/key_scale",
            SCALE.index_fill(0, torch.tensor([2]), 32769.0),
            "must be from 1/32,768 to 32,768",
        ),
        ("gtq-k3v3:seed=4/key_scale", SCALE.bfloat16(), r"must be torch\.float32 of shape \(3, 1 or 2, 16\)"),
        ("gtq-k3v3:seed=4/value_basis", torch.zeros(3, 2, 16, 16).bfloat16(), "must hold matrices with singular"),
        ("gtq-k3v3:seed=4/value_basis", BASIS[..., [*range(15), 14]], "must hold matrices with singular values"),
        ("gtq-k3v3:seed=4/value_basis", stretched(2.0**17), "singular values from 1/32,768 to 32,768"),
        ("gtq-k3v3:seed=4/value_basis", BASIS * 2.0**17, "singular values from 1/32,768 to 32,768"),
        ("gtq-k3v3:seed=4/value_basis", BASIS.float(), r"must be torch\.bfloat16 of shape \(3, 1 or 2, 16, 16\)"),
        ("gtq-k3v3:seed=4/value_basis", BASIS[..., :8], r"of shape \(3, 1 or 2, 16, 16\)"),
    ],
)
def test_numbers_that_no_calibration_finds_are_refused_when_made_and_when_loaded(
    model, tmp_path, name, tensor, message
):
    with pytest.raises(ValueError, match=f"{name} .*{message}"):
        artifact(model, ("oscar-int2", "gtq-k3v3:seed=4"), **{**OWN, name: tensor})
    fitted_artifact(model).save(tmp_path)
    rewrite_tensors(tmp_path, {**load_file(tmp_path / "tensors.safetensors"), name: tensor.contiguous()})
    with pytest.raises(ValueError, match=rf"^{tmp_path}/tensors\.safetensors is not valid: {name} .*{message}"):
        Artifact.load(tmp_path)


@pytest.mark.parametrize(
    ("size", "header", "message"),
    [(2**30 + 1, 8, "it is larger than 1 GiB"), (2**22, 2**20 + 1, "its header is longer than that of any artifact")],
)
def test_a_file_that_is_too_large_is_refused(saved, size, header, message):
    path = saved / "tensors.safetensors"
    with path.open("wb") as file:
        file.write(header.to_bytes(8, "little"))
        file.truncate(size)  # takes no room on the disk
    checksum = hashlib.sha256(path.read_bytes()).hexdigest() if size < 2**30 else "0" * 64
    rewrite(saved, lambda content: content.update(tensors_sha256=checksum))
    with pytest.raises(ValueError, match=f"^{path} is not valid: {message}"):
        Artifact.load(saved)


def test_a_file_without_end_is_not_read_to_its_end(saved):
    (saved / "kvfold.json").unlink()
    (saved / "kvfold.json").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="it is larger than any model needs"):
        Artifact.load(saved)


@pytest.mark.parametrize("name", ["kvfold.json", "tensors.safetensors"])
@pytest.mark.parametrize("content", [b"{", None])
def test_a_damaged_artifact_of_the_cache_names_the_command_that_repairs_it(model, tmp_path, monkeypatch, name, content):
    monkeypatch.setenv("KVFOLD_CACHE", str(tmp_path / "a b"))
    folder = tmp_path / "a b" / "artifacts" / "0123-means"
    artifact(model).save(folder)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"the next command makes it again: `rm -r '{folder}'`$"):
        Artifact.load(folder)


def test_what_cannot_be_read_again_is_not_written(model, tmp_path):
    made = artifact(model)
    for block in range(9):
        made = made.with_check(parse(f"int4:block={block}"), checked(made, "int4", 0.0))
    versions = {f"package {number}": "1.0" for number in range(6000)}
    checks = {name: each.model_copy(update={"versions": versions}) for name, each in made.metadata.checks.items()}
    with pytest.raises(ValueError, match="it is larger than any model needs"):
        Artifact(made.metadata.model_copy(update={"checks": checks}), made.tensors).save(tmp_path / "new")
    assert not list(tmp_path.glob("new/*"))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("key_mean",), r"value_mean must be finite float32 of shape \(3, 2, 16\); it is missing"),
        (("key_mean", "value_mean"), r"key_first must be finite float32 of shape \(3, 2, 16\); it is missing"),
        ((*MEANS, "other"), "unknown tensor other"),
        (("a", "b"), "key_mean must be .* it is missing"),
    ],
)
def test_other_tensors_are_refused(saved, names, message):
    rewrite_tensors(saved, {name: torch.zeros(SHAPE) for name in names})
    with pytest.raises(ValueError, match=message):
        Artifact.load(saved)


@pytest.mark.parametrize("name", MEANS)
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
    needed = f"{name} must be finite" if tensor.shape == SHAPE and tensor.dtype == torch.float32 else r"\(3, 2, 16\)"
    with pytest.raises(ValueError, match=rf"{name} must be finite") as caught:
        artifact(model, **{name: tensor})
    assert re.search(needed, str(caught.value))
    others = {**{mean: torch.zeros(SHAPE) for mean in MEANS}, "text": torch.arange(50)}
    tensors = {**others, name: tensor}
    rewrite_tensors(saved, tensors)
    with pytest.raises(ValueError, match=rf"tensors.safetensors is not valid: {name} must be"):
        Artifact.load(saved)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_hidden_layers": 2}, "layers"),
        ({"num_attention_heads": 8}, "q_heads"),
        ({"num_key_value_heads": 4}, "kv_heads"),
        ({"head_dim": 32}, "key_dim"),
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


def test_a_configuration_that_does_not_state_rope_is_not_another_model(model, saved):
    """Engines have configuration classes of their own, some without rope_parameters."""
    config = model.config.to_dict()
    del config["rope_parameters"]
    Artifact.load(saved).metadata.model.check_files(config, None)


def test_the_same_model_with_other_weights_is_refused(saved):
    with pytest.raises(ValueError, match="its weights are others"):
        Artifact.load(saved).metadata.model.check(llama(seed=1))


@pytest.mark.parametrize(
    "name", ["model.layers.2.self_attn.k_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_every_parameter_of_the_decoder_counts(saved, name, tmp_path):
    changed = llama()
    with torch.no_grad():
        changed.get_parameter(name).view(-1)[0] += 0.5
    message = f"its weights are others, {name.removeprefix('model.')} among them"
    with pytest.raises(ValueError, match=message):
        Artifact.load(saved).metadata.model.check(changed)
    changed.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        check_folder(saved, tmp_path / "model")


@pytest.mark.parametrize("row", [0, 5, 31])
def test_every_row_of_a_matrix_counts(saved, tmp_path, row):
    """As in a model that was fine-tuned or pruned from some row on."""
    changed = llama()
    with torch.no_grad():
        changed.get_parameter("model.layers.1.self_attn.v_proj.weight")[row] *= 1.7
    message = r"its weights are others, layers\.1\.self_attn\.v_proj\.weight among them"
    with pytest.raises(ValueError, match=message):
        Artifact.load(saved).metadata.model.check(changed)
    changed.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        check_folder(saved, tmp_path / "model")


def test_every_column_of_a_square_matrix_counts(model, saved):
    for column in (0, 17, 63):
        changed = llama()
        with torch.no_grad():
            changed.get_parameter("model.layers.1.self_attn.q_proj.weight")[:, column] = 0.0
        with pytest.raises(ValueError, match="its weights are others"):
            Artifact.load(saved).metadata.model.check(changed)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(8, 64, dtype=torch.int32), torch.ones(8, 64).to(torch.float8_e4m3fn), torch.ones(4, 8, 16)],
    ids=["AWQ", "FP8", "a stack of experts"],
)
def test_tensors_that_are_not_compared_still_name_the_weights(model, tmp_path, tensor):
    """Pages in files are named after all weights of the files."""
    model.save_pretrained(tmp_path)
    digests = []
    for value in (1, 2):
        add_tensors(tmp_path, {"other": (tensor.float() * value).to(tensor.dtype)})
        digests.append(digest_model(str(tmp_path)))
    changed = {name for name in digests[0] if digests[0][name] != digests[1][name]}
    assert changed == {f"other {tensor.dtype}"}


def test_what_comes_after_the_decoder_does_not_count(saved):
    """Keys and values are the same with another output head."""
    changed = llama()
    torch.nn.init.normal_(changed.lm_head.weight)
    Artifact.load(saved).metadata.model.check(changed)


def check_folder(artifact: Path, folder: Path) -> None:
    """As engines do, which do not load the model with transformers."""
    config = json.loads((folder / "config.json").read_text())
    Artifact.load(artifact).metadata.model.check_files(config, digest_model(str(folder)))


def add_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "extra",
    [
        {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in range(3)},
        {"lm_head.weight": torch.ones(60, 64)},
        {
            f"model.layers.{layer}.self_attn.q_proj.{name}": tensor
            for layer in range(3)
            for name, tensor in {
                "qweight": torch.ones(8, 64, dtype=torch.int32),
                "qzeros": torch.ones(1, 8, dtype=torch.int32),
                "scales": torch.ones(1, 64, dtype=torch.float16),
            }.items()
        },
        {"vision.encoder.layers.0.self_attn.k_proj.weight": torch.ones(3, 3)},
        {f"{front}.self_attn.k_proj.weight": torch.ones(3, 3) for front in ("model.layers.3", "mtp.layers.0")},
    ],
    ids=["inv_freq", "lm_head", "AWQ", "a vision tower", "layers that draft"],
)
def test_a_model_with_more_tensors_in_its_files_is_the_same_model(saved, model, tmp_path, extra):
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    add_tensors(folder, extra)
    check_folder(saved, folder)
    name = "model.layers.1.self_attn.v_proj.weight"
    add_tensors(folder, {name: load_file(folder / "model.safetensors")[name] + 1})
    with pytest.raises(ValueError, match=r"its weights are others, layers\.1\.self_attn\.v_proj\.weight among them"):
        check_folder(saved, folder)


def test_files_that_the_model_is_not_loaded_from_do_not_count(saved, model, tmp_path):
    """As `consolidated.safetensors`, a second copy of the weights under other names, or the same names."""
    for size in ("10GB", "20kB"):  # in one file, and in several with an index
        folder = tmp_path / size
        model.save_pretrained(folder, max_shard_size=size)
        assert (folder / "model.safetensors.index.json").exists() == (size == "20kB")
        name = "model.layers.1.self_attn.v_proj.weight"
        save_file({name: torch.ones(32, 64), "layers.0.wk.weight": torch.ones(3)}, folder / "consolidated.safetensors")
        check_folder(saved, folder)


def test_an_index_that_names_a_file_that_is_not_there_tells_nothing(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="20kB")
    assert digest_model(str(tmp_path))
    sorted(tmp_path.glob("model-*.safetensors"))[1].unlink()
    assert digest_model(str(tmp_path)) is None
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is no index of weights"):
        digest_model(str(tmp_path))


def test_quantized_weights_are_not_compared(saved, model, tmp_path):
    """Their numbers mean nothing without their scales; all others still count."""
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn.v_proj.weight"
        add_tensors(folder, {name: torch.ones(32, 64).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)})
    check_folder(saved, folder)
    add_tensors(folder, {"model.norm.weight": torch.zeros(64)})
    with pytest.raises(ValueError, match=r"its weights are others, norm\.weight"):
        check_folder(saved, folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_the_same_weights_in_sixteen_bits_are_the_same_model(saved, dtype):
    """An artifact made from the float32 model serves its bfloat16 copy, and the other way round."""
    Artifact.load(saved).metadata.model.check(llama().to(dtype))
