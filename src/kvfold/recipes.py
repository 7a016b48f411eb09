"""The named recipes."""

import difflib
import hashlib
import inspect
import os
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from kvfold.methods.block_gtq import BlockGtq
from kvfold.methods.fold import Fold
from kvfold.methods.hessian import Hessian
from kvfold.methods.integers import Integers
from kvfold.methods.kitty import Kitty
from kvfold.methods.kivi import Kivi
from kvfold.methods.kmeans_residuals import KMeans, KMeansSaw
from kvfold.methods.oscar import Oscar
from kvfold.methods.quarot import QuaRot
from kvfold.methods.saw import Saw
from kvfold.methods.sixteen_bit import SixteenBit
from kvfold.methods.turboquant import TurboQuant
from kvfold.recipe import LONGEST, Recipe

TUNED = Fold(name="fold", summary="kvfold's own, with widths that `kvfold tune` chose per layer")
CODEBOOKS = re.compile(r"(tq|gtq)-k(\d+)v(\d+)")  # any two bit widths; RECIPES lists a few
WIDTHS = range(1, 9)
BAD_EXAMPLE = "int2"  # there to show what 2 bits cost if nothing is done about it
METHODS = "KVFOLD_METHODS"  # an environment variable: files with methods of the user, separated as paths are
NAME = re.compile(r"[a-z][a-z0-9._-]*")  # of a recipe: it becomes part of file names and of tensors' names


def _codebooks(family: str, key_bits: int, value_bits: int) -> Recipe:
    method, summary = {
        "tq": (TurboQuant, f"TurboQuant: random rotation, a norm, {key_bits}- and {value_bits}-bit codes"),
        "gtq": (
            BlockGtq,
            f"Block-GTQ: TurboQuant with more bits for strong RoPE blocks, {key_bits} on average for keys",
        ),
    }[family]
    name = f"{family}-k{key_bits}v{value_bits}"
    return method(name=name, key_bits=key_bits, value_bits=value_bits, summary=summary)


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        SixteenBit(name="bf16", summary="16-bit floats in pages: what the others are measured against"),
        Fold(
            name="fold4",
            key=(8, 4, 4, 2),
            value=(4, 4, 4, 4),
            summary="kvfold's own: evenly spaced levels, more bits for coordinates that matter more; 4 bits",
        ),
        Fold(name="fold3", key=(4, 4, 2, 2), value=(4, 4, 2, 2), block=128, summary="kvfold's own, 3 bits"),
        Fold(name="fold2", key=(4, 4, 1, 1), value=(2, 2, 2, 2), block=128, summary="kvfold's own, 2 bits"),
        Integers(name="int8", bits=8, summary="token-wise 8-bit integers"),
        Integers(name="int4", bits=4, summary="token-wise 4-bit integers"),
        Integers(name="int2", bits=2, summary="token-wise 2-bit integers: a bad example"),
        Saw(name="saw-int4", bits=4, summary="SAW-INT4: block-diagonal Hadamard rotation of keys, 4-bit integers"),
        KMeans(name="kmeans-int4", bits=4, summary="4-bit integers of what the nearest centroid leaves"),
        KMeansSaw(name="kmeans-saw-int4", bits=4, summary="the same after SAW-INT4's rotation of keys"),
        Hessian(name="hessian-int4", bits=4, summary="keys turned by a Hadamard matrix and the queries' eigenvectors"),
        QuaRot(name="quarot-int2", bits=2, summary="QuaRot: Hadamard rotation of keys and values, 2-bit integers"),
        Oscar(name="oscar-int2", bits=2, summary="OSCAR: rotations from what attention sees, clipped 2-bit integers"),
        Kivi(name="kivi-2", bits=2, summary="KIVI: 2-bit keys by channel over pages of 32 tokens, values by token"),
        Kivi(name="kivi-4", bits=4, summary="KIVI with 4 bits"),
        Kitty(name="kitty-2", bits=2, summary="Kitty: 2-bit keys by channel over pages of 128, some channels 4 bits"),
        *(_codebooks(family, k, v) for family in ("tq", "gtq") for k, v in ((2, 2), (3, 3), (4, 4))),
    )
}

OURS = frozenset({*RECIPES, TUNED.name})


def add(recipe: Recipe) -> None:
    """Make a recipe known by its name, wherever recipes are named. A name of kvfold's own is refused. One that was
    added before is replaced."""
    if recipe.name in OURS or CODEBOOKS.fullmatch(recipe.name):
        raise ValueError(f"kvfold has a recipe {recipe.name!r} itself: take another name")
    if not NAME.fullmatch(recipe.name):
        raise ValueError(f"{recipe.name!r} is no name of a recipe: take small letters, digits, dots and hyphens")
    RECIPES[recipe.name] = recipe


def load_methods() -> None:
    """Run the files that KVFOLD_METHODS names, each once. They call `add`."""
    for file in filter(None, os.environ.get(METHODS, "").split(os.pathsep)):
        path = Path(file).expanduser().resolve()
        name = f"kvfold_methods_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        if name in sys.modules:
            continue
        if path.suffix != ".py" or not path.is_file():
            raise FileNotFoundError(f"{METHODS} names {file!r}, which is no Python file: correct it or unset it")
        spec = spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise


def method_source(recipe: Recipe) -> str:
    """The file of a recipe's method. If it changes, what was fitted or packed before may not fit."""
    return Path(inspect.getfile(type(recipe))).read_text()


def parse(text: str) -> Recipe:
    """A recipe from its name and options: `saw-int4:order=64,block=64`."""
    if len(text) > LONGEST:
        raise ValueError(f"a recipe has at most {LONGEST:,} characters, and this one {len(text):,}")
    load_methods()
    name, _, options = text.partition(":")
    if codebooks := CODEBOOKS.fullmatch(name):
        key_bits, value_bits = int(codebooks[2]), int(codebooks[3])
        if key_bits not in WIDTHS or value_bits not in WIDTHS:
            raise ValueError(f"{name}: keys and values take 1 to 8 bits, not {key_bits} and {value_bits}")
        recipe = _codebooks(codebooks[1], key_bits, value_bits)
    elif name in RECIPES:
        recipe = RECIPES[name]
    elif name == TUNED.name:
        recipe = TUNED
    else:
        close = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(
            f"unknown recipe {name!r}: {hint}`kvfold recipes` lists them, and there are tq-kXvY and gtq-kXvY with "
            "widths from 1 to 8"
        )
    pairs = [tuple(map(str.strip, option.partition("="))) for option in options.split(",") if option.strip()]
    if bad := [option for option, equals, _ in pairs if not equals]:
        raise ValueError(f"{text!r}: write options as name=value, not {bad[0]!r}")
    values: dict[str, str] = {}
    for option, _, value in pairs:
        if option in values:
            raise ValueError(f"{text!r}: option {option!r} is given twice")
        values[option] = value
    return recipe.with_options(values)
