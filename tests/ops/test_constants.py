"""Constants of kernels: to kernels they are what `tl.constexpr` is."""

from copy import deepcopy

import pytest
import triton.language as tl

from kvfold.ops.constants import Constant


@pytest.mark.parametrize("value", [3, -1e30, True, (1, 2)])
def test_a_constant_compares_as_constexpr(value):
    constant = Constant(value)
    assert deepcopy(constant) is constant
    assert not constant != constant  # noqa: SIM202
    for other in (value, 5, tl.constexpr(value), Constant(value), tl.constexpr(5)):
        plain = tl.constexpr(value) != other
        assert bool(constant != other) == bool(plain) == (getattr(other, "value", other) != value)
        assert bool(constant == other) != bool(plain)
