"""Files that are written whole or not at all, folders that one process claims, and targets of a long run."""

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

# The names that kvfold gives its own files for a while. Nobody else's file is deleted.
CLAIM = ".kvfold-in-use"  # the locked file in a claimed folder; it holds the process id
PARTIAL = ".{name}.{random}.kvfold-partial"  # what `write_whole` has not yet renamed


def write_whole(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write files by name: all, or none if the disk is full. Old files stay until all new ones are written."""
    # random names, so that two writers never share a file
    partial = {name: folder / PARTIAL.format(name=name, random=token_hex(4)) for name in contents}
    try:
        for name, content in contents.items():
            partial[name].write_bytes(content)
        for name, path in partial.items():
            path.replace(folder / name)
    except OSError as error:
        raise OSError(f"cannot write {folder}: {error.strerror}") from error
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Claim the folder for this process alone. A missing folder is made, and removed again if it stays empty.

    The claim is a lock of the operating system, so it ends with the process, even if that is killed. On a file system
    without locks, nothing is claimed.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        claim = _claim(folder)
    except OSError as error:
        raise OSError(f"cannot write {folder}: {error.strerror or error}") from None
    try:
        for left_over in folder.glob(PARTIAL.format(name="*", random="?" * 8)):  # left by a process that was killed
            left_over.unlink()
        yield
    finally:
        with suppress(OSError):
            (folder / CLAIM).unlink()  # before the lock is released: later it may be another process's
        os.close(claim)
        with suppress(OSError):  # if a folder is not empty
            for path in missing:
                path.rmdir()


def _claim(folder: Path) -> int:
    """A descriptor that holds the lock. A folder that another process has claimed is refused."""
    while True:
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError("it is a file, not a folder")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            claim = os.open(folder / CLAIM, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # the process that had claimed the folder has just removed it
            continue
        if not _lock(claim):
            holder = os.read(claim, 20).decode(errors="replace") or "unknown"
            os.close(claim)
            raise BlockingIOError(
                f"it is in use by another kvfold, process {holder}: wait for it, or take another folder"
            )
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(claim), os.stat(folder / CLAIM)):
                os.truncate(claim, 0)
                os.write(claim, str(os.getpid()).encode())
                return claim
        os.close(claim)  # another process has released its claim, and removed this file


def _lock(descriptor: int) -> bool:
    """Take the lock. False if another process holds it."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # Windows, and file systems without locks
        return True
    return True


def check_target(path: Path) -> None:
    """Refuse a file that cannot be written, before there is anything to write. What is there stays as it is."""
    check_folder(path)
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder; name a file in it")
    target = path.resolve()  # of a link to a file that is not there yet
    if target.exists() and not target.is_file():  # a pipe or a device: whoever reads it would see it closed
        return
    new = not target.exists()
    try:
        target.open("xb" if new else "ab").close()
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror}") from None
    if new:
        target.unlink()


def check_folder(path: Path) -> None:
    """Refuse a path whose folder does not exist."""
    if not (folder := path.parent).is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {folder}; run `mkdir -p {folder}`")


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows to a CSV file, in the order of its columns. A new file takes the columns of the rows."""
    new, columns = not path.exists(), columns_of(path, list(rows[0]))
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def columns_of(path: Path, expected: list[str]) -> list[str]:
    """The columns of a CSV file that rows are added to, in its order. They have to be the expected ones."""
    if not path.exists():
        return expected
    with path.open(newline="") as file:
        columns = next(csv.reader(file), [])
    if set(columns) != set(expected):
        raise ValueError(f"{path} has other columns than the rows to be added: choose another file")
    return columns
