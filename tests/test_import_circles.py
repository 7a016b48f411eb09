"""No module of kvfold imports itself through others. Imports for type checkers and inside functions count too."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import kvfold

ROOT = Path(kvfold.__file__).parent
MODULES = {
    ".".join(file.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): file
    for file in ROOT.rglob("*.py")
}


def imported(file: Path) -> set[str]:
    """`from a import b` is an import of the module a.b if there is one, else of a."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= whole & MODULES.keys() or {node.module}
    return found & MODULES.keys()


def test_no_module_imports_itself_through_others():
    TopologicalSorter({name: imported(file) for name, file in MODULES.items()}).prepare()  # a circle raises CycleError
