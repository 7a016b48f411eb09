"""What the plugins need before they know whether kvfold is wanted.

Engines log it when a plugin cannot be imported, and serve in 16 bits. So the plugins and this module import nothing
beside the standard library.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

RECIPE, ARTIFACT = "KVFOLD_RECIPE", "KVFOLD_ARTIFACT"  # environment variables


def aborting(function: Callable[..., Any]) -> Callable[..., Any]:
    """End the process with one line where `function` raises."""

    @wraps(function)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except Exception as error:
            raise SystemExit(f"kvfold cannot serve this: {str(error).removeprefix('kvfold: ')}") from error

    return wrapped
