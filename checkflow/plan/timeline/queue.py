"""The link as it really is: a queue of whole chunks, first in, first out."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from checkflow.plan import TICKS_PER_BYTE, Chunk
from checkflow.plan.timeline.grid import TimeGrid

Moved = TypeVar("Moved")


@dataclass(frozen=True, slots=True)
class LinkRequest:
    """A chunk that may move from a grid position on. Among those that may, the least urgency goes first."""

    chunk: Chunk
    release: int  # ordinal
    urgency: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Passage(Generic[Moved]):
    """What moves has the link from begin to end."""

    moved: Moved
    begin_ticks: int
    end_ticks: int


def queue(grid: TimeGrid, requests: Sequence[LinkRequest]) -> list[Passage[LinkRequest]]:
    """One checkpoint's passages, in link order, in the steady state: the link never idles while a chunk may move.

    The chunks have to fit the link (fluid.link_carries); then the delay that one checkpoint hands to the next
    settles, for the same reason as in the fluid case.
    """
    passages = _pass(grid, requests, free_ticks=None)
    if passages and (carried := passages[-1].end_ticks - grid.period_ticks) > passages[0].begin_ticks:
        passages = _pass(grid, requests, carried)
    return passages


def _pass(grid: TimeGrid, requests: Sequence[LinkRequest], free_ticks: int | None) -> list[Passage[LinkRequest]]:
    arrivals = sorted(requests, key=lambda request: request.release)
    clocks = [grid.clock(request.release) for request in arrivals]
    ready: list[tuple[tuple[int, int], int]] = []
    passages: list[Passage[LinkRequest]] = []
    now = free_ticks if free_ticks is not None else (clocks[0] if clocks else 0)
    upcoming = 0
    while upcoming < len(arrivals) or ready:
        if not ready:
            now = max(now, clocks[upcoming])
        while upcoming < len(arrivals) and clocks[upcoming] <= now:
            heapq.heappush(ready, (arrivals[upcoming].urgency, upcoming))
            upcoming += 1
        _, index = heapq.heappop(ready)
        begin, now = now, now + arrivals[index].chunk.size_bytes * TICKS_PER_BYTE
        passages.append(Passage(arrivals[index], begin, now))
    return passages


def in_order(grid: TimeGrid, ready: Sequence[int], sizes_bytes: Sequence[int]) -> list[int]:
    """Link clocks at which chunks begin that go in this order, each from an ordinal on, in the steady state."""
    opens = [grid.clock(ordinal) for ordinal in ready]

    def served(end: int) -> tuple[list[int], int]:
        begins = []
        for opened, size_bytes in zip(opens, sizes_bytes, strict=True):
            begins.append(max(end, opened))
            end = begins[-1] + size_bytes * TICKS_PER_BYTE
        return begins, end

    return served(served(min(opens, default=0))[1] - grid.period_ticks)[0]
