"""Which tokens a query reads in 16 bits."""

from dataclasses import dataclass

ROLLBACK = 32  # tokens of a step that can be taken back with their 16-bit copies intact (speculative decoding)


@dataclass(frozen=True)
class Windows:
    """A query at position t reads tokens j < sink and j > t − recent in 16 bits, all others packed."""

    sink: int = 0
    recent: int = 0

    def __post_init__(self) -> None:
        if self.sink < 0 or self.recent < 0:
            raise ValueError(f"windows cannot be negative: sink={self.sink}, recent={self.recent}")

    def __bool__(self) -> bool:
        return self.sink > 0 or self.recent > 0

    def before(self, length: int) -> range:
        """The recent tokens that a query at position `length` finds already stored."""
        return range(max(0, length - self.recent + 1), length if self.recent else 0)

    def spans(self, start: int, length: int) -> tuple[range, ...]:
        """The tokens to keep in 16 bits for a step from `start` to `length` tokens, for what may follow it, and for
        taking back up to `ROLLBACK` tokens of it."""
        after = range(self.before(max(start, length - ROLLBACK)).start, length if self.recent else 0)
        return range(min(self.sink, length)), self.before(start), after

    def pages(self, start: int, length: int, page_size: int) -> set[int]:
        """Which pages of a sequence `spans` reaches into."""
        return {
            page
            for span in self.spans(start, length)
            if span
            for page in range(span.start // page_size, (span.stop - 1) // page_size + 1)
        }
