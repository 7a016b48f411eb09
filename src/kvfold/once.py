"""What depends on an object alone, and is made when somebody first asks for it."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Once:
    """For objects that do not change. Each has a `_memory` of its own."""

    _memory: dict[Any, Any]

    def once(self, make: Callable[..., T], *arguments: Hashable) -> T:
        """make(self, *arguments), computed once and kept."""
        key = (make, arguments)
        if key not in self._memory:
            self._memory[key] = make(self, *arguments)
        return self._memory[key]
