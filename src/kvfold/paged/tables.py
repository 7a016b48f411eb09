"""Which pages each sequence holds: host-side bookkeeping, no tensors."""

from collections.abc import Sequence


class PageTables:
    """Page lists and lengths of a batch of sequences over one pool of reference-counted pages.

    Sequences may share pages (`select` with a repeated row forks). Only a sequence that holds a page alone writes it.
    A sequence that would write a shared, partly filled page gets a page of its own. `extend` says what to copy.
    """

    def __init__(self, page_size: int, sequences: int = 0) -> None:
        self.page_size = page_size
        self.pages: list[list[int]] = [[] for _ in range(sequences)]
        self.lengths: list[int] = [0] * sequences
        self.references: list[int] = []  # per page
        self.free: list[int] = []

    @property
    def capacity(self) -> int:
        """Pages that exist, in use or free."""
        return len(self.references)

    def extend(self, counts: Sequence[int]) -> list[tuple[int, int]]:
        """Make room for `counts[i]` more tokens in sequence i. Returns the pages to copy first: (source, target)."""
        if len(counts) != len(self.pages) or any(count < 0 for count in counts):
            raise ValueError(f"counts {list(counts)} do not fit {len(self.pages)} sequences")
        copies = []
        for row, count in enumerate(counts):
            pages, length = self.pages[row], self.lengths[row]
            if count and length % self.page_size and self.references[pages[-1]] > 1:
                source, pages[-1] = pages[-1], self._take()
                self._drop(source)
                copies.append((source, pages[-1]))
            self.lengths[row] += count
            while len(pages) * self.page_size < self.lengths[row]:
                pages.append(self._take())
        return copies

    def crop(self, counts: Sequence[int]) -> None:
        """Forget the last `counts[i]` tokens of sequence i."""
        for row, count in enumerate(counts):
            self.lengths[row] -= count
            while (len(self.pages[row]) - 1) * self.page_size >= self.lengths[row] and self.pages[row]:
                self._drop(self.pages[row].pop())

    def select(self, rows: Sequence[int]) -> None:
        """Make the batch the sequences `rows` of the old one: reorder, drop, or fork if a row is named twice."""
        old, self.pages = self.pages, [list(self.pages[row]) for row in rows]
        self.lengths = [self.lengths[row] for row in rows]
        for page in (page for pages in self.pages for page in pages):
            self.references[page] += 1
        for page in (page for pages in old for page in pages):
            self._drop(page)

    def _take(self) -> int:
        if not self.free:
            self.free.append(len(self.references))
            self.references.append(0)
        page = self.free.pop()
        self.references[page] = 1
        return page

    def _drop(self, page: int) -> None:
        self.references[page] -= 1
        if not self.references[page]:
            self.free.append(page)
