"""Direct offload on a FIFO link: each byte leaves from the live tensor if it can, and from a snapshot if it must.

The order is that of the fluid bound. Chunks are cut at the byte where their deadline falls, and then, only where memory
would exceed the bound, where a cell begins; each round of cuts removes every excess that a cut can remove, and a
cell's beginning is cut at most once, so the rounds end. What is left is the granule that a deadline falls into: it is
snapshot before that deadline, or the link waits for the deadline, whichever needs less memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from checkflow.plan import TICKS_PER_BYTE, Chunk
from checkflow.plan.timeline.fluid import Piece, earliest_deadline_first, lower_bound_bytes
from checkflow.plan.timeline.grid import TimeGrid
from checkflow.plan.timeline.queue import LinkRequest, in_order, queue


class Held(Protocol):
    """A chunk, and the ordinals at which its snapshot is created and released (None: direct)."""

    @property
    def chunk(self) -> Chunk: ...
    @property
    def created(self) -> int | None: ...
    @property
    def released(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Placed:
    """A chunk on the link, and the ordinals at which its snapshot is created and released (None: direct)."""

    chunk: Chunk
    begin_ticks: int
    end_ticks: int
    created: int | None
    released: int | None


@dataclass(frozen=True, slots=True)
class Placement:
    placed: tuple[Placed, ...]  # in link order
    peak_bytes: int
    lower_bound_bytes: int


def place(grid: TimeGrid) -> Placement:
    """The plan of least peak on this grid, up to the granule. The state has to fit the link (fluid.link_carries)."""
    pieces = earliest_deadline_first(grid)
    bound = lower_bound_bytes(grid, pieces)
    passages = queue(grid, _requests(grid, pieces))
    deadlines = [grid.window(tensor)[1] for tensor in grid.problem.state]
    placed = [
        part
        for passage in passages
        for part in _cut(grid, passage.moved.chunk, passage.begin_ticks, deadlines[passage.moved.chunk.state], ())
    ]
    placed, memory = _relieved(grid, placed, deadlines, bound)
    while crowded := {cell for cell, held_bytes in enumerate(memory) if held_bytes > bound}:
        waiting = _waiting(grid, placed, deadlines, crowded)
        if waiting is None:
            break
        later, needed = _relieved(grid, waiting, deadlines, bound)
        if max(needed) >= max(memory):
            break
        placed, memory = later, needed
    return Placement(tuple(placed), max(memory, default=0), bound)


def snapshots_of(placed: Iterable[Held]) -> Iterator[tuple[int, int, int]]:
    """(ordinal created, ordinal released, bytes) of each snapshot."""
    return (
        (part.created, part.released, part.chunk.size_bytes)
        for part in placed
        if part.created is not None and part.released is not None
    )


def _requests(grid: TimeGrid, pieces: list[Piece]) -> list[LinkRequest]:
    """The fluid pieces as chunks: cut on the granule, and at chunk_bytes where that is set."""
    problem = grid.problem
    granule = problem.granule_bytes
    limit = problem.chunk_bytes and _down(problem.chunk_bytes, granule)
    requests = []
    for rank, piece in enumerate(pieces):
        tensor = problem.state[piece.state]
        # Rounded up, so that what interrupts a tensor has been released when the chunk before it ends.
        low, high = (
            min(_up(-(-ticks // TICKS_PER_BYTE), granule), tensor.size_bytes)
            for ticks in (piece.low_ticks, piece.high_ticks)
        )
        release, deadline = grid.window(tensor)
        for offset in range(low, high, limit or tensor.size_bytes):
            chunk = Chunk(piece.state, offset, min(limit or high, high - offset))
            requests.append(LinkRequest(chunk, release, (deadline, rank)))
    return requests


def _cut(grid: TimeGrid, chunk: Chunk, begin: int, deadline: int, cells: tuple[int, ...]) -> list[Placed]:
    """A chunk on the link from `begin`, cut at its deadline and where the given cells begin."""
    granule = grid.problem.granule_bytes
    end = begin + chunk.size_bytes * TICKS_PER_BYTE
    due = grid.clock(deadline)
    marks = [grid.clock(cell) for cell in cells]
    cuts = {_down((mark - begin) // TICKS_PER_BYTE, granule) for mark in marks if begin < mark < end}
    if begin < due < end:
        sent = (due - begin) // TICKS_PER_BYTE
        cuts.add(_down(sent, granule))
        if marks:
            cuts.add(_down(sent, granule) + granule)  # so that only one granule has to be snapshot before the deadline
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < chunk.size_bytes), chunk.size_bytes]
    return [
        _placed(grid, Chunk(chunk.state, chunk.offset_bytes + low, high - low), begin + low * TICKS_PER_BYTE, deadline)
        for low, high in pairwise(edges)
    ]


def _placed(grid: TimeGrid, chunk: Chunk, begin: int, deadline: int) -> Placed:
    end = begin + chunk.size_bytes * TICKS_PER_BYTE
    if end <= grid.clock(deadline):
        return Placed(chunk, begin, end, None, None)
    return Placed(chunk, begin, end, min(deadline, grid.by_clock(begin)), grid.from_clock(end))


def _relieved(
    grid: TimeGrid, placed: list[Placed], deadlines: list[int], bound_bytes: int
) -> tuple[list[Placed], list[int]]:
    """The same chunks, cut until no cut removes memory above the bound; and the memory in each cell."""
    while True:
        memory = grid.memory_bytes(snapshots_of(placed))
        crowded = {cell for cell, held_bytes in enumerate(memory) if held_bytes > bound_bytes}
        finer = _relieve(grid, placed, deadlines, crowded) if crowded else placed
        if len(finer) == len(placed):
            return placed, memory
        placed = finer


def _waiting(grid: TimeGrid, placed: list[Placed], deadlines: list[int], crowded: set[int]) -> list[Placed] | None:
    """In the same order, but what is snapshot before its deadline in a crowded cell begins at its deadline.

    None where there is no such chunk. The state still fits the period, so the queue stays steady.
    """

    def early(part: Placed) -> bool:
        cells = range(part.created, deadlines[part.chunk.state]) if part.created is not None else ()
        return any(cell % grid.period_cells in crowded for cell in cells)

    waits = [early(part) for part in placed]
    if not any(waits):
        return None
    windows = [grid.window(tensor) for tensor in grid.problem.state]
    ready = [windows[part.chunk.state][late] for part, late in zip(placed, waits, strict=True)]
    begins = in_order(grid, ready, [part.chunk.size_bytes for part in placed])
    return [
        piece
        for part, begin in zip(placed, begins, strict=True)
        for piece in _cut(grid, part.chunk, begin, deadlines[part.chunk.state], ())
    ]


def _relieve(grid: TimeGrid, placed: list[Placed], deadlines: list[int], crowded: set[int]) -> list[Placed]:
    """Cut the snapshots that are held in crowded cells where those cells begin."""
    finer: list[Placed] = []
    period, ordered = grid.period_cells, sorted(crowded)

    def between(low: int, high: int) -> Iterator[int]:
        for turn in range(low // period, (high - 1) // period + 1):
            first, last = (bisect_left(ordered, ordinal - turn * period) for ordinal in (low, high))
            yield from (turn * period + cell for cell in ordered[first:last])

    for part in placed:
        cells: tuple[int, ...] = ()
        if part.created is not None and part.released is not None:
            cells = tuple(between(part.created, part.released))
        if cells:
            finer += _cut(grid, part.chunk, part.begin_ticks, deadlines[part.chunk.state], cells)
        else:
            finer.append(part)
    return finer


def _down(size_bytes: int, granule_bytes: int) -> int:
    return size_bytes - size_bytes % granule_bytes


def _up(size_bytes: int, granule_bytes: int) -> int:
    return _down(size_bytes + granule_bytes - 1, granule_bytes)
