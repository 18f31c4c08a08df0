"""The link: a FIFO queue that repeats every k iterations, in ticks of 1e-9 byte."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from checkflow.verify.failure import fail
from checkflow.verify.terms import TICKS_PER_BYTE, Terms


def late_bytes(end: int, limit: int) -> int:
    """Bytes still to move at a limit, rounded up."""
    return -((limit - end) // TICKS_PER_BYTE)


def fifo(terms: Terms, table: str, ready: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(begin, end) of each transfer in the steady state, from the positions at which they may begin and their bytes.

    From an idle link one pass ends at E. If the work fits the period, a second pass that begins with the previous
    checkpoint's end, E - period, ends at E again: the state is steady. Raises VerificationError if it does not fit.
    """
    period, total_bytes = terms.clock(terms.interval * terms.steps), sum(sizes)
    if total_bytes * TICKS_PER_BYTE > period:
        fail(
            f"{table}: {total_bytes} bytes do not fit the {period // TICKS_PER_BYTE} that the link carries in a period"
        )
    opens = [terms.clock(position) for position in ready]
    end = _served(opens, sizes, min(opens, default=0))[-1][1] - period if opens else 0
    return _served(opens, sizes, end)


def from_idle(terms: Terms, ready: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """The same where a pause before the first leaves nothing of the checkpoint before; any work fits."""
    opens = [terms.clock(position) for position in ready]
    return _served(opens, sizes, min(opens, default=0))


def _served(opens: Sequence[int], sizes: Sequence[int], end: int) -> list[tuple[int, int]]:
    times = []
    for opened, size_bytes in zip(opens, sizes, strict=True):
        begin = max(end, opened)
        end = begin + size_bytes * TICKS_PER_BYTE
        times.append((begin, end))
    return times


class Steps:
    """Which step a tick falls into."""

    def __init__(self, terms: Terms) -> None:
        self._steps = terms.steps
        self._ends = [terms.clock(step) for step in range(1, terms.steps + 1)]

    def after(self, tick: int) -> int:
        """The least unrolled step whose end is after the tick."""
        iteration, within = divmod(tick, self._ends[-1])
        return iteration * self._steps + bisect_right(self._ends, within) + 1
