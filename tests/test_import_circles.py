"""No module of kvfold imports itself through others. Imports for type checkers and inside functions count too."""

import ast
from collections.abc import Iterator
from pathlib import Path

import kvfold

Graph = dict[str, set[str]]  # the modules that a module imports, by its name


def modules(root: Path) -> dict[str, Path]:
    """The modules below the folder of a package, by name. The package itself is its `__init__`."""
    files = {file.relative_to(root.parent).with_suffix(""): file for file in root.rglob("*.py")}
    return {".".join(path.parts).removesuffix(".__init__"): file for path, file in files.items()}


def imports(root: Path) -> Graph:
    """What the modules of a package import of each other, wherever the import stands.

    `from a import b` is an import of the module a.b if there is one, else of a. An import of a.b also runs a, the
    package around it: that is not counted, since a package may import its own modules.
    """
    found = modules(root)
    graph: Graph = {}
    for name, file in found.items():
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        graph[name] = {
            next(candidate for candidate in candidates if candidate in found)
            for candidates in named(ast.parse(file.read_text(encoding="utf-8")), package)
            if any(candidate in found for candidate in candidates)
        }
    return graph


def named(tree: ast.AST, package: str) -> Iterator[tuple[str, ...]]:
    """Per imported name the modules that it may be, the likeliest first."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name,) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((f"{base}.{alias.name}", base) for alias in node.names)


def circles(graph: Graph) -> list[str]:
    """The shortest circle through each module that lies on one, each circle once: "a → b → a"."""
    found: dict[frozenset[str], list[str]] = {}
    for start in sorted(graph):
        if path := way_back(graph, start):
            found.setdefault(frozenset(path), path)
    return [" → ".join(path) for path in found.values()]


def way_back(graph: Graph, start: str) -> list[str] | None:
    """The shortest way from a module to itself, breadth first."""
    paths, seen = [[start]], set()
    while paths:
        path = paths.pop(0)
        for module in sorted(graph[path[-1]]):
            if module == start:
                return [*path, start]
            if module not in seen:
                seen.add(module)
                paths.append([*path, module])
    return None


def test_no_module_imports_itself_through_others():
    found = circles(imports(Path(kvfold.__file__).parent))
    assert not found, "\n".join(found)


SOURCES = {
    "__init__": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from made.top import Top",
    "top": "import os.path\nfrom made import version, leaf\nimport made.room.inner as inner",
    "version": "number = 1",
    "leaf": "import numpy.version",
    # a circle of three, with each kind of relative import
    "room/__init__": "from .inner import thing",
    "room/inner": "from . import outer",
    "room/outer": "def late():\n    from ..upper import name",
    "upper": "from .room.inner import thing",
    # of two: a package and its module
    "typed/__init__": "from made.typed.user import User",
    "typed/user": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import made.typed",
    # a module that imports itself
    "own": "from made.own import *",
    # a package that imports its module, which imports another module of it: no circle
    "plain/__init__": "from made.plain.a import a",
    "plain/a": "from made.plain import b",
    "plain/b": "from made.plainly import c",
}
MADE = {
    "made": {"made.top"},
    "made.top": {"made.version", "made.leaf", "made.room.inner"},
    "made.version": set(),
    "made.leaf": set(),
    "made.room": {"made.room.inner"},
    "made.room.inner": {"made.room.outer"},
    "made.room.outer": {"made.upper"},
    "made.upper": {"made.room.inner"},
    "made.typed": {"made.typed.user"},
    "made.typed.user": {"made.typed"},
    "made.own": {"made.own"},
    "made.plain": {"made.plain.a"},
    "made.plain.a": {"made.plain.b"},
    "made.plain.b": set(),
}


def test_circles_of_a_made_up_package_are_found(tmp_path):
    for name, source in SOURCES.items():
        file = tmp_path / "made" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    assert imports(tmp_path / "made") == MADE
    assert circles(MADE) == [
        "made.own → made.own",
        "made.room.inner → made.room.outer → made.upper → made.room.inner",
        "made.typed → made.typed.user → made.typed",
    ]


def test_a_module_on_two_circles_shows_both_once():
    assert circles({"a": {"b", "c"}, "b": {"a"}, "c": {"d"}, "d": {"a"}}) == ["a → b → a", "c → d → a → c"]


def test_no_two_modules_have_one_name():
    names = [file.name for file in modules(Path(kvfold.__file__).parent).values() if file.name != "__init__.py"]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
