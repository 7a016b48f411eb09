"""Hooks of mkdocs. The site has the files outside of docs/ that its pages link to, and lists may be indented by two.

In the site, `docs/NAME` is `NAME`, and every other file of the repository is where it is in the repository. So
`../benchmarks/README.md`, which works where the repository is browsed, becomes `benchmarks/README.md`.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
ALWAYS = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "examples/README.md",
)  # in the navigation


def on_files(files: Files, config: Any) -> Files:
    waiting = [ROOT / name for name in ALWAYS]
    waiting += [target for page in DOCS.rglob("*.md") for target in linked(page)]
    while waiting:
        path = waiting.pop()
        place = place_of(path)
        if not path.is_file() or files.get_file_from_path(place):
            continue  # mkdocs itself names links without a target
        files.append(File.generated(config, place, abs_src_path=str(path)))
        if path.suffix == ".md":
            waiting += linked(path)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as they have to be in the site, and lists as Python's Markdown reads them: indented by four."""
    source, here = Path(page.file.abs_src_path).parent, Path(page.file.src_uri).parent

    def moved(found: re.Match[str]) -> str:
        if "://" in found[2]:
            return found[0]
        target = Path(os.path.normpath(source / found[2]))
        if not target.is_relative_to(ROOT):
            return found[0]
        return f"{found[1]}{Path(os.path.relpath(place_of(target), here)).as_posix()}{found[3]}"

    parts = CODE.split(LINK.sub(moved, markdown))  # every second one is code
    parts[::2] = [re.sub("^ +", lambda spaces: 2 * spaces[0], part, flags=re.MULTILINE) for part in parts[::2]]
    return "".join(parts)


def linked(page: Path) -> Iterator[Path]:
    """The files of the repository that a page links to."""
    for _, target, _ in LINK.findall(page.read_text()):
        path = Path(os.path.normpath(page.parent / target))
        if "://" not in target and path.is_relative_to(ROOT):
            yield path


def place_of(path: Path) -> str:
    """Where a file of the repository is in the site."""
    return path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix()
