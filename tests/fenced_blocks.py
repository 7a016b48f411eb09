"""What the documents have in fenced blocks, and the commands in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTING = re.compile("[A-Z0-9_]+=")
FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]*)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def documents() -> list[Path]:
    """All that the site has, and the README."""
    folders = ROOT, ROOT / "benchmarks", ROOT / "examples"
    return [page for folder in folders for page in sorted(folder.glob("*.md"))] + sorted((ROOT / "docs").rglob("*.md"))


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    needs: str  # what it cannot be run without: its title. Empty: the tests run it
    text: str


def blocks(language: str) -> Iterator[Block]:
    for page in documents():
        for found in FENCE.finditer(page.read_text()):
            if found[1] == language:
                yield Block(str(page.relative_to(ROOT)), found[1], found[2] or "", found[3])


def commands(block: Block) -> list[list[str]]:
    """The words of each command, without comments, and without the variables that are set before it."""
    lines = [shlex.split(line, comments=True) for line in block.text.replace("\\\n", " ").splitlines()]
    return [list(dropwhile(SETTING.match, words)) for words in lines if words]
