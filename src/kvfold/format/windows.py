"""Which tokens a query reads raw."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

FIRST_TOKENS = 4  # attention sinks: their keys are unlike all others, so calibration leaves them out
ROLLBACK = 32  # tokens of a step that can be taken back without losing a shadow page (speculative decoding)

Position = TypeVar("Position", int, "Tensor")


@dataclass(frozen=True)
class Windows:
    """A query at position t reads tokens j < sink and j > t − recent raw, all others packed.

    If groups of tokens are quantized as a whole, a group that is not full at t is read raw too.
    """

    sink: int = 0
    recent: int = 0
    group: int = 1

    def __post_init__(self) -> None:
        if self.sink < 0 or self.recent < 0:
            raise ValueError(f"windows cannot be negative: sink={self.sink}, recent={self.recent}")

    def __bool__(self) -> bool:
        return self.sink > 0 or self.has_recent

    @property
    def has_recent(self) -> bool:
        """Whether the last tokens of a sequence are read raw."""
        return self.recent > 0 or self.group > 1

    def raw_from(self, position: Position) -> Position:
        """The first recent token that a query at `position` reads raw; position + 1: none."""
        full, recent = (position + 1) // self.group * self.group, position + 1 - self.recent
        return (full + recent - abs(full - recent)) // 2  # the smaller one

    def packed_from(self, token: int) -> int:
        """The first position whose query reads `token` packed, if the token lies behind the sink."""
        return max(token + self.recent, (token // self.group + 1) * self.group - 1)

    def before(self, length: int) -> range:
        """The recent tokens whose raw vectors the next token may need: to read them, or to fill their group."""
        return range(max(0, min(length + 1 - self.recent, length // self.group * self.group)), length)

    def spans(self, start: int, length: int) -> tuple[range, ...]:
        """The tokens to keep raw for a step from `start` to `length` tokens, for the step after it, and for taking back
        up to `ROLLBACK` of its tokens."""
        after = range(self.before(max(start, length - ROLLBACK)).start, length)
        return range(min(self.sink, length)), self.before(start), after if self.has_recent else range(0)

    def pages(self, start: int, length: int, page_size: int) -> set[int]:
        """The pages of a sequence that `spans` reaches into, by index."""
        return {
            page
            for span in self.spans(start, length)
            if span
            for page in range(span.start // page_size, (span.stop - 1) // page_size + 1)
        }
