"""kvfold: the KV cache of language models, 3.6 to 6.8 times smaller, inside the engines people already serve with."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvfold.artifact import Artifact
    from kvfold.calibration import calibrate
    from kvfold.engines.transformers import cache
    from kvfold.recipe import Recipe
    from kvfold.recipes import parse
    from kvfold.version import __version__

__all__ = ["Artifact", "Recipe", "__version__", "cache", "calibrate", "parse"]

_HOMES = {
    "Artifact": "kvfold.artifact",
    "Recipe": "kvfold.recipe",
    "cache": "kvfold.engines.transformers",
    "calibrate": "kvfold.calibration",
    "parse": "kvfold.recipes",
    "__version__": "kvfold.version",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `import kvfold` alone loads neither torch nor transformers."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
