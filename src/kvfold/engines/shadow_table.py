"""16-bit shadow pages for engines: which pages of their pool have one, decided on the device.

Engines describe a step in device memory, and may schedule the next one before this one has run, so nothing here waits
for the device or depends on what is in a tensor: an update can be captured in a CUDA graph.
"""

import torch
from torch import Tensor

from kvfold.windows import Windows


class ShadowTable:
    """page -> shadow page, keyed by the physical page, so that requests that share pages share their shadows.

    A page gets a shadow in the first step in which a window of some request reaches into it: the one that windows
    needed longest ago. If the page holds older tokens then, as it does when a request finds a prefix whose shadows are
    gone, the shadow is to be restored from it. A page that is written anew loses the shadow of its former contents.
    Requests that run and are not in a step keep theirs by `rest`, which an engine calls before each such step.

    In all tensors -1 addresses one entry more than there are pages or shadows. What is not to be written goes there.
    """

    def __init__(self, windows: Windows, page_size: int, pages: int, shadows: int, device: torch.device | str) -> None:
        self.windows, self.page_size = windows, page_size
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.of = torch.full((pages + 1,), -1, device=device)  # the shadow of each page, -1: none
        self.owner = torch.full((shadows + 1,), -1, device=device)  # the page of each shadow, -1: none
        self.needed = torch.zeros(shadows + 1, dtype=torch.int64, device=device)  # the last step that each was in use
        self._first = torch.zeros(pages + 1, dtype=torch.int64, device=device)  # where a page first comes in a list
        self._written = torch.zeros(pages + 1, dtype=torch.int64, device=device)  # the last step that began each page

    def update(self, slots: Tensor, starts: Tensor, lengths: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Begin a step that writes slots [tokens] (page · page_size + offset; negative: none) of requests which it
        takes from `starts` to `lengths` tokens, with pages `table` [requests, pages].

        Returns what is to be restored: pages, their shadows, and how many of these count, int32[1].
        """
        if table.is_cuda:
            return self._update_in_one_launch(slots, starts, lengths, table)
        self.step += 1
        fresh = torch.where(slots % self.page_size == 0, slots // self.page_size, -1)  # pages; each comes once
        former = self.of[fresh]
        self.owner.index_fill_(0, former, -1)
        self.needed.index_fill_(0, former, 0)
        self.of.index_fill_(0, fresh, -1)

        reached = self._windows(starts.long(), lengths.long(), table)
        self.needed[self.of[reached]] = self.step
        given = (reached >= 0) & (self.of[reached] < 0) & self._comes_first(reached)

        oldest = self.needed[:-1].argsort(stable=True)
        place = given.cumsum(0) - 1
        shadow = oldest[place.clamp(0, len(oldest) - 1)]
        given &= (place < len(oldest)) & (self.needed[shadow] < self.step)
        shadow, page = torch.where(given, shadow, -1), torch.where(given, reached, -1)
        self.of.index_fill_(0, self.owner[shadow], -1)
        self.of[page], self.owner[shadow], self.needed[shadow] = shadow, page, self.step
        self.of[-1:].fill_(-1)
        self.owner[-1:].fill_(-1)

        self._written[fresh] = self.step
        restored = given & (self._written[reached] != self.step)
        order = (~restored).byte().argsort(stable=True)
        return page[order], shadow[order], restored.sum(dtype=torch.int32).view(1)

    def rest(self, lengths: Tensor, table: Tensor) -> None:
        """Before a step without them: windows of requests with so many tokens need their shadows still."""
        self.step += 1
        self.needed[self.of[self._windows(lengths.long(), lengths.long(), table)]] = self.step

    def _update_in_one_launch(
        self, slots: Tensor, starts: Tensor, lengths: Tensor, table: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        from kvfold.engines.shadow_update import update

        state = (self.step, self.of, self.owner, self.needed, self._first, self._written)
        sink, recent = self.windows.sink, self.windows.recent
        columns = most_pages(sink, self.page_size), most_pages(recent - 1, self.page_size)
        return update(state, slots, starts, lengths, table, sink, recent, columns, self.page_size)

    @property
    def used(self) -> Tensor:
        """int64[]: how many shadows hold a page."""
        return (self.owner >= 0).sum()

    def _comes_first(self, pages: Tensor) -> Tensor:
        """bool[n]: which are not the same as one before."""
        number = torch.arange(len(pages), device=pages.device)
        pages = pages % len(self._first)
        self._first.index_fill_(0, pages, len(pages))
        self._first.scatter_reduce_(0, pages, number, "amin")
        return self._first[pages] == number

    def _windows(self, starts: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        """The pages that windows reach into before the step and after it, -1 for none."""
        parts = [self._span(torch.zeros_like(starts), lengths.clamp_max(self.windows.sink), self.windows.sink, table)]
        for ends in (starts, lengths):  # the next token reads `recent` tokens, of which it is one
            parts.append(self._span(ends + 1 - self.windows.recent, ends, self.windows.recent - 1, table))
        return torch.cat(parts, dim=1).flatten()

    def _span(self, first: Tensor, end: Tensor, tokens: int, table: Tensor) -> Tensor:
        """The pages of `tokens` tokens, at most, from `first` on and before `end`."""
        count = min(most_pages(tokens, self.page_size), table.shape[1])
        index = first.clamp_min(0).unsqueeze(1) // self.page_size + torch.arange(count, device=table.device)
        inside = index * self.page_size < end.unsqueeze(1)
        return torch.where(inside, table.gather(1, index.clamp_max(table.shape[1] - 1)).long(), -1)


def most_pages(tokens: int, page_size: int) -> int:
    """How many pages so many successive tokens can lie in."""
    return 0 if tokens <= 0 else 1 + -(-(tokens - 1) // page_size)


def shadows_needed(windows: Windows, page_size: int, requests: int, tokens: int) -> int:
    """How many shadows a step of so many tokens needs at once, at most, while so many requests run.

    Each request, be it in the step or not, reads the pages of its sink and of its recent window before the step. The
    step begins at most one page for each request and one for each `page_size` tokens, and a window reaches into no more
    of them than it has pages.
    """
    sink, recent = -(-windows.sink // page_size), most_pages(windows.recent - 1, page_size)
    begun = min(requests + tokens // page_size, requests * recent)
    return requests * (sink + recent) + begun
