"""Files that are written whole or not at all, folders that one process writes to, and files of rows that grow."""

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

CLAIM = ".in-use"  # the file in a claimed folder that is locked, with the number of the process
PARTIAL = "partial"


def write_whole(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write files by name: all or, on a full disk, none. What was there stays whole until all are written."""
    # names of their own, so that two writers never share one
    partial = {name: folder / f"{name}.{token_hex(4)}.{PARTIAL}" for name in contents}
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
    """The folder for this process alone, made where it is missing; where nothing comes into it, it is removed again.

    The operating system holds the claim, so it ends with the process, however that ends. File systems without locks
    hold none.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        claim = _claim(folder)
    except OSError as error:
        raise OSError(f"cannot write {folder}: {error.strerror or error}") from None
    try:
        for left_over in folder.glob(f"*.{PARTIAL}"):  # by a process that was killed
            left_over.unlink()
        yield
    finally:
        with suppress(OSError):
            (folder / CLAIM).unlink()  # before it is given up, so that nobody else's is removed
        os.close(claim)
        with suppress(OSError):  # of a folder that is not empty
            for path in missing:
                path.rmdir()


def _claim(folder: Path) -> int:
    """A descriptor that holds the lock; refuses a folder whose lock another process holds."""
    while True:
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError("it is a file, not a folder")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            claim = os.open(folder / CLAIM, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # whoever had claimed the folder has just removed it
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
        os.close(claim)  # the file was removed in the meantime, with the claim of another


def _lock(descriptor: int) -> bool:
    """False where another process holds the lock."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # Windows, and file systems that know no locks
        return True
    return True


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add rows to a CSV file, in the order of its columns; a new one begins with theirs."""
    new, columns = not path.exists(), list(rows[0])
    if not new:
        with path.open(newline="") as file:
            columns = next(csv.reader(file), [])
    if set(columns) != set(rows[0]):
        raise ValueError(f"{path} has other columns than the rows to be added: choose another file")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)
