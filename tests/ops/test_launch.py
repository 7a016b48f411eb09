"""Launches that do not ask Triton which compiled kernel is meant."""

from itertools import product
from typing import NamedTuple

import pytest
import torch
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

from kvfold.ops.launch import Launcher, kinds_of


class Pair(NamedTuple):
    first: object
    second: object


NUMBERS = torch.zeros(64, dtype=torch.float32)
TENSORS = [NUMBERS, NUMBERS[1:], NUMBERS[4:], NUMBERS[:0], NUMBERS.half(), NUMBERS.half()[3:], NUMBERS.bfloat16()]
INTEGERS = [0, 1, 2, 15, 16, 17, 32, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), 2**62, 2**40 + 1]
ARGUMENTS = [*TENSORS, *INTEGERS, 1.0, 0.5, None, True, Pair(NUMBERS, 1), Pair(NUMBERS[1:], 1), (NUMBERS, 2), ()]


def test_arguments_of_one_kind_are_alike_for_triton():
    """By Triton's own look at arguments, for all pairs."""
    backend = make_backend(GPUTarget("cuda", 90, 32))

    def seen(x):
        return native_specialize_impl(type(backend), x, False, True, True)

    alike = [(a, b) for a, b in product(ARGUMENTS, repeat=2) if kinds_of((a,)) == kinds_of((b,))]
    assert len(alike) > len(ARGUMENTS)  # not only arguments and themselves
    for a, b in alike:
        assert seen(a) == seen(b), (a, b)


class Kernel:
    """Notes how it is launched. `compiled`: as Triton does; its interpreter compiles nothing."""

    arg_names = ("x", "n", "SIZE", "NAME")

    def __init__(self, compiled: bool) -> None:
        self.compiled, self.launches = compiled, []

    def __getitem__(self, grid):
        def launch(*args, **named):
            self.launches.append(("triton", grid, args, named))
            return Compiled(self) if self.compiled else None

        return launch


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.launches, self.number = kernel.launches, len(kernel.launches)

    def __getitem__(self, grid):
        return lambda *args: self.launches.append((self.number, grid, args))


@pytest.mark.parametrize("compiled", [True, False])
def test_triton_is_asked_once_per_kind(compiled):
    kernel = Kernel(compiled)
    launch, grid = Launcher(kernel, NAME="b", num_warps=4, SIZE=8), (1, 2, 3)
    named = {"NAME": "b", "num_warps": 4, "SIZE": 8}
    aligned, shifted = NUMBERS, NUMBERS[1:]
    for x, n in ((aligned, 16), (aligned, 32), (shifted, 32), (aligned, 48), (shifted, 64), (aligned, 5)):
        launch(grid, x, n)
    found = kernel.launches
    # variant 1 is for aligned x and multiples of 16, variant 3 for shifted x and the same; arguments come in order
    expected = [
        ("triton", grid, (aligned, 16), named),
        (1, grid, (aligned, 32, 8, "b")),
        ("triton", grid, (shifted, 32), named),
        (1, grid, (aligned, 48, 8, "b")),
        (3, grid, (shifted, 64, 8, "b")),
        ("triton", grid, (aligned, 5), named),
    ]
    if not compiled:
        expected = [("triton", grid, launched[2][:2], named) for launched in expected]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one[:2] == other[:2]
        assert one[2][0] is other[2][0]
        assert (one[2][1:], one[3:]) == (other[2][1:], other[3:])
