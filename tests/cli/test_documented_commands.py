"""Every command in the documents. Its words are those that the command's own parser takes. It is run here, with a tiny
model in place of the embedded one and less text, unless the title of its block says what it needs."""

import argparse
import os
import re
import runpy
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from commands import run
from fenced_blocks import FENCE, ROOT, Block, blocks, commands, documents
from packaging.requirements import Requirement

from kvfold.cli import app
from kvfold.recipes import parse

BLOCKS = list(blocks("sh"))
KVFOLD = typer.main.get_command(app)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
SERVERS = {"curl", "docker", "jupyter", "kubectl", "vllm"}  # only in blocks that say what they need
LESS = {  # work for the tiny model, so that a command takes a second
    "calibrate": ("--tokens", "200", "--context", "64"),
    "eval": ("--tokens", "128", "--context", "64"),
    "tune": ("--tokens", "128", "--bits", "5", "--context", "2048"),
    "generate": ("--max-tokens", "2"),
}


def all_commands(run_here: bool) -> Iterator[tuple[Block, list[str]]]:
    for block in BLOCKS:
        if bool(block.needs) != run_here:
            yield from ((block, words) for words in commands(block))


def find(words: list[str]) -> tuple[str, typer.core.TyperCommand, list[str]]:
    """The name of a kvfold command, the command, and the rest of the words."""
    command, name = KVFOLD, []
    while hasattr(command, "commands"):
        name.append(words[len(name)])
        command = command.commands[name[-1]]
    return " ".join(name), command, words[len(name) :]


def parsed_by_script(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a script of benchmarks/ until it has read its arguments."""

    class ReadAll(Exception):
        pass

    def read(parser: argparse.ArgumentParser, *arguments: list[str]) -> None:
        real(parser, *arguments)
        raise ReadAll

    real = argparse.ArgumentParser.parse_args
    with monkeypatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        patch.setattr(sys, "argv", words)
        patch.setattr(argparse.ArgumentParser, "parse_args", read)
        with pytest.raises(ReadAll):
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")


@pytest.mark.usefixtures("_own_method")
@pytest.mark.parametrize("needed", [False, True], ids=["run here", "with a title"])
def test_every_command_is_one_that_there_is(needed: bool, monkeypatch: pytest.MonkeyPatch):
    seen = set()
    for block, (program, *words) in all_commands(not needed):
        told = f"{block.page}: {program} {' '.join(words)}"
        if tuple(words) in seen:
            continue
        seen.add(tuple(words))
        if program == "kvfold":
            name, command, rest = find([word for word in words if not word.startswith("[") and "…" not in word])
            context = command.make_context(name, [word for word in rest if "]" not in word])
            (recipes,) = [context.params[each.name] for each in command.params if "--recipe" in each.opts] or [None]
            for recipe in [recipes] if isinstance(recipes, str) else recipes or ():
                parse(recipe)
        elif program == "python" and words[0].endswith(".py"):
            parsed_by_script(words, monkeypatch)
        elif program == "make":
            assert words[0] in TARGETS, told
        elif program == "pip":
            assert words[0] == "install", told
            ours = [each for each in map(Requirement, words[1:]) if each.name == "kvfold"]
            assert ours, told
            assert all(each.extras <= EXTRAS.keys() for each in ours), told
        elif program.startswith(".venv/bin/"):
            assert (ROOT / program).exists(), told
        else:
            assert block.needs, f"{told} is neither run nor marked"
            assert program in SERVERS or words[:2] == ["-m", "sglang.launch_server"], told
    assert seen


def test_commands_inside_sentences_are_some_that_there_are():
    """They may be parts of commands, so only their names and options are looked up."""
    found = 0
    for page in documents():
        for text in re.findall(r"(?<!`)`kvfold (?!bench`|bench [A-Z])([a-z][^`]*)`", FENCE.sub("", page.read_text())):
            name, command, rest = find(text.split())
            options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
            given = {word.partition("=")[0] for word in rest if word.startswith("-") and name != "serve"}
            assert given - {"-"} <= options, f"{page.name}: kvfold {text}"
            found += 1
    assert found > 100


def here(block: Block) -> list[list[str]]:
    """The commands of a block that are run."""
    found = [] if block.needs else [words for words in commands(block) if words[0] in ("kvfold", "python")]
    return [words for words in found if words[:2] != ["kvfold", "serve"]]


PAGES = sorted({block.page for block in BLOCKS if here(block)})


@pytest.mark.usefixtures("_own_method")
@pytest.mark.parametrize("page", PAGES)
def test_every_command_runs(page: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In the order of the page, and in a folder of its own."""
    for folder in ("benchmarks", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("kvfold.calibration.automatic.TOKENS", {"cpu": 256})
    for block in BLOCKS:
        for program, *told in here(block) if block.page == page else []:
            words = [str(small) if word == "embedded" else word for word in told]
            if program == "kvfold":
                run(*words, *LESS.get(find(words)[0], ()))
            else:
                monkeypatch.setattr(sys, "argv", [os.fspath(ROOT / words[0]), *words[1:]])
                runpy.run_path(str(ROOT / words[0]), run_name="__main__")


def test_every_python_block_runs(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Those of the page on transformers, one after the other. Other pages show parts of a program."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("kvfold.calibration.automatic.TOKENS", {"cpu": 256})
    run("calibrate", small, "-r", "oscar-int2", "--out", "fits", *LESS["calibrate"])
    names: dict[str, object] = {}
    texts = [block.text for block in blocks("python") if block.page == "docs/transformers.md"]
    assert len(texts) == 2
    for text in texts:
        exec(text.replace('"embedded"', repr(str(small))), names)  # as a reader would type it
    assert names["cache"].allocated_bytes >= 0
