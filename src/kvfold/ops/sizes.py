"""Sizes of launches. Triton's own functions for them, which kernels can call too, take the host 4 µs a call: of a layer
with a short prompt, a seventh of all it does."""


def ceil_div(n: int, by: int) -> int:
    return -(-n // by)


def power_of_two(n: int) -> int:
    """The one from `n` up."""
    return 1 << max(0, n - 1).bit_length()
