"""What the runtime did, and what it cost, beside what the schedule predicted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from checkflow.runtime.counters import Cause, Counters
from checkflow.runtime.executor import Executor
from checkflow.schedule import Schedule
from checkflow.units import format_bytes, format_ns, format_rate


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals since attach. A stall is time that the compute stream waited for checkflow."""

    iterations: int
    started: int  # checkpoints
    staged: int
    skipped: int  # no slot was free
    discarded: int  # could not be vouched for
    stall_ns: int
    stall_ns_by_cause: Mapping[Cause, int]
    waits_by_cause: Mapping[Cause, int]
    last_iteration_stall_ns: int
    longest_iteration_stall_ns: int
    hook_ns: int  # host time in hooks and step(), stalls of the host included
    offloaded_bytes: int
    snapshot_bytes: int
    static_bytes: int  # of offloaded_bytes: state that the iteration does not write
    link_busy_ns: int
    predicted_iteration_ns: int  # 0 while no schedule is known
    iteration_ns: int  # mean, from step() to step()
    predicted_bytes_per_s: int
    silent_anchors: tuple[str, ...]  # the schedule uses them; did not fire when last a checkpoint was filled or due
    learned_in: int  # iteration from whose checkpoint on a schedule is followed that this run has learned; 0: none is
    unwatched: tuple[str, ...]  # state that no hook guards, or not where planned: waited for when an iteration ends

    @property
    def bytes_per_s(self) -> int:
        """Achieved while the link was busy; 0 before the first copy."""
        return self.offloaded_bytes * 10**9 // self.link_busy_ns if self.link_busy_ns else 0

    @property
    def stall_per_iteration_ns(self) -> int:
        return self.stall_ns // max(1, self.iterations)

    def __str__(self) -> str:
        """One line."""
        causes = ", ".join(f"{cause} {format_ns(time_ns)}" for cause, time_ns in self.stall_ns_by_cause.items())
        parts = [
            f"{self.iterations} iterations, {self.staged} checkpoints staged",
            *([f"{self.skipped} skipped"] if self.skipped else []),
            *([f"{self.discarded} discarded"] if self.discarded else []),
            f"{format_bytes(self.offloaded_bytes)} at {format_rate(self.bytes_per_s)}"
            + (f" (predicted {format_rate(self.predicted_bytes_per_s)})" if self.predicted_iteration_ns else ""),
            f"iteration {format_ns(self.iteration_ns)}"
            + (f" (predicted {format_ns(self.predicted_iteration_ns)})" if self.predicted_iteration_ns else ""),
            f"stall {format_ns(self.stall_per_iteration_ns)} per iteration" + (f" ({causes})" if causes else ""),
            *([f"{len(self.silent_anchors)} anchors did not fire"] if self.silent_anchors else []),
        ]
        return "; ".join(parts)


class Meter:
    """Reads the counters at each iteration's end."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._iterations = 0
        self._first_ns = self._last_ns = 0
        self._stall_ns = self._last_stall_ns = self._longest_stall_ns = 0

    def step(self) -> None:
        """An iteration ended. The first one only starts the clock: it also holds what is done once."""
        now = time.perf_counter_ns()
        self._first_ns = self._first_ns or now
        self._last_ns = now
        self._iterations += 1
        total = self._counters.stall_ns.total()
        self._last_stall_ns, self._stall_ns = total - self._stall_ns, total
        self._longest_stall_ns = max(self._longest_stall_ns, self._last_stall_ns)

    def stats(self, executor: Executor, schedule: Schedule, learned_in: int = 0) -> Stats:
        counters, pipeline = self._counters, executor.pipeline
        anchors = [f"{anchor.kind} {anchor.subject}".rstrip() for anchor in schedule.anchors]
        return Stats(
            iterations=self._iterations,
            started=pipeline.started,
            staged=pipeline.staged,
            skipped=pipeline.skipped,
            discarded=pipeline.discarded,
            stall_ns=counters.stall_ns.total(),
            stall_ns_by_cause=dict(counters.stall_ns),
            waits_by_cause=dict(counters.waits),
            last_iteration_stall_ns=self._last_stall_ns,
            longest_iteration_stall_ns=self._longest_stall_ns,
            hook_ns=counters.issue_ns,
            offloaded_bytes=counters.offloaded_bytes,
            snapshot_bytes=counters.snapshot_bytes,
            static_bytes=pipeline.static_bytes,
            link_busy_ns=counters.link_busy_ns,
            predicted_iteration_ns=schedule.iteration_time_ns,
            iteration_ns=(self._last_ns - self._first_ns) // max(1, self._iterations - 1),
            predicted_bytes_per_s=schedule.bandwidth_bytes_per_s,
            silent_anchors=tuple(anchors[number - 1] for number in sorted(executor.firings.silent)),
            learned_in=learned_in,
            unwatched=(*(storage.name for storage in executor.bound.unwatched), *executor.bound.loose),
        )
