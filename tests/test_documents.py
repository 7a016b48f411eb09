"""The documents: how long they are, that their links lead somewhere, and that what scripts write is up to date."""

import csv
import os
import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fenced_blocks import ROOT, documents

RESULTS = ROOT / "benchmarks" / "results"
LONGEST = {"README.md": 130, "benchmarks/README.md": 200}  # lines
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")
PICTURES = ROOT / "docs" / "pictures"


@pytest.mark.parametrize("file", LONGEST)
def test_what_everybody_reads_is_short(file: str):
    assert len((ROOT / file).read_text().splitlines()) <= LONGEST[file]


def anchors(page: Path) -> set[str]:
    """Of headings: lower case, without punctuation, with a hyphen for each space."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for found in LINK.finditer(text):
        target, _, anchor = (found[1] or found[2]).partition("#")
        if "://" in target:
            continue
        path = Path(os.path.normpath(page.parent / target)) if target else page
        assert path.exists(), f"there is no {target}"
        if anchor and not anchor.startswith("only-"):  # how the theme shows a picture on light or dark pages only
            assert anchor in anchors(path), f"{target} has no #{anchor}"


def test_tables_are_those_of_rows_and_code():
    script = runpy.run_path(str(ROOT / "benchmarks" / "documents.py"))
    old = [str(page) for page in documents() if page.read_text() != script["with_tables"](page.read_text())]
    assert not old, f"`make documents` writes the tables of {', '.join(old)}"
    text = "".join(page.read_text() for page in documents())
    marked = re.findall(r"^<!-- (?:table|rest): ([\w-]+) -->$", text, re.MULTILINE)
    assert set(marked) == script["TABLES"].keys()


def rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="") as lines:
        return list(csv.DictReader(lines))


@pytest.mark.parametrize("page", ["light", "dark"])
def test_the_picture_of_quality_and_speed_has_the_numbers_of_the_rows(page: str):
    picture = (PICTURES / f"overview-{page}.svg").read_text()
    ElementTree.fromstring(picture)
    comments = re.findall(r"<!-- (\S+): ([\d.]+) times smaller, (KL )?([\d.]+)", picture)
    said = {(name, bool(kl)): (smaller, number) for name, smaller, kl, number in comments}
    for row in rows("qwen2.5-coder-1.5b/quality.csv"):
        if row["recipe"].startswith("fold") and row["context"] == "4096":
            smaller = 16 / float(row["bits_per_element_128k"])
            assert said[row["recipe"], True] == (f"{smaller:.1f}", f"{float(row['kl']):.4f}")
    served = {
        row["recipe"]: float(row["system_tps"])
        for row in rows("serving-h200.csv")
        if (row["engine"], row["input"], row["concurrency"], row["model"]) == ("vllm", "8192", "32", "Qwen3-8B")
    }
    for cache in ("fp8", "int4_per_token_head"):
        assert said[cache, False][1] == f"{served[cache] / served['bf16']:.2f}"


@pytest.mark.parametrize("page", ["light", "dark"])
def test_the_picture_of_a_key_has_every_step(page: str):
    drawn = ElementTree.fromstring((PICTURES / f"key-{page}.svg").read_text())
    words = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert words[::3] == ["centre", "bits by block", "rotate", "page", "attention"]
    palette = runpy.run_path(str(ROOT / "benchmarks" / "pictures.py"))
    assert palette["key"](palette["PALETTES"][page]) == (PICTURES / f"key-{page}.svg").read_text()
