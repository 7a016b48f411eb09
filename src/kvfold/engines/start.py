"""What plugins need before they know whether kvfold is wanted.

If a plugin cannot be imported, an engine only logs it and serves in 16 bits. So plugins and this module import nothing
but the standard library.
"""

import os
from collections.abc import Callable
from functools import wraps
from textwrap import shorten
from typing import Any

RECIPE, ARTIFACT = "KVFOLD_RECIPE", "KVFOLD_ARTIFACT"  # environment variables
CAUSES = "KVFOLD_CAUSES"  # the file in which processes of an engine say why they failed, set by `kvfold serve`
LONGEST = 600  # characters of a cause: some of vLLM's name every tensor of the model


def aborting(function: Callable[..., Any]) -> Callable[..., Any]:
    """If `function` raises, end the process with one line."""

    @wraps(function)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except Exception as error:
            record(error)
            raise SystemExit(f"kvfold cannot serve this: {str(error).removeprefix('kvfold: ')}") from error

    return wrapped


def record(error: BaseException) -> None:
    """Tell `kvfold serve` why this process fails, in one line."""
    if file := os.environ.get(CAUSES):
        said = shorten(str(error), LONGEST, placeholder=" …")
        line = said.removeprefix("kvfold: ") if isinstance(error, ValueError) else f"{type(error).__name__}: {said}"
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(line + "\n")
