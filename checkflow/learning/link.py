"""What the link carries while training runs: what was planned for, or so much less or more that another plan is due.

Less counts where it hurts, for training waits or checkpoints are skipped, and so does less time to carry it in: a plan
of slow iterations has more in each than shorter ones can hide. More counts where the plan makes do with less, or where
there is none. A few bytes tell nothing of a link, and the first ones little: slots are touched for the first time and
the driver loads what copies. So as long as nothing is planned the fastest iteration counts, for all that comes between
makes copies slower than the link, and a plan for a faster one is seen to hurt.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from checkflow.schedule import Schedule
from checkflow.units import format_ns, format_rate

SLOWER, FASTER = 0.7, 2.0  # times what was planned for
WAITS = 0.02  # share of the time that training may wait for copies, and of checkpoints that may be skipped
ENOUGH_BYTES = 1 << 24
UNKNOWN_BYTES_PER_S = 10**9  # where nothing was copied yet


@dataclass(frozen=True)
class Copied:
    """So far."""

    bytes: int = 0
    busy_ns: int = 0  # the link
    waited_ns: int = 0  # training, for copies
    begun: int = 0  # checkpoints
    skipped: int = 0


class LinkWatch:
    """Of one training. `plan`: what is followed, by what the link carried then; None: nothing was planned yet."""

    def __init__(self, plan: Schedule | None) -> None:
        self._plan = plan
        self._planned = self._found = 0 if plan is None else plan.bandwidth_bytes_per_s
        self._tried = 0  # the most that no plan was found for
        self._begin(Copied())

    def _begin(self, now: Copied) -> None:
        self._before, self._before_ns = now, time.perf_counter_ns()
        self._last, self._fastest, self._of_few = now, 0, 0
        self._iterations = 0  # since then

    def saw(self, now: Copied) -> None:
        """An iteration ended, which a plan may soon be made of."""
        copied_bytes, busy_ns = now.bytes - self._last.bytes, now.busy_ns - self._last.busy_ns
        if busy_ns:
            found, self._last = copied_bytes * 10**9 // busy_ns, now
            if copied_bytes < ENOUGH_BYTES:
                self._of_few = max(self._of_few, found)
            else:
                self._fastest = max(self._fastest, found)

    def awaits(self, now: Copied, state_bytes: int) -> bool:
        """Whether there soon is more to be known: a checkpoint has begun, and little of it has arrived."""
        few = now.bytes - self._before.bytes < min(ENOUGH_BYTES, state_bytes)
        return few and not self._found and now.begun > self._before.begun

    def asks(self, now: Copied) -> int:
        """Another plan is asked for, of what it carries now: so many bytes per second."""
        self.saw(now)
        fastest = self._fastest if self._plan is None else 0
        self._planned = self._found = fastest or self.carries(now) or self._of_few or UNKNOWN_BYTES_PER_S
        if self._plan is None:
            self._tried = max(self._tried, self._found)
        self._begin(now)
        return self._planned

    def follows(self, plan: Schedule) -> None:
        """What was asked for is in force; until then, or where there is none, what was in force before."""
        self._plan = plan

    def carries(self, now: Copied) -> int:
        """Bytes per second while it was busy: since it was last looked at, or as was found then."""
        copied_bytes, busy_ns = now.bytes - self._before.bytes, now.busy_ns - self._before.busy_ns
        return copied_bytes * 10**9 // busy_ns if copied_bytes >= ENOUGH_BYTES and busy_ns else self._found

    def grew(self, now: Copied) -> bool:
        """Whether it carries so much more than where no plan was found that there may be one. It says so once."""
        self._found = self.carries(now)
        self._begin(now)
        grew = self._tried > 0 and self._found > FASTER * self._tried
        self._tried = self._found if grew else self._tried
        return grew

    def changed(self, now: Copied, least_interval: int, iterations: int) -> str:
        """Why another plan is due; "" where none is.

        `least_interval`: iterations from one checkpoint to the next, if the link carried anything; `iterations`: that
        ended since this was last asked; where some are not counted, the others seem longer.
        """
        before, plan = self._before, self._plan
        self._iterations += iterations
        if plan is None or now.bytes - before.bytes < ENOUGH_BYTES:
            return ""
        found, elapsed_ns = self.carries(now), time.perf_counter_ns() - self._before_ns
        waits = now.waited_ns - before.waited_ns > WAITS * elapsed_ns
        skipped = now.skipped - before.skipped
        hurts = waits or skipped > WAITS * (now.begun - before.begun + skipped)
        makes_do = plan.lanes > 1 or plan.interval > least_interval
        took_ns = (elapsed_ns - (now.waited_ns - before.waited_ns)) // self._iterations  # with what was between them
        shorter = min(1.0, took_ns / max(1, plan.iteration_time_ns))
        due = (found * shorter < SLOWER * self._planned and hurts) or (found > FASTER * self._planned and makes_do)
        self._found = found
        self._begin(now)  # if one is due, too: what was found may be a mean of what it carried before and since
        each, planned = (
            (f" in iterations of {format_ns(took_ns)}", f" in {format_ns(plan.iteration_time_ns)}")
            if shorter < SLOWER
            else ("", "")
        )
        carries = f"{format_rate(found)}{each}, and was planned to carry {format_rate(self._planned)}{planned}"
        return f"the link carries {carries}" if due else ""
