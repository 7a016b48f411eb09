"""Files that are written whole, folders that one process writes to, and files of rows that grow."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvfold.files import append_rows, check_target, claimed, write_whole


def test_files_of_another_writer_are_left_alone(tmp_path, monkeypatch):
    """Two that write the same file at once each write one of their own first."""
    replace, calls = type(tmp_path).replace, iter([True])

    def once(path, target):
        if next(calls, False):
            write_whole(tmp_path, {"file": b"other"})
        return replace(path, target)

    monkeypatch.setattr(type(tmp_path), "replace", once)
    write_whole(tmp_path, {"file": b"mine"})
    assert (tmp_path / "file").read_bytes() == b"mine"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_interrupted_writer_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(path, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(tmp_path), "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path, {"file": b"mine"})
    assert list(tmp_path.iterdir()) == []


# Claims


def test_a_claimed_folder_is_in_use(tmp_path):
    folder = tmp_path / "a" / "b"
    with claimed(folder):
        with pytest.raises(
            OSError, match=f"^cannot write {folder}: it is in use by another kvfold, process {os.getpid()}: "
        ):
            claimed(folder).__enter__()
        (folder / "file").touch()
    with claimed(folder):
        pass
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_a_folder_that_stays_empty_is_removed_and_others_stay(tmp_path):
    (tmp_path / "there").mkdir()
    with claimed(tmp_path / "there"), claimed(tmp_path / "there" / "a" / "b"):
        assert (tmp_path / "there" / "a" / "b").is_dir()
    assert list((tmp_path / "there").iterdir()) == []
    with pytest.raises(KeyboardInterrupt), claimed(tmp_path / "new"):
        raise KeyboardInterrupt
    assert not (tmp_path / "new").exists()


def test_the_claim_of_a_killed_process_is_void(tmp_path):
    script = "import sys, pathlib; from kvfold.files import claimed\nwith claimed(pathlib.Path(sys.argv[1])): input()"
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE)
    while not (tmp_path / ".kvfold-in-use").exists() or not (tmp_path / ".kvfold-in-use").read_text():
        assert process.poll() is None
    with pytest.raises(OSError, match=f"in use by another kvfold, process {process.pid}: wait for it"):
        claimed(tmp_path).__enter__()
    (tmp_path / ".kvfold.json.12345678.kvfold-partial").touch()
    process.send_signal(signal.SIGKILL)
    process.wait()
    with claimed(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [".kvfold-in-use"], "its half-written files are gone"
    assert list(tmp_path.iterdir()) == []


def test_files_of_the_user_stay_in_a_claimed_folder(tmp_path):
    """Whatever they are called: names that another program, or an older kvfold, gives its files for a while too."""
    names = ["movie.partial", "kvfold.json.1234abcd.partial", ".in-use", "unfinished", "a.tmp", ".kvfold-partial"]
    for name in names:
        (tmp_path / name).write_text(name)
    with claimed(tmp_path):
        write_whole(tmp_path, {"mine": b"mine"})
    (tmp_path / "mine").unlink()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: name for name in names}


def test_a_claim_file_that_was_removed_meanwhile_is_made_anew(tmp_path, monkeypatch):
    """Between opening and locking it, the one who held the claim gave it up, removing the file and the folder."""
    from kvfold import files

    folder, lock, calls = tmp_path / "folder", files._lock, iter([True])

    def late(descriptor):
        if next(calls, False):
            (folder / ".kvfold-in-use").unlink()
            folder.rmdir()
        return lock(descriptor)

    monkeypatch.setattr(files, "_lock", late)
    with claimed(folder), pytest.raises(OSError, match="in use"):
        claimed(folder).__enter__()


def test_what_is_no_folder_cannot_be_claimed(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "sub"):
        with pytest.raises(OSError, match=f"^cannot write {path}: (it is a file, not a folder|Not a directory)$"):
            claimed(path).__enter__()
    assert file.read_text() == "mine"


def test_file_systems_without_locks_hold_no_claim(tmp_path, monkeypatch):
    import fcntl

    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with claimed(tmp_path), claimed(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


# Targets


def test_a_target_is_checked_and_stays_as_it_is(tmp_path):
    (tmp_path / "there").write_text("mine")
    (tmp_path / "link").symlink_to("later")
    for name in ("there", "new", "link"):
        check_target(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "there"]
    assert (tmp_path / "there").read_text() == "mine"
    check_target(Path("/dev/null"))


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("folder", "it is a folder; name a file in it"),
        ("missing/file", "there is no folder {tmp}/missing; run `mkdir -p {tmp}/missing`"),
        ("/proc/file", "No such file or directory"),
    ],
)
def test_what_cannot_be_written_is_no_target(tmp_path, target, why):
    (tmp_path / "folder").mkdir()
    path = tmp_path / target
    with pytest.raises(OSError, match=f"^cannot write {path}: {why.format(tmp=tmp_path)}$"):
        check_target(path)


# Rows


def test_rows_are_added_in_the_order_of_the_files_columns(tmp_path):
    file = tmp_path / "rows.csv"
    append_rows(file, [{"a": 1, "b": "x,y"}])
    append_rows(file, [{"b": 4, "a": 3}])
    assert file.read_text() == 'a,b\n1,"x,y"\n3,4\n'


@pytest.mark.parametrize("before", ["a,c\n1,2\n", "a\n1\n", "\n", ""])
def test_a_file_with_other_columns_stays_as_it_is(tmp_path, before):
    file = tmp_path / "rows.csv"
    file.write_text(before)
    with pytest.raises(ValueError, match="other columns"):
        append_rows(file, [{"a": 1, "b": 2}])
    assert file.read_text() == before
