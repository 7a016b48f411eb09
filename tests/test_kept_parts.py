"""Parts of long work are measured once, also by the run that goes on after an interruption."""

import math
from pathlib import Path

import pytest

from kvfold.kept_parts import NOTHING_KEPT, Parts

RESULTS = {"text": ["ü\n", True, None], "numbers": [0.1 + 0.2, 1e-310, -0.0, 2**60], "none": math.inf}


def measured(parts: Parts) -> tuple[dict, list]:
    """The results of all parts, and the names of those that were measured now."""
    now: list[str] = []
    results = {name: parts(name, lambda name=name: (now.append(name), RESULTS[name])[1]) for name in RESULTS}
    return results, now


def kept(file: Path, count: int = len(RESULTS)) -> Path:
    """A file with the first parts."""
    parts = Parts.load(file, "source")
    for name in list(RESULTS)[:count]:
        parts(name, lambda name=name: RESULTS[name])
    return file


def test_what_is_kept_is_not_measured_again_and_stays_the_same(tmp_path: Path):
    file = kept(tmp_path / "parts", 2)
    assert measured(Parts.load(file, "source")) == (RESULTS, ["none"])
    assert measured(Parts.load(file, "source")) == (RESULTS, [])
    assert measured(NOTHING_KEPT) == measured(NOTHING_KEPT) == (RESULTS, list(RESULTS))


def test_an_interrupted_part_is_not_kept(tmp_path: Path):
    parts = Parts.load(tmp_path / "parts", "source")

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        parts("text", interrupt)
    assert not (tmp_path / "parts").exists()
    assert "text" not in parts


def test_names_are_those_of_their_group(tmp_path: Path):
    parts = Parts.load(tmp_path / "parts", "source")
    assert parts.of("a")((1, 0.5), lambda: 1) == 1
    assert parts.of("b")((1, 0.5), lambda: 2) == 2
    again = Parts.load(tmp_path / "parts", "source")
    assert (1, 0.5) in again.of("a")
    assert (1, 0.5) not in again
    assert [again.of(front)((1, 0.5), lambda: 3) for front in "abc"] == [1, 2, 3]


def test_half_a_line_of_a_killed_run_is_measured_again(tmp_path: Path):
    file = kept(tmp_path / "parts")
    whole = file.read_bytes()
    for missing in (1, 5):
        file.write_bytes(whole[:-missing])
        assert measured(Parts.load(file, "source")) == (RESULTS, ["none"])
        assert file.read_bytes() == whole


def test_a_damaged_file_is_refused(tmp_path: Path):
    file = kept(tmp_path / "parts")
    whole = file.read_bytes()
    for place in (whole.index(b"text"), whole.index(b"0.3000"), len(whole) - 3):
        file.write_bytes(whole[:place] + b"7" + whole[place + 1 :])
        with pytest.raises(ValueError, match=f"^{file} is damaged; delete it to begin anew$"):
            Parts.load(file, "source")


@pytest.mark.parametrize("content", [None, b"of the user\n", b"of the user"])
def test_the_file_of_another_run_is_refused_and_stays(tmp_path: Path, content: bytes | None):
    file = kept(tmp_path / "parts")
    if content is not None:
        file.write_bytes(content)
    before = file.read_bytes()
    with pytest.raises(ValueError, match=f"^{file} was kept by a run with another model, text, .*; delete it to begin"):
        Parts.load(file, "other source")
    assert file.read_bytes() == before


def test_a_full_disk_is_said(tmp_path: Path):
    (tmp_path / "parts").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"^cannot write {tmp_path / 'parts'}: No space left on device$"):
        Parts(tmp_path / "parts", "source")("text", list)
