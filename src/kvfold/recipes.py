"""The named recipes."""

import difflib

from kvfold.methods.integers import Integers
from kvfold.methods.quarot import QuaRot
from kvfold.methods.saw import Saw
from kvfold.methods.sixteen_bit import SixteenBit
from kvfold.recipe import Recipe

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        SixteenBit(name="bf16", summary="16-bit floats in pages: what the others are measured against"),
        Integers(name="int8", bits=8, summary="token-wise 8-bit integers"),
        Integers(name="int4", bits=4, summary="token-wise 4-bit integers"),
        Integers(name="int2", bits=2, summary="token-wise 2-bit integers"),
        Saw(name="saw-int4", bits=4, summary="SAW-INT4: block-diagonal Hadamard rotation of keys, 4-bit integers"),
        QuaRot(name="quarot-int2", bits=2, summary="QuaRot: Hadamard rotation of keys and values, 2-bit integers"),
    )
}


def parse(text: str) -> Recipe:
    """A recipe from its name and options: `saw-int4:order=64,sink=4`."""
    name, _, options = text.partition(":")
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown recipe {name!r}: {hint}there are {', '.join(RECIPES)}")
    pairs = [tuple(map(str.strip, option.partition("="))) for option in options.split(",") if option.strip()]
    if bad := [option for option, equals, _ in pairs if not equals]:
        raise ValueError(f"{text!r}: write options as name=value, not {bad[0]!r}")
    names = [option for option, _, _ in pairs]
    if twice := [option for option in names if names.count(option) > 1]:
        raise ValueError(f"{text!r}: option {twice[0]!r} is given twice")
    return RECIPES[name].with_options({option: value for option, _, value in pairs})
