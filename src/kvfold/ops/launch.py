"""Launches that take the host little time."""

from functools import cache
from typing import Any

import torch
from torch import Tensor


class Launcher:
    """Launches a kernel whose last arguments never change.

    At every launch, Triton looks at the type and the alignment of all arguments, to find what it has compiled for them.
    That takes the host longer than the launch itself. A Launcher looks only at the arguments that change, and remembers
    what Triton found.
    """

    def __init__(self, kernel: Any, **fixed: Any) -> None:
        """`fixed`: the last arguments of the kernel, and options of its compilation, by name."""
        self.kernel, self.fixed = kernel, fixed
        self.last: list[Any] = []  # the arguments in `fixed`, in order
        self.compiled: dict[tuple[Any, ...], Any] = {}  # by the kinds of arguments

    def __call__(self, grid: tuple[int, int, int], *changing: Any) -> None:
        kinds = kinds_of(changing)
        if kinds in self.compiled:
            self.compiled[kinds][grid](*changing, *self.last)
            return
        compiled = self.kernel[grid](*changing, **self.fixed)
        if compiled is not None:  # Triton's interpreter compiles nothing
            self.last = [self.fixed[name] for name in self.kernel.arg_names[len(changing) :]]
            self.compiled[kinds] = compiled


@cache
def launcher(kernel: Any, device: torch.device, **fixed: Any) -> Launcher:
    """For a kernel whose `fixed` arguments are constants. What is compiled belongs to a device."""
    return Launcher(kernel, **fixed)


def kinds_of(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of the same kinds run the same code. Triton asks whether an integer is 1 or needs 64 bits, and whether
    integers and addresses are multiples of 16. Integers are plain ones, below 2^63."""
    kinds: list[Any] = []
    for x in arguments:
        kind = type(x)
        if kind is int:
            kinds.append((x == 1, x % 16 == 0, -(2**31) <= x < 2**31))
        elif kind is Tensor or isinstance(x, Tensor):  # the first is quicker
            kinds.append((x.dtype, x.data_ptr() % 16 == 0))
        else:
            kinds.append(kinds_of(x) if isinstance(x, tuple) else kind)
    return tuple(kinds)
