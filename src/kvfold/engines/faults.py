"""Tokens whose keys or values could not be stored: counted on the device, reported in the log."""

from logging import Logger
from time import monotonic

import torch
from torch import Tensor

QUIET = 60.0  # seconds between two warnings


class Late:
    """Reads a number from the device without waiting. A read starts a copy and returns what an earlier copy brought."""

    def __init__(self, device: torch.device) -> None:
        self._seen = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")

    def read(self, number: Tensor) -> int:
        seen = int(self._seen)
        self._seen.copy_(number, non_blocking=True)
        return seen


class Faults:
    """Counts tokens that could not be stored. `store` marks their locations and stores zeros.

    A token counts once, even if several layers or KV heads mark it. Counting clears the marks. It happens every few
    steps, long before a location gets another token.
    """

    def __init__(self, locations: int, device: torch.device) -> None:
        self.marks = torch.zeros(locations, dtype=torch.uint8, device=device)
        self._counted = torch.zeros(1, dtype=torch.int64, device=device)
        self._seen = Late(device)

    def count(self) -> int:
        """The count as of an earlier call."""
        self._counted += self.marks.sum()
        self.marks.zero_()
        return self._seen.read(self._counted)


class FaultLog:
    """Says in the log how many tokens could not be stored, at most once a minute."""

    def __init__(self, logger: Logger) -> None:
        self.logger = logger
        self._told, self._quiet_until = 0, 0.0

    def tell(self, count: int) -> None:
        if count <= self._told or monotonic() < self._quiet_until:
            return
        self.logger.warning(
            "kvfold: keys or values of %d tokens held NaN, Inf or numbers beyond the range of 16-bit floats; zeros "
            "are stored in their place. Only the requests of these tokens see it. Check the model's weights, and "
            "its dtype: float16 overflows where bfloat16 does not",
            count - self._told,
        )
        self._told, self._quiet_until = count, monotonic() + QUIET
