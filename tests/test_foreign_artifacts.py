"""Artifacts of strangers: whatever is in their files, `kvfold inspect` and `card` say one line or what is right.

A real artifact is changed at random. The seeds are fixed, so a fault comes back.
"""

import datetime
import hashlib
import json
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import kvfold
from kvfold.artifact import MEANS, Artifact, CheckResult, Measure
from kvfold.cli import main
from kvfold.publish.card import card
from kvfold.recipes import parse

MUTATIONS = 200
SECONDS, MEGABYTES = 2, 200  # of processor time, and of memory beyond what the process had
METADATA, TENSORS = "kvfold.json", "tensors.safetensors"
DEEP = "<deep>"  # written as so many brackets that Python's own parser gives up
NASTY: list[Any] = [
    *(None, True, 0, -1, 2**31, 300_000_000, 10**30, 1e38, 1e308, float("nan"), float("inf"), DEEP),
    *("", "x; rm -rf ~", "$(id)", "`id`", "[/x]", "[red]x[/red]", "\x1b]0;x\x07\x1b[2J", "\r\n\n", "\u202e", "\ud800"),
    *("x" * 10**6, "fold4:" + "block=1," * 10**5, "fold4:block=" + "9" * 4000, "gtq-k3v3:seed=" + "9" * 30, "../../x"),
    *([], {}, [0] * 10**5, [[]] * 10**4, [[[[]]]], {"a": {"b": "\x07"}}, dict.fromkeys(map(str, range(10**4)), 0)),
    *(["oscar-int2"] * 1000, {"schema_version": 4}, {"oscar-int2": {}}, [2**62, 2**62], [0, 2**62]),
]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=99, num_hidden_layers=2, head_dim=16, **sizes)).eval()
    recipes = [parse(name) for name in ("oscar-int2", "fold4", "gtq-k3v3:seed=4", "kmeans-int4:centroids=4")]
    folder = tmp_path_factory.mktemp("real")
    artifact = kvfold.calibrate(model, torch.arange(300) % 99, 128, recipes)
    measures = [
        Measure(name="needles", unit="share", value=0.9, reference=0.9, loss=0.0, low=-0.1, high=0.1, allowed=0.03),
        Measure(name="KL", unit="nats", value=0.001, reference=0.0, loss=0.001, low=0.0, high=0.002, allowed=0.02),
    ]
    result = CheckResult(
        context=2048,
        date=datetime.date(2026, 11, 17),
        versions={"kvfold": "0.3.0"},
        fit_sha256=artifact.fit_sha256(recipes[0]),
        measures=tuple(measures),
    )
    artifact.with_check(recipes[0], result).save(folder)
    return folder


def change(tree: Any, dice: random.Random) -> None:
    """Put something nasty somewhere into a tree of JSON, or take something away."""
    while True:
        place = dice.choice([*tree] if isinstance(tree, dict) else range(len(tree)))
        if not isinstance(tree[place], dict | list) or not tree[place] or dice.random() < 0.3:
            break
        tree = tree[place]
    kind = dice.random()
    if kind < 0.7:
        tree[place] = dice.choice(NASTY)
    elif kind < 0.85 and isinstance(tree, dict):
        tree[str(dice.choice(NASTY))] = tree.pop(place)
    else:
        del tree[place]


def written(tree: Any) -> bytes:
    return json.dumps(tree).replace(json.dumps(DEEP), "[" * 10**5 + "]" * 10**5).encode()


def scratched(content: bytes, dice: random.Random) -> bytes:
    """Cut, or with other bytes somewhere."""
    place = dice.randrange(len(content))
    other = dice.randbytes(dice.choice((1, 4, 64)))
    return dice.choice((content[:place], content[:place] + other + content[place + len(other) :], other + content))


def spoil_metadata(folder: Path, dice: random.Random) -> None:
    content = (folder / METADATA).read_bytes()
    if dice.random() < 0.2:
        (folder / METADATA).write_bytes(scratched(content, dice))
        return
    tree = json.loads(content)
    for _ in range(dice.choice((1, 1, 2, 5))):
        change(tree, dice)
    (folder / METADATA).write_bytes(written(tree))


def spoil_tensors(folder: Path, dice: random.Random) -> None:
    """With the right checksum, so that what comes after it is tried."""
    content = (folder / TENSORS).read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    header, data = content[8:length], content[length:]
    kind = dice.random()
    if kind < 0.5:
        tree = json.loads(header)
        if dice.random() < 0.3:
            one, other = dice.sample([*tree], 2)
            tree[one], tree[other] = tree[other], tree[one]
        else:
            change(tree, dice)
        header = written(tree)
        content = len(header).to_bytes(8, "little") + header + data
    elif kind < 0.6:
        content = dice.choice((0, 7, 2**20, 2**32, 2**63)).to_bytes(8, "little") + content[8:]
    elif kind < 0.9:
        place = 4 * dice.randrange(len(data) // 4)
        content = content[: length + place] + dice.randbytes(4) + content[length + place + 4 :]
    else:
        content = scratched(content, dice)
    (folder / TENSORS).write_bytes(content)
    tree = json.loads((folder / METADATA).read_bytes())
    tree["tensors_sha256"] = hashlib.sha256(content).hexdigest()
    (folder / METADATA).write_bytes(written(tree))


def check_right(folder: Path) -> None:
    """What is accepted is what the files say."""
    artifact = Artifact.load(folder)
    said = json.loads((folder / METADATA).read_bytes())
    assert {**said, **artifact.metadata.model_dump(mode="json")} == {"checks": {}, **said}
    tensors = load_file(folder / TENSORS)
    assert artifact.tensors.keys() == tensors.keys()
    assert all(torch.equal(artifact.tensors[name], tensor) for name, tensor in tensors.items())
    assert max(tensors[name].abs().max() for name in MEANS) <= 65504
    text = card(artifact, "./there", None)
    assert all(line.isprintable() for line in text.split("\n"))
    assert "rm -rf" not in text


def peak(reset: bool = False) -> int:
    """The most megabytes that this process has had since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) >> 10


@pytest.mark.parametrize("spoil", [spoil_metadata, spoil_tensors])
def test_a_spoiled_artifact_ends_in_one_line_or_a_right_answer(
    real: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path, random.Random], None],
):
    folder, taken = tmp_path / "fits", 0
    monkeypatch.setattr(sys, "argv", ["kvfold", "inspect", str(folder)])
    for seed in range(MUTATIONS // 2):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(real, folder)
        spoil(folder, random.Random(seed))
        before, begun = peak(reset=True), time.process_time()
        with pytest.raises(SystemExit) as stop:
            main()
        used = time.process_time() - begun, peak() - before
        out, err = capsys.readouterr()
        try:
            assert used[0] < SECONDS
            assert used[1] < MEGABYTES
            assert all(line.isprintable() for line in (out + err).split("\n"))
            assert "rm -rf" not in err.partition("`")[2], "a command that a stranger wrote"
            if stop.value.code:
                assert (out, err.count("\n"), err[:7]) == ("", 1, "error: ")
            else:
                check_right(folder)
                taken += 1
        except AssertionError as error:
            raise AssertionError(f"seed {seed} of {spoil.__name__}: {error}\n{used}\n{err[:2000]}") from None
    assert 0 < taken < MUTATIONS // 2, "mutations that change nothing, or nothing but garbage"


def test_tensors_are_not_read_before_all_have_the_right_shapes(real: Path, tmp_path: Path):
    shutil.copytree(real, tmp_path, dirs_exist_ok=True)
    file = tmp_path / TENSORS
    save_file({**load_file(file), "surprise": torch.zeros(2**25)}, file)
    content = json.loads((tmp_path / METADATA).read_bytes())
    with file.open("rb") as stream:
        content["tensors_sha256"] = hashlib.file_digest(stream, "sha256").hexdigest()
    (tmp_path / METADATA).write_bytes(written(content))
    before = peak(reset=True)
    with pytest.raises(ValueError, match="unknown tensor surprise"):
        Artifact.load(tmp_path)
    assert peak() - before < 64, "the file has 128 MB"
