"""What plugins need before they know whether kvfold is wanted.

If a plugin cannot be imported, an engine only logs it and serves in 16 bits. So plugins and this module import nothing
but the standard library.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

RECIPE, ARTIFACT = "KVFOLD_RECIPE", "KVFOLD_ARTIFACT"  # environment variables


def aborting(function: Callable[..., Any]) -> Callable[..., Any]:
    """If `function` raises, end the process with one line."""

    @wraps(function)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except Exception as error:
            raise SystemExit(f"kvfold cannot serve this: {str(error).removeprefix('kvfold: ')}") from error

    return wrapped
