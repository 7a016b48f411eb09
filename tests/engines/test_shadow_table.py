"""The shadow table against a model of it in plain Python: dictionaries, one page after the other."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.engines.shadow_table import ShadowTable
from kvfold.engines.window_memory import shadows_needed
from kvfold.format.windows import Windows


class Model:
    """What ShadowTable says it does: page -> shadow, and the last step at which windows needed it."""

    def __init__(self, windows, page_size, shadows):
        self.windows, self.page_size, self.shadows = windows, page_size, shadows
        self.step, self.of, self.needed = 0, {}, {}

    def update(self, requests):
        """Requests are (start, length, pages)."""
        self.step += 1
        fresh, reached = [], {}
        for start, length, pages in requests:
            fresh += [pages[token // self.page_size] for token in range(start, length) if token % self.page_size == 0]
            tokens = [*range(min(self.windows.sink, length))]
            for position in (start, length):  # the next query before the step, and after it
                tokens += range(max(0, position + 1 - self.windows.recent), position)
            reached |= dict.fromkeys(pages[token // self.page_size] for token in tokens)
        for page in fresh:
            self.of.pop(page, None)
        for page in reached.keys() & self.of.keys():
            self.needed[self.of[page]] = self.step
        self.restored = {}
        for page in reached:
            if page not in self.of and self.give(page) and page not in fresh:
                self.restored[page] = self.of[page]

    def rest(self, requests):
        """Requests are (least, most, pages)."""
        self.step += 1
        for least, most, pages in requests:
            tokens = [*range(min(self.windows.sink, most))]
            for length in (least, most):
                tokens += range(max(0, length + 1 - self.windows.recent), length)
            for page in {pages[token // self.page_size] for token in tokens} & self.of.keys():
                self.needed[self.of[page]] = self.step

    def forget(self, pages):
        for page in pages:
            self.of.pop(page, None)

    def give(self, page):
        owners = {shadow: owner for owner, shadow in self.of.items()}
        free = [shadow for shadow in range(self.shadows) if shadow not in owners]
        old = sorted(
            (shadow for shadow in owners if self.needed[shadow] < self.step), key=lambda x: (self.needed[x], x)
        )
        if free or old:
            shadow = (free + old)[0]
            self.of.pop(owners.get(shadow), None)
            self.of[page], self.needed[shadow] = shadow, self.step
        return bool(free or old)


@dataclass(eq=False)
class Request:
    length: int
    pages: list[int]
    last: tuple[int, int]  # the least and the most tokens that it may have after its last step, as a worker is told

    @property
    def told(self):
        return *self.last, list(self.pages)


class Pages:
    """An engine's scheduler: requests come, grow, sit steps out, share full pages of a prefix, and go. Of a step with
    few tokens, some may be taken back. The pages of one that has gone can be found again as a prefix until they are
    given to another."""

    def __init__(self, draw, page_size, pool, most_requests, most_tokens):
        self.draw, self.page_size, self.free = draw, page_size, list(range(pool))
        self.most_requests, self.most_tokens = most_requests, most_tokens
        self.requests, self.pauses = [], []  # and how many steps each will sit out
        self.gone = []  # full pages of those that have gone, and how often each had been given away
        self.held, self.given = [0] * pool, [0] * pool

    def step(self):
        """(start, length, pages) of every request in the step, after some have gone and others have come."""
        for number in reversed(range(len(self.requests))):
            if self.draw(st.integers(0, 9)) == 0:
                request = self.requests.pop(number)
                self.pauses.pop(number)
                full = self.full(request)
                self.gone.append((full, [self.given[page] for page in full]))
                for page in request.pages:
                    self.drop(page)
        tokens, batch, self.resting = self.most_tokens, [], []
        for number, request in enumerate(self.requests):
            if self.pauses[number] or tokens == 0:
                self.pauses[number] = max(0, self.pauses[number] - 1)
                self.resting.append(request)
                continue
            most = self.draw(st.sampled_from((1, 1, 3, 24)))  # a token, a token and drafts, or a chunk of a prompt
            count = self.draw(st.integers(1, min(most, tokens)))
            drafts = count - 1 if most == 3 and count <= self.page_size else 0
            if self.grow(request, count, batch, drafts):
                tokens -= count
                self.pauses[number] = self.draw(st.sampled_from((0, 0, 0, 1, 9)))
            else:
                self.resting.append(request)
        while len(self.requests) < self.most_requests and tokens > 0 and self.draw(st.booleans()):
            pages = self.prefix() if self.draw(st.booleans()) else []
            length = len(pages) * self.page_size
            request = Request(length, pages, (length, length))
            tokens -= (count := self.draw(st.integers(1, tokens)))
            if self.grow(request, count, batch):
                self.requests.append(request)
                self.pauses.append(self.draw(st.sampled_from((0, 0, 9))))
            else:
                for page in pages:
                    self.drop(page)
        return batch

    def prefix(self):
        """Full pages of another request, which this one holds too."""
        running = [self.full(request) for request in self.requests]
        kept = [full for full, given in self.gone if given == [self.given[page] for page in full]]
        if not running + kept:
            return []
        pages = self.draw(st.sampled_from(running + kept))
        pages = pages[: self.draw(st.integers(0, len(pages)))]
        for page in pages:
            if not self.held[page]:
                self.free.remove(page)
            self.held[page] += 1
        return pages

    def full(self, request):
        return request.pages[: request.length // self.page_size]

    def grow(self, request, count, batch, drafts=0):
        """Whether there are pages for `count` more tokens, some of which may be drafts."""
        start, pages = request.length, request.pages
        wanted = -(-(start + count) // self.page_size) - len(pages)
        if wanted > len(self.free):
            return False
        for _ in range(wanted):
            pages.append(self.free.pop(self.draw(st.integers(0, len(self.free) - 1))))
            self.held[pages[-1]] = 1
            self.given[pages[-1]] += 1
        most = start + count
        request.length, request.last = most - self.draw(st.integers(0, drafts)), (most - drafts, most)
        batch.append((start, most, list(pages)))
        return True

    def drop(self, page):
        self.held[page] -= 1
        if not self.held[page]:
            self.free.append(page)


def device_tensors(batch, page_size, pad):
    """A batch as engines describe it, with padding that means nothing."""
    width = max((len(pages) for _, _, pages in batch), default=0) + pad + 1
    table = torch.full((len(batch) + pad, width), 3, dtype=torch.int32)
    slots = []
    for row, (start, length, pages) in enumerate(batch):
        table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        slots += [pages[token // page_size] * page_size + token % page_size for token in range(start, length)]
    starts = torch.tensor([start for start, _, _ in batch] + [0] * pad, dtype=torch.int32)
    lengths = torch.tensor([length for _, length, _ in batch] + [0] * pad, dtype=torch.int32)
    return torch.tensor(slots + [-1] * pad, dtype=torch.int64), starts, lengths, table


@pytest.mark.parametrize("update", [ShadowTable.update, ShadowTable._update_in_one_launch])
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_it_does_what_the_model_does(update, data):
    windows = Windows(data.draw(st.integers(0, 10)), data.draw(st.integers(0, 14)))
    page_size, pool = data.draw(st.sampled_from((1, 2, 4, 8))), 24
    shadows = data.draw(st.integers(1, 12))  # fewer than are needed at times
    device = "cuda" if update is not ShadowTable.update and torch.cuda.is_available() else "cpu"
    table, model = ShadowTable(windows, page_size, pool, shadows, device), Model(windows, page_size, shadows)
    pages, restored = Pages(data.draw, page_size, pool, most_requests=4, most_tokens=40), 0
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()):
            resting = [request.told for request in pages.requests if data.draw(st.booleans())]
            _, *tensors = (tensor.to(device) for tensor in device_tensors(resting, page_size, 1))
            table.rest(*tensors)
            model.rest(resting)
        if batch := pages.step():
            loaded = data.draw(st.lists(st.integers(0, pool - 1), max_size=3))  # from elsewhere
            table.forget(torch.tensor(loaded, dtype=torch.int64, device=device))
            model.forget(loaded)
            padding = data.draw(st.integers(0, 2))
            tensors = [tensor.to(device) for tensor in device_tensors(batch, page_size, padding)]
            pages_, shadows_, count = update(table, *tensors)
            model.update(batch)
            assert dict(zip(pages_[:count].tolist(), shadows_[:count].tolist(), strict=True)) == model.restored
            restored += len(model.restored)
        found = {page: shadow for page, shadow in enumerate(table.of[:-1].tolist()) if shadow >= 0}
        assert found == model.of
        assert table.of[-1] == -1
        assert table.used == len(model.of)
        assert table.restored == restored


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_requests_that_run_never_lose_a_shadow(data):
    """Be they in the step or not, for however long, whoever comes, and whatever is taken back."""
    windows = Windows(data.draw(st.integers(0, 10)), data.draw(st.integers(0, 14)))
    page_size, requests = data.draw(st.sampled_from((1, 2, 4, 8))), data.draw(st.integers(1, 5))
    tokens = data.draw(st.sampled_from((8, 40)))
    shadows = shadows_needed(windows, page_size, requests, tokens)
    table = ShadowTable(windows, page_size, 64, max(1, shadows), "cpu")
    pages = Pages(data.draw, page_size, 64, requests, tokens)

    def window(length, position, held):
        """The pages that a query at `position` reads in 16 bits."""
        tokens = [*range(min(windows.sink, length)), *range(max(0, position + 1 - windows.recent), position)]
        return {held[token // page_size] for token in tokens}

    for _ in range(data.draw(st.integers(1, 20))):
        before = [(each, window(each.length, each.length, each.pages)) for each in pages.requests]
        batch = pages.step()
        kept = set().union(*(reads for request, reads in before if request in pages.requests))
        resting = [request.told for request in pages.resting]
        if resting:
            if data.draw(st.booleans()):  # an engine may tell of all that run
                resting += [(start, start, held) for start, _, held in batch]
            table.rest(*device_tensors(resting, page_size, 0)[1:])
        if batch:
            restored, _, count = table.update(*device_tensors(batch, page_size, 0))
            assert not kept & set(restored[:count].tolist())
        for each in pages.requests:
            assert all(table.of[page] >= 0 for page in window(each.length, each.length, each.pages))
        for start, length, held in batch:
            assert all(table.of[page] >= 0 for page in window(length, start, held))


def test_a_request_that_rests_keeps_what_it_needs_if_its_drafts_were_rejected():
    """While another goes through many pages. Its drafts began a page, and its window ends before that page."""
    windows, page_size = Windows(0, 3), 4
    table = ShadowTable(windows, page_size, 32, shadows_needed(windows, page_size, 2, 8), "cpu")
    rests = (4, 6, [0, 1])  # token 3 and two drafts were its last step
    table.update(*device_tensors([(0, 3, [0])], page_size, 0))
    table.update(*device_tensors([(3, 6, [0, 1])], page_size, 0))
    before, pages = table.of[0].item(), list(range(2, 32))
    for start in range(0, 100, 4):
        table.rest(*device_tensors([rests], page_size, 0)[1:])
        table.update(*device_tensors([(start, start + 4, pages)], page_size, 0))
    assert table.of[0] == before >= 0
    _, _, count = table.update(*device_tensors([(4, 6, [0, 1])], page_size, 0))
    assert count == 0, "nothing is restored"
