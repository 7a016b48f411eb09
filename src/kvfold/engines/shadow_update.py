"""`ShadowTable.update` in one launch. PyTorch's operators would take dozens of small launches in every decode step.

One CTA does all of it, since every part needs the one before. Pages get new shadows one after the other: in a decode
step, few pages need one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.ops.launch import launcher
from kvfold.ops.sizes import power_of_two

TILE = 1024  # locations or pages at a time


def update(
    state: tuple[Tensor, ...],  # step, of, owner, needed, all_restored, first, written: see ShadowTable
    locations: Tensor,
    starts: Tensor,
    lengths: Tensor,
    table: Tensor,
    sink: int,
    recent: int,
    columns: tuple[int, int],  # pages of a sink and of a recent window, at most
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    reached = len(starts) * (columns[0] + 2 * columns[1])
    given, pages, shadows = torch.empty(3, max(1, reached), dtype=torch.int64, device=table.device)
    count = torch.empty(1, dtype=torch.int32, device=table.device)
    room = len(state[2]) - 1
    kernel = launcher(
        _update,
        table.device,
        SINK_PAGES=columns[0],
        RECENT_PAGES=columns[1],
        PAGE=page_size,
        ROOM=power_of_two(max(1, room)),
        TILE=TILE,
        num_warps=8,
    )
    kernel(
        (1, 1, 1),
        *state,
        locations,
        starts,
        lengths,
        table,
        given,
        pages,
        shadows,
        count,
        len(locations),
        reached,
        table.shape[1],
        table.stride(0),
        room,
        sink,
        recent,
    )
    return pages, shadows, count


@triton.jit(do_not_specialize=["tokens", "reached", "table_pages", "table_stride", "room", "sink", "recent"])
def _update(
    step, of, owner, needed, all_restored, first, written,
    locations, starts, lengths, table, given, restored_pages, restored_shadows, restored,
    tokens, reached, table_pages, table_stride, room, sink, recent,
    SINK_PAGES: tl.constexpr, RECENT_PAGES: tl.constexpr, PAGE: tl.constexpr, ROOM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    now = tl.load(step) + 1
    for begin in range(0, tokens, TILE):  # a page that is written anew loses its shadow
        token = begin + tl.arange(0, TILE)
        location = tl.load(locations + token, mask=token < tokens, other=-1)
        fresh = (location >= 0) & (location % PAGE == 0)
        page = location // PAGE
        former = tl.load(of + page, mask=fresh, other=-1)
        tl.store(owner + former, -1, mask=former >= 0)
        tl.store(needed + former, 0, mask=former >= 0)
        tl.store(of + page, -1, mask=fresh)
        tl.store(written + page, now, mask=fresh)
    tl.debug_barrier()

    for begin in range(0, reached, TILE):  # shadows that are needed, and where the list first names a page
        number, page = _reached(
            begin, starts, lengths, table, reached, table_pages, table_stride, sink, recent,
            SINK_PAGES, RECENT_PAGES, PAGE, TILE,
        )  # fmt: skip
        shadow = tl.load(of + page, mask=page >= 0, other=-1)
        tl.store(needed + shadow, now, mask=shadow >= 0)
        tl.atomic_max(first + page, _rank(now, number), mask=page >= 0)
    tl.debug_barrier()

    count = 0
    for begin in range(0, reached, TILE):  # pages that need a shadow, each once
        number, page = _reached(
            begin, starts, lengths, table, reached, table_pages, table_stride, sink, recent,
            SINK_PAGES, RECENT_PAGES, PAGE, TILE,
        )  # fmt: skip
        shadow = tl.load(of + page, mask=page >= 0, other=0)
        rank = tl.load(first + page, mask=page >= 0, other=-1, volatile=True)
        needs = ((shadow < 0) & (rank == _rank(now, number))).to(tl.int32)
        tl.store(given + count + tl.cumsum(needs, 0) - 1, page, mask=needs > 0)
        count += tl.sum(needs, 0)
    tl.debug_barrier()

    index = tl.arange(0, ROOM)
    age = tl.load(needed + index, mask=index < room, other=now)  # a shadow that this step needs is not taken
    age = age * ROOM + index
    lost = 0
    for i in range(count):
        oldest = tl.min(age, 0)
        if oldest < now * ROOM:
            page, shadow = tl.load(given + i), oldest % ROOM
            former = tl.load(owner + shadow)
            if former >= 0:
                tl.store(of + former, -1)
            tl.store(of + page, shadow)
            tl.store(owner + shadow, page)
            tl.store(needed + shadow, now)
            age = tl.where(index == shadow, now * ROOM + index, age)
            if tl.load(written + page) != now:
                tl.store(restored_pages + lost, page)
                tl.store(restored_shadows + lost, shadow)
                lost += 1
    tl.store(restored, lost)
    tl.store(all_restored, tl.load(all_restored) + lost)
    tl.store(step, now)


@triton.jit
def _reached(
    begin, starts, lengths, table, reached, table_pages, table_stride, sink, recent,
    SINK_PAGES: tl.constexpr, RECENT_PAGES: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of the list of pages that windows reach into, -1: none. Per request: the pages of the sink, of the recent
    window before the step, and of the recent window after it."""
    COLUMNS: tl.constexpr = SINK_PAGES + 2 * RECENT_PAGES
    number = begin + tl.arange(0, TILE)
    request, column = number // COLUMNS, number % COLUMNS
    start = tl.load(starts + request, mask=number < reached, other=0).to(tl.int64)
    length = tl.load(lengths + request, mask=number < reached, other=0).to(tl.int64)
    of_sink = column < SINK_PAGES
    end = tl.where(column < SINK_PAGES + RECENT_PAGES, start, length)
    from_page = tl.where(of_sink, 0, tl.maximum(end + 1 - recent, 0) // PAGE)
    end = tl.where(of_sink, tl.minimum(length, sink), end)
    RECENT: tl.constexpr = RECENT_PAGES if RECENT_PAGES > 0 else 1
    index = from_page + tl.where(of_sink, column, (column - SINK_PAGES) % RECENT)
    exists = (number < reached) & (index * PAGE < end)
    row = table + request.to(tl.int64) * table_stride
    return number, tl.load(row + tl.minimum(index, table_pages - 1), mask=exists, other=-1).to(tl.int64)


@triton.jit
def _rank(now, number):
    """Greater in later steps. Within a step, greater for what comes first."""
    return (now + 1) * (1 << 24) - number
