"""Names and checksums of stored pages."""

import pytest

from kvfold.artifact import Artifact
from kvfold.engines.serving import Config
from kvfold.engines.stored_pages import CHECKSUM_BYTES, checksum, name_of_pages
from kvfold.recipes import parse


def test_pages_of_another_recipe_artifact_or_model_have_another_name(small_artifact, tmp_path):
    """An artifact is known by what is in it, wherever it lies."""
    artifact = Artifact.load(small_artifact)
    artifact.save(tmp_path / "copy")
    means = artifact.tensors["key_mean"]
    Artifact(artifact.metadata, {**artifact.tensors, "key_mean": means + 1e-3}).save(tmp_path / "other")
    name = name_of_pages(Config(parse("saw-int4"), small_artifact), {"norm": "1"})
    assert name == name_of_pages(Config(parse("saw-int4"), str(tmp_path / "copy")), {"norm": "1"})
    others = [
        name_of_pages(Config(parse("saw-int4"), small_artifact), {"norm": "2"}),
        name_of_pages(Config(parse("saw-int4"), small_artifact), {"norm": "1"}, "another revision"),
        name_of_pages(Config(parse("saw-int4"), str(tmp_path / "other")), {"norm": "1"}),
        name_of_pages(Config(parse("saw-int4:block=4"), small_artifact), {"norm": "1"}),
        name_of_pages(Config(parse("int4"), small_artifact), {"norm": "1"}),
        name_of_pages(Config(parse("int4:centre=false")), {"norm": "1"}),
    ]
    assert len({name, *others}) == 1 + len(others)


@pytest.mark.parametrize("byte", [0, 100, 199])
def test_a_checksum_tells_every_changed_byte_and_every_other_name(byte):
    page = bytes(range(200))
    changed = bytearray(page)
    changed[byte] ^= 1
    sums = [checksum("a", page), checksum("a", memoryview(changed)), checksum("b", page), checksum("a", page[:-1])]
    assert len(set(sums)) == len(sums)
    assert {len(each) for each in sums} == {CHECKSUM_BYTES}
    assert sums[0] == checksum("a", memoryview(page))
