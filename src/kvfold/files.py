"""Files that are written whole or not at all, and files of rows that grow."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_whole(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write files by name: all or, on a full disk, none. What was there stays whole until all are written."""
    partial = {name: folder / f"{name}.partial" for name in contents}
    try:
        for name, content in contents.items():
            partial[name].write_bytes(content)
        for name, path in partial.items():
            path.replace(folder / name)
    except OSError as error:
        for path in partial.values():
            path.unlink(missing_ok=True)
        raise OSError(f"cannot write {folder}: {error.strerror}") from error


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
