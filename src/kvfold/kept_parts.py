"""Long work in parts. What is finished is kept in a file, from which an interrupted run goes on."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self
from zlib import crc32

Name = str | int | float | tuple[Any, ...]


@dataclass(frozen=True)
class Parts:
    """The results of parts, which are JSON, by their names. Without a file, nothing is kept.

    The first line of the file has a hash of all that the results depend on. Every part is one more line: a checksum,
    its name and its result. Numbers are written so that the same ones are read.
    """

    file: Path | None = None
    source: str = ""  # the hash
    front: tuple[Name, ...] = ()  # of all names
    found: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, file: Path, source: str) -> Self:
        """With what an interrupted run has left in the file, if any. The file of another run is refused, a damaged one
        too."""
        parts = cls(file, source)
        content = file.read_bytes() if file.exists() else b""
        if not content:
            return parts
        if not content.startswith(parts._header):
            raise ValueError(
                f"{file} was kept by a run with another model, text, option or kvfold, or is damaged; delete it to "
                "begin anew"
            )
        whole = content[: content.rfind(b"\n") + 1]
        os.truncate(file, len(whole))  # a killed run may have left half a line
        for line in whole.removeprefix(parts._header).splitlines():
            checksum, _, text = line.partition(b" ")
            if checksum != b"%08x" % crc32(text):
                raise ValueError(f"{file} is damaged; delete it to begin anew")
            name, result = json.loads(text)
            parts.found[json.dumps(name)] = result
        return parts

    @property
    def _header(self) -> bytes:
        return f"unfinished work of kvfold, {self.source}\n".encode()

    def of(self, *front: Name) -> Self:
        """The parts whose names begin so."""
        return replace(self, front=(*self.front, *front))

    def __contains__(self, name: Name) -> bool:
        return self._key(name) in self.found

    def __call__(self, name: Name, measure: Callable[[], Any]) -> Any:
        """The result of a part, which is measured if it is not kept yet."""
        if self.file is None:
            return measure()
        if (key := self._key(name)) not in self.found:
            text = f"[{key}, {json.dumps(measure())}]".encode()
            try:
                with self.file.open("ab") as file:
                    file.write((b"" if file.tell() else self._header) + b"%08x %s\n" % (crc32(text), text))
            except OSError as error:
                raise OSError(f"cannot write {self.file}: {error.strerror}") from None
            self.found[key] = json.loads(text)[1]  # as a later run reads it
        return self.found[key]

    def _key(self, name: Name) -> str:
        return json.dumps([*self.front, name])


NOTHING_KEPT = Parts()
