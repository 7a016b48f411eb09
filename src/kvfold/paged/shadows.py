"""Shadow pages: the raw vectors of pages that a window of some sequence reaches into."""

from collections.abc import Sequence

from kvfold.format.windows import ROLLBACK, Windows
from kvfold.paged.tables import PageTables


class Shadows:
    """page -> shadow page. The key is the physical page, so sequences that share pages share their shadows.

    A page gets a shadow when its first tokens arrive. It loses the shadow at the first `update` at which no window
    reaches into it. So tokens of the last step can be rolled back without loss.
    """

    def __init__(self, windows: Windows) -> None:
        self.windows = windows
        self.of: dict[int, int] = {}
        self.capacity = 0
        self.free: list[int] = []

    def update(self, tables: PageTables, starts: Sequence[int]) -> None:
        """Give and take back shadows, after `tables` grew from lengths `starts`."""
        wanted = {
            pages[index]
            for pages, start, length in zip(tables.pages, starts, tables.lengths, strict=True)
            for index in self.windows.pages(start, length, tables.page_size)
        }
        for page in self.of.keys() - wanted:
            self.free.append(self.of.pop(page))
        for page in sorted(wanted - self.of.keys()):
            self.of[page] = self._take()

    def copy(self, source: int, target: int) -> tuple[int, int] | None:
        """Give page `target` a shadow if page `source` has one. Returns the shadow pages to copy: (source, target)."""
        if source not in self.of:
            return None
        if target not in self.of:  # a page that was freed since the last update still has its shadow
            self.of[target] = self._take()
        return self.of[source], self.of[target]

    def check_crop(self, tables: PageTables, lengths: Sequence[int]) -> None:
        """Refuse to roll back to `lengths` if shadow pages that would be read again are gone."""
        for pages, length in zip(tables.pages, lengths, strict=True):
            if any(pages[token // tables.page_size] not in self.of for token in self.windows.before(length)):
                recent, group = self.windows.recent, self.windows.group
                reason, other = (
                    (f"recent={recent}", "recent=0")
                    if group == 1
                    else (f"recent={recent} and pages of {group} quantized as a whole", "recent=0 and no such pages")
                )
                raise ValueError(
                    f"cannot roll back to {length} tokens: with {reason} at most the last {ROLLBACK} tokens of the "
                    "last step can be removed, since older shadow pages are gone. Feed the prefix again, or use a "
                    f"recipe with {other}"
                )

    def _take(self) -> int:
        if not self.free:
            self.free.append(self.capacity)
            self.capacity += 1
        return self.free.pop()
