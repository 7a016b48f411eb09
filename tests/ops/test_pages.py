"""`Step` against plain Python: where each token lies, and what splitting, moving and filling make of that. Layers."""

import random
from dataclasses import dataclass, replace

import pytest
import torch

from kvfold.format.codec import Codec
from kvfold.format.layout import PageLayout, affine_slot
from kvfold.format.open_block import DRAFTED
from kvfold.ops.pages import Fresh, HostLengths, LayerPages, Step


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
    return sequences, described(sequences, width, page_size)


def described(sequences: list[Sequence], width: int, page_size: int) -> Step:
    table = torch.zeros(len(sequences), width, dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        table[row, : len(sequence.pages)] = torch.tensor(sequence.pages)
    host = HostLengths([each.start for each in sequences], [each.length for each in sequences])
    rings = 7 - torch.arange(2 * len(sequences)).view(-1, 2)  # two blocks each
    return Step.of(host, table, rings, page_size)


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
    types = {"locations": torch.int64, "table": torch.int64, "rings": torch.int64}
    types |= dict.fromkeys(("query_starts", "starts", "lengths"), torch.int32)
    assert {name: getattr(step, name).dtype for name in types} == types


@pytest.mark.parametrize("seed", range(40))
def test_of(seed):
    sequences, step = drawn(seed)
    assert_describes(step, sequences)


@pytest.mark.parametrize("seed", range(40))
def test_places(seed):
    sequences, step = drawn(seed)
    page, offset = (x.tolist() for x in step.places)
    positions = [(each.pages[j // step.page_size], j) for each in sequences for j in range(each.start, each.length)]
    assert page == [number for number, _ in positions]
    assert offset == [j % step.page_size for _, j in positions]
    rows = [(number, j) for number, each in enumerate(sequences) for j in range(each.start, each.length)]
    assert list(zip(*(x.tolist() for x in step.rows), strict=True)) == rows


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
            assert part.rings.tolist() == [step.rings[row].tolist() for row in rows]
            assert part.page_size == step.page_size


def test_a_split_part_remembers_for_itself():
    step = described([Sequence([0], 0, 3), Sequence([1], 2, 3)], 1, 4)
    asked = []

    def count(asking: Step, more: int) -> int:
        asked.append(asking)
        return len(asking.locations) + more

    parts = [part for *_, part in step.split([0, 1])]
    assert [[each.once(count, more) for more in (0, 0, 5)] for each in (step, *parts)] == [
        [4, 4, 9], [3, 3, 8], [1, 1, 6]
    ]  # fmt: skip
    assert len(asked) == 6, "each once, for each argument"


# --- full pages


@pytest.mark.parametrize("seed", range(40))
def test_filled(seed):
    """A page is filled where its last token is new."""
    sequences, step = drawn(seed)
    new = {(number, j) for number, each in enumerate(sequences) for j in range(each.start, each.length)}
    expected = [
        (number, page)
        for number, each in enumerate(sequences)
        for page in range(len(each.pages))
        if (number, (page + 1) * step.page_size - 1) in new
    ]
    assert list(zip(*(x.tolist() for x in step.filled), strict=True)) == expected


# --- raw vectors


def test_a_block_of_a_ring_has_keys_then_values():
    """And perhaps bytes that no token fills."""
    layout = PageLayout(affine_slot(24, 4), affine_slot(16, 4), page_size=4)
    assert layout.allocate_ring(3, 5, 2, torch.float16).shape == (3, 2, 5 * (24 + 16))
    ring = torch.arange(3 * 2 * 170).view(3, 2, 170)
    keys, values = layout.ring_sides(ring)
    assert (keys.shape, values.shape) == ((3, 2, 4, 24), (3, 2, 4, 16))
    for block, head, token, d in ((0, 0, 0, 0), (1, 0, 2, 5), (2, 1, 3, 15)):
        first = (block * 2 + head) * 170
        assert keys[block, head, token, d] == first + token * 24 + d
        assert values[block, head, token, d] == first + 4 * 24 + token * 16 + d


@pytest.mark.parametrize("block", [1, 4, 9])
@pytest.mark.parametrize("seed", range(40))
def test_fresh(seed, block):
    """Rings have two blocks of 13 tokens. A step with few tokens of a sequence returns these alone. One with more
    returns the open block before the step, too."""
    sequences, step = drawn(seed)
    fresh, tokens = Fresh.of(step, block, 13), 13

    def in_ring(number: int, j: int) -> int:
        return int(step.rings[number, j % 26 // 13]) * 13 + j % 13

    many = step.max_queries > DRAFTED
    held = [
        (number, j)
        for number, each in enumerate(sequences)
        for j in range(each.start // block * block if many else each.start, each.length)
    ]
    row_of = {token: row for row, token in enumerate(held)}
    new = [(number, j) for number, each in enumerate(sequences) for j in range(each.start, each.length)]
    assert fresh.kept.tolist() == [
        in_ring(number, j) if j >= sequences[number].length - 2 * tokens else -1 for number, j in new
    ]
    firsts = [each.start // block * block if many else each.start for each in sequences]
    assert fresh.first.tolist() == firsts
    assert fresh.starts.tolist() == [sum(number < n for number, _ in held) for n in range(len(sequences) + 1)]
    if not many:
        assert fresh.rows is None
        assert fresh.old is None
        return
    assert fresh.rows.tolist() == [row_of[token] for token in new]
    old = [token for token in held if token not in set(new)]
    rows, places = fresh.old
    assert rows.tolist() == [row_of[token] for token in old]
    assert places.tolist() == [in_ring(*token) for token in old]


def test_padding_is_not_kept():
    step = described([Sequence([0], 2, 4), Sequence([1], 0, 1)], 1, 4)
    step.locations[1] = -1
    assert (Fresh.of(step, 4, 13).kept < 0).tolist() == [False, True, False]


# --- layers


def copied(pages: LayerPages) -> torch.Tensor:
    return pages.pool.clone()


def test_what_a_layer_keeps_serves_all_steps_over_the_same_bytes():
    """Another pool has other bytes. So nothing that was made of the first one serves it."""
    codec = Codec(affine_slot(16, 4))
    layout = PageLayout(codec.layout, codec.layout, 4)
    pool, nothing = layout.allocate(2, 1, torch.device("cpu")), torch.empty(0)
    layer = LayerPages.of((codec, codec), layout, 0, pool, nothing.view(0, 1, 0), nothing)
    table, rings = torch.tensor([[0]]), torch.tensor([[0]])
    first, second = (layer.during(Step.of(HostLengths([0], [n]), table, rings, 4)) for n in (1, 3))
    assert [len(pages.step.locations) for pages in (first, second, layer)] == [1, 3, 0]
    assert second.once(copied) is first.once(copied)
    assert replace(second, pool=pool + 1).once(copied).equal(pool + 1)
