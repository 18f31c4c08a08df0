"""The earliest deadline first, on a link that may switch at any instant: what no plan can beat.

For each position p, the tensors with a deadline at or before p have the link whenever one of them has bytes to move,
so the bytes of theirs that are left are the fewest possible, for all p at once (Horn 1974, preemptive EDF). Work is
counted in ticks of 1e-9 byte, so everything is exact.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise

from checkflow.plan import TICKS_PER_BYTE
from checkflow.plan.timeline.grid import TimeGrid


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a tensor's bytes that moves without interruption: work [low, high) of it, beginning at a link clock."""

    state: int  # index into Problem.state
    low_ticks: int
    high_ticks: int
    begin_ticks: int

    @property
    def end_ticks(self) -> int:
        return self.begin_ticks + self.high_ticks - self.low_ticks


def earliest_deadline_first(grid: TimeGrid) -> list[Piece]:
    """One checkpoint's pieces, in order, in the steady state. The state has to fit the link (link_carries)."""
    pieces = _simulate(grid, free_ticks=None)
    if pieces and (carried := pieces[-1].end_ticks - grid.period_ticks) > pieces[0].begin_ticks:
        # The checkpoint before is still moving. One round settles it: the work left at a checkpoint's beginning grows
        # with the work left at the one before, but by no more than that.
        pieces = _simulate(grid, carried)
    return pieces


def _simulate(grid: TimeGrid, free_ticks: int | None) -> list[Piece]:
    windows = [grid.window(tensor) for tensor in grid.problem.state]
    arrivals = sorted((grid.clock(release), deadline, state) for state, (release, deadline) in enumerate(windows))
    sent = [0] * len(windows)
    ready: list[tuple[int, int]] = []  # (deadline, state)
    pieces: list[Piece] = []
    now = arrivals[0][0] if arrivals else 0
    if free_ticks is not None:
        now = max(now, free_ticks)
    upcoming = 0
    while upcoming < len(arrivals) or ready:
        if not ready:
            now = max(now, arrivals[upcoming][0])
        while upcoming < len(arrivals) and arrivals[upcoming][0] <= now:
            _, deadline, state = arrivals[upcoming]
            heapq.heappush(ready, (deadline, state))
            upcoming += 1
        deadline, state = ready[0]
        size_ticks = grid.problem.state[state].size_bytes * TICKS_PER_BYTE
        end = now + size_ticks - sent[state]
        later = (arrivals[index] for index in range(upcoming, len(arrivals)))
        preempted = next((opens for opens, due, _ in later if due < deadline or opens >= end), end)
        stop = min(end, preempted)
        pieces.append(Piece(state, sent[state], sent[state] + stop - now, now))
        sent[state] += stop - now
        now = stop
        if sent[state] == size_ticks:
            heapq.heappop(ready)
    return pieces


def link_carries(grid: TimeGrid) -> bool:
    """Whether the state's bytes fit the link from one checkpoint to the next."""
    return grid.problem.state_bytes * TICKS_PER_BYTE <= grid.period_ticks


def lower_bound_bytes(grid: TimeGrid, pieces: list[Piece]) -> int:
    """Least peak of any plan on this grid (docs/model.md, "Lower bound"), from its EDF pieces."""
    left = _left_ticks(grid, pieces)
    cells = grid.cells_per_iteration
    return max(
        (grid.resident_bytes[cell % cells] + -(-ticks // TICKS_PER_BYTE) for cell, ticks in enumerate(left)), default=0
    )


def _left_ticks(grid: TimeGrid, pieces: list[Piece]) -> list[int]:
    """Work past its deadline and still to move at the start of each cell of a period.

    Invariant: of one piece that is all of it from its deadline on until it begins, and then what the link has not moved
    yet; before its deadline, and from its end on, nothing (docs/model.md has a picture). So `change` has the steps up
    and down of what is whole, and `left` the few cells in which a piece is on the link.
    """
    period = grid.period_cells
    change: dict[int, int] = {}
    left: dict[int, int] = {}
    for piece in pieces:
        deadline = grid.window(grid.problem.state[piece.state])[1]
        if piece.end_ticks <= grid.clock(deadline):
            continue
        untouched = grid.by_clock(piece.begin_ticks)  # at the starts of cells deadline..untouched all of it is left
        if untouched >= deadline:
            work = piece.high_ticks - piece.low_ticks
            change[deadline] = change.get(deadline, 0) + work
            change[untouched + 1] = change.get(untouched + 1, 0) - work
        cell = max(deadline, untouched + 1)
        while grid.clock(cell) < piece.end_ticks:
            left[cell] = left.get(cell, 0) + piece.end_ticks - grid.clock(cell)
            cell += 1
    folded = [0] * period
    for cell, ticks in left.items():
        folded[cell % period] += ticks
    edges = sorted(change)
    held = 0
    for edge, following in pairwise(edges):
        held += change[edge]
        if held:
            for cell in range(edge, following):
                folded[cell % period] += held
    return folded
