import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvfold.paged.tables import PageTables


class Tables(RuleBasedStateMachine):
    """PageTables against lists of tokens: every sequence finds its own tokens in its pages, whatever the others do."""

    @initialize(page_size=st.sampled_from((1, 2, 3, 4, 16)), sequences=st.integers(1, 4))
    def begin(self, page_size: int, sequences: int) -> None:
        self.tables = PageTables(page_size, sequences)
        self.tokens: list[list[int]] = [[] for _ in range(sequences)]
        self.memory: dict[int, dict[int, int]] = {}  # page -> offset -> token
        self.next_token = 0
        self.peak = 0

    def used(self) -> set[int]:
        return {page for pages in self.tables.pages for page in pages}

    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        count = st.one_of(st.integers(0, 3), st.integers(0, 3 * self.tables.page_size))
        self.step([data.draw(count) for _ in self.tokens])

    @rule(steps=st.integers(1, 3))
    def decode(self, steps: int) -> None:
        """Steps of one token, in which forks part."""
        for _ in range(steps):
            self.step([1] * len(self.tokens))

    def step(self, counts: list[int]) -> None:
        size = self.tables.page_size
        copies = self.tables.extend(counts)
        targets = [target for _, target in copies]
        assert len(set(targets)) == len(targets)
        assert not set(targets) & {source for source, _ in copies}, "the order of copies would matter"
        for source, target in copies:
            self.memory[target] = dict(self.memory[source])
        for row, count in enumerate(counts):
            for _ in range(count):
                position = len(self.tokens[row])
                page = self.tables.pages[row][position // size]
                self.memory.setdefault(page, {})[position % size] = self.next_token
                self.tokens[row].append(self.next_token)
                self.next_token += 1
        self.peak = max(self.peak, len(self.used()))

    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        counts = [data.draw(st.integers(0, len(tokens))) for tokens in self.tokens]
        self.tables.crop(counts)
        self.tokens = [tokens[: len(tokens) - count] for tokens, count in zip(self.tokens, counts, strict=True)]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, len(self.tokens) - 1), min_size=1, max_size=6))
        self.tables.select(rows)
        self.tokens = [list(self.tokens[row]) for row in rows]

    @rule(extra=st.sampled_from(((), (1,), (0, 0))), bad=st.sampled_from((-1, -5)))
    def refuse(self, extra: tuple[int, ...], bad: int) -> None:
        """Wrong counts change nothing."""
        sequences = len(self.tokens)
        wrong = [[1] * (sequences - 1) + [bad], [1] * sequences + list(extra or (1,)), [1] * (sequences - 1)]
        before = self.snapshot()
        for counts in wrong:
            with pytest.raises(ValueError, match="do not fit"):
                self.tables.extend(counts)
        assert self.snapshot() == before

    def snapshot(self) -> tuple:
        tables = self.tables
        return ([list(p) for p in tables.pages], list(tables.lengths), list(tables.references), list(tables.free))

    @invariant()
    def every_sequence_finds_its_tokens(self) -> None:
        size = self.tables.page_size
        assert self.tables.lengths == [len(tokens) for tokens in self.tokens]
        assert len(self.tables.pages) == len(self.tokens)
        for pages, tokens in zip(self.tables.pages, self.tokens, strict=True):
            assert len(pages) == -(-len(tokens) // size)
            assert len(set(pages)) == len(pages)
            assert [self.memory[pages[i // size]][i % size] for i in range(len(tokens))] == tokens

    @invariant()
    def every_page_is_free_or_counted(self) -> None:
        tables = self.tables
        held = [page for pages in tables.pages for page in pages]
        assert tables.references == [held.count(page) for page in range(tables.capacity)]
        assert len(set(tables.free)) == len(tables.free)
        assert not set(tables.free) & set(held)
        assert set(tables.free) | set(held) == set(range(tables.capacity))
        assert tables.capacity == self.peak, "more pages than were ever needed at once"

    def teardown(self) -> None:
        if hasattr(self, "tables"):
            self.tables.crop([len(tokens) for tokens in self.tokens])
            assert self.tables.lengths == [0] * len(self.tokens)
            assert not any(self.tables.pages)
            assert sorted(self.tables.free) == list(range(self.tables.capacity))
            assert not any(self.tables.references)


TestTables = Tables.TestCase
TestTables.settings = settings(deadline=None, derandomize=True, max_examples=150, stateful_step_count=30)


def test_a_fork_copies_only_the_page_it_writes_into():
    tables = PageTables(4, 1)
    assert tables.extend([10]) == []
    assert tables.pages == [[0, 1, 2]]
    tables.select([0, 0, 0])
    assert tables.references == [3, 3, 3]
    # the last holder of a page may keep it
    assert tables.extend([1, 0, 1]) == [(2, 3), (2, 4)]
    assert tables.pages == [[0, 1, 3], [0, 1, 2], [0, 1, 4]]
    assert tables.extend([0, 1, 0]) == []
    assert tables.references == [3, 3, 1, 1, 1]


def test_a_fork_at_the_end_of_a_page_copies_nothing():
    tables = PageTables(4, 1)
    tables.extend([8])
    tables.select([0, 0])
    assert tables.extend([1, 1]) == []
    assert [pages[:2] for pages in tables.pages] == [[0, 1], [0, 1]]
    assert tables.pages[0][2] != tables.pages[1][2]


def test_a_cropped_fork_copies_before_it_writes_over_the_others_tokens():
    tables = PageTables(4, 1)
    tables.extend([8])
    tables.select([0, 0])
    tables.crop([0, 2])
    assert tables.extend([0, 1]) == [(1, 2)]
    assert tables.pages == [[0, 1], [0, 2]]


def test_pages_are_used_again():
    tables = PageTables(16, 2)
    for _ in range(50):
        tables.extend([100, 33])
        tables.crop([100, 33])
    assert tables.capacity == 7 + 3


def test_a_batch_without_sequences():
    tables = PageTables(16, 2)
    tables.extend([5, 20])
    tables.select([])
    assert tables.lengths == []
    assert sorted(tables.free) == [0, 1, 2]
    assert tables.extend([]) == []


def test_selecting_a_row_that_is_not_there_changes_nothing():
    tables = PageTables(4, 2)
    tables.extend([5, 6])
    with pytest.raises(IndexError):
        tables.select([0, 2])
    assert tables.pages == [[0, 1], [2, 3]]
    assert tables.lengths == [5, 6]
    assert tables.references == [1, 1, 1, 1]
