"""Sizes of launches. Triton's own functions, which kernels can call too, take 4 µs per call on the host: together a
seventh of the host's time for a layer with a short prompt."""


def ceil_div(n: int, by: int) -> int:
    return -(-n // by)


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below `n`."""
    return 1 << max(0, n - 1).bit_length()
