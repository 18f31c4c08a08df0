"""An interval that keeps to a budget: the share of time for which checkpoints may hold training up.

As CheckFreq (FAST '21, Algorithm 1 and its adaptive tuning) has it: with a checkpoint that costs c, and iterations of
time T without it, k = ceil(c / (p T)) keeps the overhead to p. Both are measured while training runs. Where something
else uses link or disk, c grows and so does k; once that has gone k comes down again, to what training began with.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from checkflow.checkpointing.engine import Engine
from checkflow.events import Paced
from checkflow.runtime.executor import Executor

CHECKPOINTS = 3  # that a measurement has at least
SPAN_NS = 10**9  # and how long it takes at least
MOST_PATIENCE = 63  # measurements


@dataclass(frozen=True, slots=True)
class Measured:
    """What a few checkpoints cost."""

    iterations: int
    checkpoints: int
    elapsed_ns: int
    stall_ns: int  # of it training waited for checkpoints

    @property
    def overhead(self) -> float:
        """A fraction of the time without them."""
        return self.stall_ns / max(1, self.elapsed_ns - self.stall_ns)

    def interval_for(self, budget: float) -> int:
        """The least one at which checkpoints that cost as much keep to the budget."""
        iteration_ns = max(1, self.elapsed_ns - self.stall_ns) / self.iterations
        return max(1, math.ceil(self.stall_ns / self.checkpoints / (budget * iteration_ns)))


class Backoff:
    """Which interval is next, from measurement to measurement. `least`: the one that training began with."""

    def __init__(self, budget: float, least: int) -> None:
        self._budget = budget
        self._least = least
        self._too_often = 0  # the largest interval that cost too much and was not seen to do since
        self._calm = 0  # measurements since then
        self._patience = 0  # of them, until what cost too much is tried again

    def next(self, before: int, found: Measured) -> int:
        """After what was measured at an interval."""
        wanted = max(self._least, found.interval_for(self._budget))
        if wanted > before:
            in_vain = before <= self._too_often
            self._patience = min(MOST_PATIENCE, 2 * self._patience + 1) if in_vain else 0
            self._too_often, self._calm = max(self._too_often, before), 0
            return wanted
        self._calm += 1
        if before <= self._too_often:
            self._too_often, self._patience = before - 1, 0
        wanted = max(wanted, before // 4)  # a few checkpoints may have been lucky
        if wanted <= self._too_often and self._calm <= self._patience:
            return min(before, self._too_often + 1)
        return wanted


class Pacing:
    """Asked after each iteration. `budget`: a fraction of the time that training takes without checkpoints."""

    def __init__(self, engine: Engine, budget: float) -> None:
        self._engine = engine
        self._budget = budget
        self._begin(engine.executor)

    def _begin(self, executor: Executor) -> None:
        """Measure the checkpoints of a schedule, from its own interval on."""
        self._executor = executor
        self._backoff = Backoff(self._budget, executor.interval)
        self._measure()

    def _measure(self) -> None:
        self._iteration = self._executor.completed
        self._checkpoints = self._executor.pipeline.started
        self._stall_ns = self._engine.counters.waited_ns
        self._began_ns = time.perf_counter_ns()

    def restored(self) -> None:
        """Iterations that another run completed, or this one undid, are not measured."""
        self._measure()

    def ended(self) -> None:
        """An iteration ended, and the checkpoint that was due has begun."""
        executor = self._engine.executor
        if executor is not self._executor:
            self._begin(executor)
        checkpoints = executor.pipeline.started - self._checkpoints
        elapsed_ns = time.perf_counter_ns() - self._began_ns
        if checkpoints < CHECKPOINTS or elapsed_ns < SPAN_NS:
            return
        stall_ns = self._engine.counters.waited_ns - self._stall_ns
        found = Measured(executor.completed - self._iteration, checkpoints, elapsed_ns, stall_ns)
        self._measure()
        before = executor.interval
        wanted = self._backoff.next(before, found)
        if wanted != before:
            executor.pace(wanted)
            self._engine.events.append(Paced(executor.completed, wanted, before, found.overhead, self._budget))
