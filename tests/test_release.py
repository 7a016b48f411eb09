"""What a release states: its version, what it takes and was run with, and how to cite it."""

import ast
import csv
import re
import tomllib

import pytest
import yaml
from fenced_blocks import ROOT
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kvfold import __version__
from kvfold.artifact import SCHEMA

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
NEXT = {"0.32": "0.33", "0.5.23": "0.5.24"}  # the first version that is not taken any more
PINNED = {  # where `make test` takes versions from
    "vLLM": "constraints-vllm.txt",
    "SGLang": "tests/engines/in_sglang/requirements.txt",
    "transformers": "constraints.txt",
}
RESULTS = ROOT / "benchmarks" / "results"


def tables() -> list[list[dict[str, str]]]:
    """The rows of each table of docs/compatibility.md."""
    found = []
    for text in re.findall(r"(?:^\|.*\n)+", (ROOT / "docs" / "compatibility.md").read_text(), re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
        found.append([dict(zip(head, row, strict=True)) for row in rows])
    return found


def asked_for(name: str, extra: str | None = None) -> SpecifierSet:
    """What pyproject.toml says of a package."""
    lines = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    (found,) = [each for each in map(Requirement, lines) if each.name == name]
    return found.specifier


def constants(file: str) -> dict[str, str]:
    """Strings that a module assigns, by name. Modules of engines cannot be imported without the engine."""
    found: dict[str, str] = {}
    for node in ast.parse((ROOT / "src" / "kvfold" / file).read_text()).body:
        if isinstance(node, ast.Assign):
            targets, values = (
                part.elts if isinstance(part, ast.Tuple) else [part] for part in (*node.targets, node.value)
            )
            pairs = zip(targets, values, strict=False)
            found |= {name.id: value.value for name, value in pairs if isinstance(value, ast.Constant)}
    return found


def pinned(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def test_what_this_version_takes_is_what_the_package_asks_for():
    (row,), _ = tables()
    vllm, (oldest, newest) = row["vLLM"], row["SGLang"].split(" to ")
    assert __version__.startswith(f"{row['kvfold']}.")
    assert asked_for("vllm", "vllm") == SpecifierSet(f">={vllm},<{NEXT[vllm]}")
    assert constants("engines/vllm/plan.py")["TESTED"] == vllm
    assert asked_for("sglang", "sglang") == SpecifierSet(f">={oldest},<{NEXT[newest]}")
    hooks = constants("engines/sglang/hooks.py")
    assert (hooks["OLDEST"], hooks["NEWEST"]) == (oldest, newest)
    least = {name: row[name].removesuffix(" or newer") for name in ("torch", "Triton", "transformers", "Python")}
    assert asked_for("torch") == SpecifierSet(f">={least['torch']}")
    assert asked_for("transformers", "transformers") == SpecifierSet(f">={least['transformers']}")
    assert PROJECT["requires-python"] == f">={least['Python']}"
    assert f"Triton {least['Triton']} or newer" in (ROOT / "src" / "kvfold" / "ops" / "dispatch.py").read_text()
    assert row["artifacts"] == f"schema {SCHEMA}"


def test_what_it_was_run_with_is_what_tests_and_rows_name():
    _, runs = tables()
    of_tests = {row["engine"].split()[0]: row for row in runs if row["where"] == "tests, CPU"}
    assert of_tests.keys() == PINNED.keys()
    for engine, file in PINNED.items():
        versions = pinned(file)
        assert [of_tests[engine][name] for name in ("torch", "Triton", "transformers")] == [
            versions[name] for name in ("torch", "triton", "transformers")
        ]
    assert of_tests["vLLM"]["engine"] == f"vLLM {pinned(PINNED['vLLM'])['vllm']}"
    assert of_tests["SGLang"]["engine"] == f"SGLang {pinned('tests/engines/in_sglang/no-deps.txt')['sglang']}"
    with (RESULTS / "kernels-h200.csv").open(newline="") as lines:
        kernels = {(row["torch"].partition("+")[0], row["triton"]) for row in csv.DictReader(lines)}
    assert kernels == {(row["torch"], row["Triton"]) for row in runs if row["where"] == "kernels, H200"}
    with (RESULTS / "serving-h200.csv").open(newline="") as lines:
        servers = {(row["engine"], row["version"]) for row in csv.DictReader(lines)}
    said = [row["engine"].lower() for row in runs if row["where"] == "servers, H200"]
    assert sorted(said) == sorted(" ".join(each) for each in servers)


def test_the_changelog_begins_with_this_version_and_its_headings_are_the_usual_ones():
    versions = re.findall(r"^## (?!\[Unreleased\]$)(.+)$", CHANGELOG, re.MULTILINE)
    assert re.fullmatch(rf"\[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d", versions[0])
    numbers = [Version(each.partition("]")[0].strip("[")) for each in versions]
    assert numbers == sorted(numbers, reverse=True)
    for section in re.split(r"^## .+$", CHANGELOG, flags=re.MULTILINE)[1:]:
        headings = re.findall(r"^### (.+)$", section, re.MULTILINE)
        assert headings == [each for each in ("Added", "Changed", "Fixed", "Removed") if each in headings]


def test_the_citation_names_this_release():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()  # what the format requires
    assert (cited["title"], cited["version"], cited["license"]) == ("kvfold", __version__, PROJECT["license"])
    assert f"## [{__version__}] - {cited['date-released']}" in CHANGELOG
    assert [each["name"] for each in cited["authors"]] == [each["name"] for each in PROJECT["authors"]]
    assert (cited["abstract"], cited["keywords"]) == (PROJECT["description"], PROJECT["keywords"])


@pytest.mark.parametrize("file", ["docs/kubernetes.yaml", "docs/format.md"])
def test_other_files_name_this_version(file: str):
    named = re.findall(r"(?:kvfold-vllm:|\"kvfold\": \")([\d.]+)", (ROOT / file).read_text())
    assert named
    assert set(named) == {__version__}
