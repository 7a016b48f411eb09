"""Files that are written whole or not at all."""

from collections.abc import Mapping
from pathlib import Path


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
