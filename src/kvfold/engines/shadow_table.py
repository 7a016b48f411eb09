"""Shadow pages for engines: which pages of the pool have one, decided on the device.

Engines describe a step in device memory. They may schedule the next step before this one has run. So nothing here waits
for the device, and an update can be captured in a CUDA graph.
"""

import torch
from torch import Tensor

from kvfold.engines.window_memory import most_pages
from kvfold.format.windows import Windows


class ShadowTable:
    """page -> shadow page. The key is the physical page, so requests that share pages share their shadows.

    - A page gets a shadow in the first step in which a window of some request reaches into it. It takes the shadow that
      windows needed longest ago.
    - If the page holds older tokens then, the shadow has to be restored from the page. This happens on a prefix hit
      whose shadows are gone.
    - A page that is written anew loses the shadow of its former contents. So does a page that comes from elsewhere, as
      from CPU memory: an engine says so by `forget`.
    - Running requests that sit a step out keep their shadows by `rest`. An engine calls it before the step.
    - The last tokens of a step may be taken back before the next one (speculative decoding). Shadows of the windows
      that end there are kept: at most as many tokens as a page has lie between the windows before and after the step.

    All tensors have a spare last entry, index -1. Writes that must have no effect go there.
    """

    def __init__(self, windows: Windows, page_size: int, pages: int, shadows: int, device: torch.device | str) -> None:
        self.windows, self.page_size = windows, page_size
        self.clock = torch.zeros((), dtype=torch.int64, device=device)
        self.of = torch.full((pages + 1,), -1, device=device)  # per page: its shadow, -1: none
        self.owner = torch.full((shadows + 1,), -1, device=device)  # per shadow: its page, -1: none
        self.needed = torch.zeros(shadows + 1, dtype=torch.int64, device=device)  # per shadow: last step in use
        self.restored = torch.zeros((), dtype=torch.int64, device=device)  # pages whose shadows had to be restored
        self._first = torch.zeros(pages + 1, dtype=torch.int64, device=device)  # per page: where a list first names it
        self._written = torch.zeros(pages + 1, dtype=torch.int64, device=device)  # per page: last step that began it

    def update(
        self, locations: Tensor, starts: Tensor, lengths: Tensor, table: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Begin a step. It writes to `locations` [tokens] (negative: none). It takes requests from `starts` to
        `lengths` tokens. Their pages are `table` [requests, pages].

        Returns what has to be restored: pages, their shadows, and how many of them count, int32[1].
        """
        if table.is_cuda:
            return self._update_in_one_launch(locations, starts, lengths, table)
        self.clock += 1
        begins = locations % self.page_size == 0
        fresh = torch.where(begins, locations // self.page_size, -1)  # pages that the step begins, each once
        self.forget(fresh)

        reached = self._windows(starts.long(), lengths.long(), table)
        self.needed[self.of[reached]] = self.clock
        given = (reached >= 0) & (self.of[reached] < 0) & self._comes_first(reached)

        oldest = self.needed[:-1].argsort(stable=True)
        place = given.cumsum(0) - 1
        shadow = oldest[place.clamp(0, len(oldest) - 1)]
        given &= (place < len(oldest)) & (self.needed[shadow] < self.clock)
        shadow, page = torch.where(given, shadow, -1), torch.where(given, reached, -1)
        self.of.index_fill_(0, self.owner[shadow], -1)
        self.of[page], self.owner[shadow], self.needed[shadow] = shadow, page, self.clock
        self.of[-1:].fill_(-1)
        self.owner[-1:].fill_(-1)

        self._written[fresh] = self.clock
        restored = given & (self._written[reached] != self.clock)
        count = restored.sum(dtype=torch.int32)
        self.restored += count
        order = (~restored).byte().argsort(stable=True)
        return page[order], shadow[order], count.view(1)

    def rest(self, least: Tensor, most: Tensor, table: Tensor) -> None:
        """Before a step without these requests: keep the shadows that their windows need. They have from `least` to
        `most` tokens: some of their last step may have been taken back."""
        self.clock += 1
        self.needed[self.of[self._windows(least.long(), most.long(), table)]] = self.clock

    def forget(self, pages: Tensor) -> None:
        """Before the step that first reads these pages: they get other contents, which the step does not write. Their
        shadows are restored when windows need them."""
        former = self.of[pages]
        self.owner.index_fill_(0, former, -1)
        self.needed.index_fill_(0, former, 0)
        self.of.index_fill_(0, pages, -1)

    def _update_in_one_launch(
        self, locations: Tensor, starts: Tensor, lengths: Tensor, table: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        from kvfold.engines.shadow_update import update

        state = (self.clock, self.of, self.owner, self.needed, self.restored, self._first, self._written)
        sink, recent = self.windows.sink, self.windows.recent
        columns = most_pages(sink, self.page_size), most_pages(recent - 1, self.page_size)
        return update(state, locations, starts, lengths, table, sink, recent, columns, self.page_size)

    @property
    def used(self) -> Tensor:
        """int64[]: how many shadows hold a page."""
        return (self.owner >= 0).sum()

    def _comes_first(self, pages: Tensor) -> Tensor:
        """bool[n]: which pages are not named earlier in the list."""
        number = torch.arange(len(pages), device=pages.device)
        pages = pages % len(self._first)
        self._first.index_fill_(0, pages, len(pages))
        self._first.scatter_reduce_(0, pages, number, "amin")
        return self._first[pages] == number

    def _windows(self, starts: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        """The pages that windows reach into before the step and after it, -1: none."""
        sink, recent = self.windows.sink, self.windows.recent
        # per request: the sink, and twice the tokens that the next token reads, itself not included
        first = torch.stack((torch.zeros_like(starts), starts + 1 - recent, lengths + 1 - recent), dim=1)
        end = torch.stack((lengths.clamp_max(sink), starts, lengths), dim=1).unsqueeze(2)
        first = first.clamp_min(0).unsqueeze(2)
        count = min(most_pages(max(sink, recent - 1), self.page_size), table.shape[1])
        index = first // self.page_size + torch.arange(count, device=table.device)
        inside = torch.maximum(index * self.page_size, first) < end
        pages = table.gather(1, index.clamp_max(table.shape[1] - 1).flatten(1)).long()
        return torch.where(inside, pages.view_as(index), -1).flatten()
