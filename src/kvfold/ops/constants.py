"""Constants of kernels, which are globals of their modules."""

from typing import Any, Self

import triton.language as tl


class Constant(tl.constexpr):
    """A constant that nobody changes.

    At every launch, Triton compares all globals of a kernel with copies of them, to see whether they have changed. That
    takes the host about 2 µs per `tl.constexpr` (Triton 3.9), and `store` has 24. A Constant is its own copy, and
    compares at once.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __ne__(self, other: Any) -> Any:
        return False if other is self else super().__ne__(other)
