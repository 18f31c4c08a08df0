"""Where actions may happen: positions on a grid, unrolled around the checkpoint, and the link clock at each.

What runs uses the grid of positions with an anchor. The grid of every position tells what missing anchors cost.
Between two neighbours on the grid lies a *cell*: the steps during which no snapshot can be created or released.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from checkflow.plan import Problem, StateTensor


@dataclass(frozen=True)
class TimeGrid:
    """Positions of one iteration, ascending in 1..T and ending with T (which is position 0 of the next one).

    An *ordinal* counts grid positions across iterations: ordinal 0 is position 0. Cell g are the steps after the
    position of ordinal g, up to and including that of ordinal g + 1.
    """

    problem: Problem
    positions: tuple[int, ...]

    @classmethod
    def of(cls, problem: Problem) -> TimeGrid:
        return cls.everywhere(problem) if problem.anchors is None else cls(problem, problem.anchors)

    @classmethod
    def everywhere(cls, problem: Problem) -> TimeGrid:
        return cls(problem, tuple(range(1, problem.steps + 1)))

    @cached_property
    def _ticks(self) -> tuple[int, ...]:
        return tuple(self.problem.clock(position) for position in (0, *self.positions))

    @property
    def cells_per_iteration(self) -> int:
        return len(self.positions)

    @property
    def period_cells(self) -> int:
        """Cells from one checkpoint to the next."""
        return len(self.positions) * self.problem.interval

    @cached_property
    def period_ticks(self) -> int:
        return self.problem.clock(self.positions[-1] if self.positions else 0) * self.problem.interval

    def position(self, ordinal: int) -> int:
        iteration, within = divmod(ordinal, len(self.positions))
        return iteration * self.problem.steps + (self.positions[within - 1] if within else 0)

    def clock(self, ordinal: int) -> int:
        iteration, within = divmod(ordinal, len(self.positions))
        return iteration * self._ticks[-1] + self._ticks[within]

    def at_or_before(self, position: int) -> int:
        """Ordinal of the last grid position that is not after `position`."""
        iteration, within = divmod(position, self.problem.steps)
        return iteration * len(self.positions) + bisect_right(self.positions, within)

    def at_or_after(self, position: int) -> int:
        """Ordinal of the first grid position that is not before `position`."""
        return self.at_or_before(position - 1) + 1

    def by_clock(self, ticks: int) -> int:
        """Ordinal of the last grid position whose clock is not after `ticks`."""
        iteration, within = divmod(ticks, self._ticks[-1])
        return iteration * len(self.positions) + bisect_right(self._ticks, within) - 1

    def from_clock(self, ticks: int) -> int:
        """Ordinal of the first grid position whose clock is not before `ticks`."""
        return self.by_clock(ticks - 1) + 1

    def window(self, tensor: StateTensor) -> tuple[int, int]:
        """(release, deadline) as ordinals: where the live tensor first and last is what is to be saved."""
        release, deadline = self.problem.window(tensor)
        return self.at_or_after(release), self.at_or_before(deadline)

    @cached_property
    def resident_bytes(self) -> tuple[int, ...]:
        """Largest training memory in each cell of one iteration."""
        edges = (0, *self.positions)
        resident = self.problem.resident_bytes
        return tuple(max(resident[low:high]) for low, high in pairwise(edges))

    def memory_bytes(self, snapshots: Iterable[tuple[int, int, int]]) -> list[int]:
        """Memory in each cell of a period, from snapshots as (ordinal created, ordinal released, bytes)."""
        period = self.period_cells
        change = [0] * (period + 1)
        everywhere = 0
        for created, released, size_bytes in snapshots:
            turns, rest = divmod(released - created, period)
            everywhere += turns * size_bytes
            first = created % period
            change[first] += size_bytes
            change[min(first + rest, period)] -= size_bytes
            if first + rest > period:
                change[0] += size_bytes
                change[first + rest - period] -= size_bytes
        memory, held = [], everywhere
        for cell in range(period):
            held += change[cell]
            memory.append(held + self.resident_bytes[cell % len(self.positions)])
        return memory

    def step_of(self, ticks: int) -> int:
        """The step during which the link clock passes `ticks`: the least s with clock(s) >= ticks."""
        problem = self.problem
        low = (ticks - 1) // self._ticks[-1]
        within = ticks - low * self._ticks[-1]
        return low * problem.steps + bisect_left(range(problem.steps + 1), within, key=problem.clock)
