"""`Step` against plain Python: where each token lies, and what splitting, moving and filling make of that. Layers."""

import random
from dataclasses import dataclass, replace

import pytest
import torch

from kvfold.format.codec import Codec
from kvfold.format.layout import PageLayout, affine_slot
from kvfold.format.windows import Windows
from kvfold.ops.pages import HostLengths, LayerPages, Step, require_shadows


@dataclass(frozen=True)
class Sequence:
    pages: list[int]
    start: int
    length: int

    @property
    def count(self) -> int:
        return self.length - self.start

    def locations(self, page_size: int) -> list[int]:
        """Of its new tokens."""
        return [self.pages[j // page_size] * page_size + j % page_size for j in range(self.start, self.length)]


def drawn(seed: int) -> tuple[list[Sequence], Step]:
    """Sequences with pages of their own in random order, and tables with room for a few more pages."""
    rng = random.Random(seed)
    page_size, count = rng.choice((1, 3, 4, 16)), rng.randrange(7)
    lengths = [rng.randrange(1, 50) for _ in range(count)]
    needed = [-(-length // page_size) for length in lengths]
    free = rng.sample(range(sum(needed) + 5), sum(needed))
    sequences = []
    for length, pages in zip(lengths, needed, strict=True):
        start = rng.choice((length, length - 1, max(0, length - 2), rng.randrange(length + 1)))
        sequences.append(Sequence([free.pop() for _ in range(pages)], start, length))
    width = max(needed, default=0) + rng.randrange(3)
    return sequences, described(sequences, width, page_size, sum(needed) + 5)


def described(sequences: list[Sequence], width: int, page_size: int, pages: int) -> Step:
    table = torch.zeros(len(sequences), width, dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        table[row, : len(sequence.pages)] = torch.tensor(sequence.pages)
    host = HostLengths([each.start for each in sequences], [each.length for each in sequences])
    return Step.of(host, table, torch.full((pages,), -1), page_size)


def assert_describes(step: Step, sequences: list[Sequence]) -> None:
    assert step.locations.tolist() == [at for each in sequences for at in each.locations(step.page_size)]
    ends = [sum(each.count for each in sequences[:row]) for row in range(len(sequences) + 1)]
    assert step.query_starts.tolist() == ends
    assert step.starts.tolist() == step.known.starts == [each.start for each in sequences]
    assert step.lengths.tolist() == step.known.lengths == [each.length for each in sequences]
    assert step.known.counts == [each.count for each in sequences]
    assert step.max_queries == max((each.count for each in sequences), default=0)
    assert [row[: len(each.pages)] for row, each in zip(step.table.tolist(), sequences, strict=True)] == [
        each.pages for each in sequences
    ]
    types = {"locations": torch.int64, "table": torch.int64, "shadow_of": torch.int64}
    types |= dict.fromkeys(("query_starts", "starts", "lengths"), torch.int32)
    assert {name: getattr(step, name).dtype for name in types} == types


@pytest.mark.parametrize("seed", range(40))
def test_of(seed):
    sequences, step = drawn(seed)
    assert_describes(step, sequences)


@pytest.mark.parametrize("seed", range(40))
def test_places(seed):
    sequences, step = drawn(seed)
    step.shadow_of[::2] = torch.arange(len(step.shadow_of[::2]))
    page, shadow, offset = (x.tolist() for x in step.places)
    positions = [(each.pages[j // step.page_size], j) for each in sequences for j in range(each.start, each.length)]
    assert page == [number for number, _ in positions]
    assert shadow == [number // 2 if number % 2 == 0 else -1 for number, _ in positions]
    assert offset == [j % step.page_size for _, j in positions]


@pytest.mark.parametrize("seed", range(40))
def test_split(seed):
    """Of random keys, and by numbers of new tokens: runs of equal keys, in order."""
    sequences, step = drawn(seed)
    rng = random.Random(seed)
    for keys in ([rng.randrange(2) for _ in sequences], [each.count for each in sequences]):
        runs: list[tuple[int, list[int]]] = []
        for row, key in enumerate(keys):
            if row and keys[row - 1] == key:
                runs[-1][1].append(row)
            else:
                runs.append((key, [row]))
        expected = [(key, rows) for key, rows in runs if any(sequences[row].count for row in rows)]
        parts = step.split(keys)
        assert [key for key, *_ in parts] == [key for key, _ in expected]
        for (_, tokens, part), (_, rows) in zip(parts, expected, strict=True):
            before = sum(each.count for each in sequences[: rows[0]])
            own = [sequences[row] for row in rows]
            assert (tokens.start, tokens.stop) == (before, before + sum(each.count for each in own))
            assert_describes(part, own)
            assert part.table.shape[1] == max(len(each.pages) for each in own)
            assert part.shadow_of is step.shadow_of
            assert part.page_size == step.page_size


def test_a_split_part_remembers_for_itself():
    step = described([Sequence([0], 0, 3), Sequence([1], 2, 3)], 1, 4, 2)
    asked = []

    def count(asking: Step, more: int) -> int:
        asked.append(asking)
        return len(asking.locations) + more

    parts = [part for *_, part in step.split([0, 1])]
    assert [[each.once(count, more) for more in (0, 0, 5)] for each in (step, *parts)] == [
        [4, 4, 9], [3, 3, 8], [1, 1, 6]
    ]  # fmt: skip
    assert len(asked) == 6, "each once, for each argument"


# --- in the place of the last one


def placed(first: list[Sequence], second: list[Sequence]) -> tuple[Step, Step, Step]:
    last, step = (described(each, 4, 4, 9) for each in (first, second))
    last.places, last.filled  # noqa: B018 - what a step has computed for itself must not be taken over
    return last, step, step.placed_in(last)


def test_placed_in():
    first = [Sequence([5, 1], 5, 6), Sequence([0], 2, 3)]
    second = [Sequence([5, 1], 6, 7), Sequence([2], 3, 4)]
    last, step, result = placed(first, second)
    assert_describes(result, second)
    tensors = ("locations", "query_starts", "starts", "lengths", "table", "shadow_of")
    assert all(getattr(result, name) is getattr(last, name) for name in tensors)
    assert not any(getattr(result, name) is getattr(step, name) for name in tensors)
    assert [x.tolist() for x in result.places] == [[1, 2], [-1, -1], [2, 3]]
    assert [x.tolist() for x in result.filled] == [[1], [0], [[-1, -1, -1, 1]]]


@pytest.mark.parametrize(
    "second",
    [
        [Sequence([5, 1], 5, 7), Sequence([0], 2, 3)],  # more tokens
        [Sequence([5, 1], 5, 6)],  # fewer sequences
        [Sequence([5, 1], 5, 6), Sequence([0], 2, 3), Sequence([3], 0, 1)],
        [Sequence([5, 1], 5, 7), Sequence([0], 3, 3)],  # as many tokens, of one sequence
    ],
)
def test_what_has_another_size_keeps_its_own_place(second):
    first = [Sequence([5, 1], 5, 6), Sequence([0], 2, 3)]
    last, step, result = placed(first, second)
    assert result is step
    assert_describes(step, second)
    assert_describes(last, first)


def test_another_table_or_map_keeps_its_own_place():
    one = [Sequence([5, 1], 5, 6)]
    last = described(one, 4, 4, 9)
    for other in (described(one, 5, 4, 9), described(one, 4, 4, 10)):
        assert other.placed_in(last) is other


# --- full pages


@pytest.mark.parametrize("seed", range(40))
def test_filled(seed):
    """A page is filled where its last token is new. Its new tokens are named by their rows."""
    sequences, step = drawn(seed)
    rows = {}  # of new tokens, by sequence and position
    for number, each in enumerate(sequences):
        for j in range(each.start, each.length):
            rows[number, j] = len(rows)
    expected = [
        (number, page, [rows.get((number, j), -1) for j in range(page * step.page_size, (page + 1) * step.page_size)])
        for number, each in enumerate(sequences)
        for page in range(len(each.pages))
        if (number, (page + 1) * step.page_size - 1) in rows
    ]
    row, page, own = step.filled
    assert list(zip(row.tolist(), page.tolist(), own.tolist(), strict=True)) == expected
    assert own.shape == (len(expected), step.page_size)
    assert {x.dtype for x in (row, page, own)} == {torch.int64}


# --- shadows


def test_a_shadow_page_has_keys_then_values():
    layout = PageLayout(affine_slot(24, 4), affine_slot(16, 4), page_size=4)
    shadows = layout.allocate_shadows(3, 2, torch.float16)
    assert (shadows.shape, shadows.dtype) == ((3, 2, 4 * (24 + 16)), torch.float16)
    shadows.view(-1).copy_(torch.arange(960))
    keys, values = layout.shadow_sides(shadows)
    for page, head, token, d in ((0, 0, 0, 0), (1, 0, 2, 5), (2, 1, 3, 15)):
        first = (page * 2 + head) * 160
        assert keys[page, head, token, d] == first + token * 24 + d
        assert values[page, head, token, d] == first + 4 * 24 + token * 16 + d


@pytest.mark.parametrize(
    "windows", [Windows(), Windows(3), Windows(0, 1), Windows(0, 6), Windows(5, 9), Windows(0, 0, 4)]
)
@pytest.mark.parametrize("seed", range(12))
def test_required_shadows(seed, windows):
    """Those of every page with an older token that some new query reads raw, or that it is packed with. Without any one
    of them it raises."""
    sequences, step = drawn(seed)
    if windows.group > 1:
        windows = replace(windows, group=step.page_size)
    needed = set()
    for each in sequences:
        for t in range(each.start, each.length):
            for j in range(each.start):
                same_group = windows.group > 1 and j // windows.group == t // windows.group
                if j < windows.sink or j > t - windows.recent or same_group:
                    needed.add(each.pages[j // step.page_size])
    step.shadow_of[list(needed)] = 0
    require_shadows(step, windows)
    for page in needed:
        step.shadow_of[page] = -1
        with pytest.raises(RuntimeError, match="no shadow"):
            require_shadows(step, windows)
        step.shadow_of[page] = 0


# --- layers


def copied(pages: LayerPages) -> torch.Tensor:
    return pages.pool.clone()


def test_what_a_layer_keeps_serves_all_steps_over_the_same_bytes():
    """Another pool has other bytes. So nothing that was made of the first one serves it."""
    codec = Codec(affine_slot(16, 4))
    layout = PageLayout(codec.layout, codec.layout, 4)
    pool, nothing = layout.allocate(2, 1, torch.device("cpu")), torch.empty(0)
    layer = LayerPages.of((codec, codec), layout, Windows(), pool, nothing, nothing)
    table, shadow_of = torch.tensor([[0]]), torch.tensor([-1, -1])
    first, second = (layer.during(Step.of(HostLengths([0], [n]), table, shadow_of, 4)) for n in (1, 3))
    assert [len(pages.step.locations) for pages in (first, second, layer)] == [1, 3, 0]
    assert second.once(copied) is first.once(copied)
    assert replace(second, pool=pool + 1).once(copied).equal(pool + 1)
