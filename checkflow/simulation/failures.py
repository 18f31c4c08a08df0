"""Failures against a policy, event by event: what training keeps, does again, and waits for.

Any failure stops all devices. A killed trainer's saver ends the write that it is at, and then writes the newest staged
checkpoint if that is another. The next trainer waits for both; if it is killed, too, they go on. A lost machine takes
along what is not durable. What fails while training is restored restores it again.
Each nanosecond is counted once: useful, stall, redo, restart, restore and replay add up to the span.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from scipy.stats import binom

from checkflow.simulation.costs import Costs
from checkflow.simulation.incidents import Incident, Loss
from checkflow.simulation.life import Life, Lives

MOST_FAILURES = 20_000  # after which a run ends: shares no longer change


@dataclass(slots=True)
class Spent:
    """Where the time went, ns."""

    useful_ns: int = 0  # iterations that were kept, each once
    stall_ns: int = 0
    redo_ns: int = 0  # iterations that were lost, and what had been done of the one that ran
    restart_ns: int = 0
    restore_ns: int = 0
    replay_ns: int = 0

    @property
    def wasted_ns(self) -> int:
        return self.stall_ns + self.redo_ns + self.restart_ns + self.restore_ns + self.replay_ns


@dataclass(frozen=True, slots=True)
class Trial:
    """Of one run. Bytes are those of one device."""

    span_ns: int
    spent: Spent
    iterations: int  # kept at the end
    failures: dict[Loss, int]
    redone: dict[Loss, int]  # completed iterations that were lost, by what was
    link_bytes: int
    disk_bytes: int

    @property
    def effective(self) -> float:
        """Effective training time ratio: the share of time in which training got ahead."""
        return self.spent.useful_ns / self.span_ns

    @property
    def wasted(self) -> float:
        return self.spent.wasted_ns / self.span_ns


def run(costs: Costs, incidents: Iterable[Incident], span_ns: int) -> Trial:
    """Train for `span_ns`, or until MOST_FAILURES. `incidents` ascend in time."""
    training = _Training(costs)
    for number, incident in enumerate(incidents):
        if incident.at_ns >= span_ns:
            break
        if number == MOST_FAILURES:
            return training.end(max(1, incident.at_ns))
        training.fail(incident)
    return training.end(span_ns)


@dataclass(frozen=True, slots=True)
class _Write:
    """A killed trainer's saver's."""

    checkpoint: int
    begins_ns: int
    ends_ns: int
    disk_bytes: int  # that no life has counted


class _Training:
    def __init__(self, costs: Costs) -> None:
        self._costs, self._lives = costs, Lives(costs)
        self._spent = Spent()
        self._failures, self._redone = dict.fromkeys(Loss, 0), dict.fromkeys(Loss, 0)
        self._link_bytes = self._disk_bytes = 0
        self._restored = 0  # the checkpoint that this life began with, or that is being restored
        self._durable = 0  # the newest, without `_writes`
        self._writes: tuple[_Write, ...] = ()  # what was left when the trainer was killed, until it is looked at
        self._saved_at_ns = 0  # when what is being restored is durable
        self._restore_ns = 0  # what reading it takes
        self._down_at_ns = self._restart_end_ns = self._restore_end_ns = self._up_at_ns = 0

    def fail(self, incident: Incident) -> None:
        now_ns, loss = incident.at_ns, incident.loss
        self._failures[loss] += 1
        if now_ns >= self._up_at_ns:
            self._die(now_ns, loss)
        else:
            self._die_again(now_ns, loss)
        down_ns = self._costs.replace_ns if loss is Loss.MACHINE else self._costs.restart_ns
        deltas = self._restored % self._costs.base_every
        replay_ns = deltas * self._costs.replay_ns + (self._costs.remake_ns if self._restored else 0)
        self._down_at_ns = now_ns
        self._restart_end_ns = max(now_ns + down_ns, self._saved_at_ns)
        self._restore_end_ns = self._restart_end_ns + self._restore_ns
        self._up_at_ns = self._restore_end_ns + replay_ns

    def end(self, now_ns: int) -> Trial:
        costs = self._costs
        iterations = self._restored * costs.interval
        self._spent.useful_ns = iterations * costs.iteration_ns
        self._wait_until(min(now_ns, self._up_at_ns))
        self._write_until(now_ns)
        if now_ns > self._up_at_ns:
            life = self._lives.of(self._restored, now_ns - self._up_at_ns)
            self._spent.stall_ns += life.stall_ns
            self._spent.useful_ns += now_ns - self._up_at_ns - life.stall_ns
            iterations = life.iterations
            self._link_bytes += life.link_bytes
            self._disk_bytes += life.disk_bytes
        return Trial(now_ns, self._spent, iterations, self._failures, self._redone, self._link_bytes, self._disk_bytes)

    def _die(self, now_ns: int, loss: Loss) -> None:
        """While it trains."""
        costs, before = self._costs, self._restored
        self._wait_until(self._up_at_ns)
        self._write_until(self._up_at_ns)
        length_ns = now_ns - self._up_at_ns
        life = self._lives.of(before, length_ns)
        self._link_bytes += life.link_bytes
        self._disk_bytes += life.disk_bytes
        self._durable = max(before if life.durable is None else life.durable, before)
        self._saved_at_ns = now_ns
        if loss is Loss.MACHINE:
            self._restored, self._restore_ns = self._durable, costs.restore_disk_ns
        else:
            self._restored, self._restore_ns = life.staged, costs.restore_memory_ns
            self._writes = self._left(life, now_ns)
            if self._writes:
                self._saved_at_ns = self._writes[-1].ends_ns
        kept_ns = (self._restored - before) * costs.interval * costs.iteration_ns
        self._spent.stall_ns += life.stall_ns
        self._spent.redo_ns += length_ns - life.stall_ns - kept_ns
        self._redone[loss] += life.iterations - self._restored * costs.interval

    def _die_again(self, now_ns: int, loss: Loss) -> None:
        """Before it trains: of what is restored nothing is lost, unless only memory had it."""
        self._wait_until(now_ns)
        if loss is Loss.MACHINE:
            self._write_until(now_ns)
            lost = (self._restored - self._durable) * self._costs.interval
            self._redone[loss] += lost
            self._spent.redo_ns += lost * self._costs.iteration_ns
            self._restored, self._restore_ns = self._durable, self._costs.restore_disk_ns
            self._saved_at_ns = now_ns

    def _left(self, life: Life, now_ns: int) -> tuple[_Write, ...]:
        """What the saver of a killed trainer writes: what it is at, and the newest staged."""
        costs, found = self._costs, []
        if life.writing is not None:
            found.append(_Write(life.writing, now_ns, now_ns + life.left_ns, 0))
        if life.staged not in (self._durable, life.writing):
            begins_ns, base = now_ns + life.left_ns, life.staged % costs.base_every == 0
            ends_ns = begins_ns + (costs.write_ns if base else costs.delta_write_ns)
            size_bytes = costs.disk_bytes if base else costs.delta_disk_bytes
            found.append(_Write(life.staged, begins_ns, ends_ns, size_bytes))
        return tuple(found)

    def _write_until(self, now_ns: int) -> None:
        """Count what has been written by then, after which nobody writes it."""
        for write in self._writes:
            if write.begins_ns <= now_ns:
                self._disk_bytes += write.disk_bytes
            if write.ends_ns <= now_ns:
                self._durable = write.checkpoint
        self._writes = ()

    def _wait_until(self, now_ns: int) -> None:
        """Count what of restart, restore and replay has passed."""
        restarted_ns, restored_ns = min(now_ns, self._restart_end_ns), min(now_ns, self._restore_end_ns)
        self._spent.restart_ns += restarted_ns - self._down_at_ns
        self._spent.restore_ns += restored_ns - restarted_ns
        self._spent.replay_ns += now_ns - restored_ns


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, and where that of all possible runs lies with 95% confidence, whatever the distribution."""

    median: float
    low: float
    high: float


def spread(values: Iterable[float]) -> Spread:
    """Of runs with different seeds. The interval is between order statistics; of fewer than six it is all there is."""
    ordered = sorted(values)
    below = max(1, int(binom.ppf(0.025, len(ordered), 0.5)))
    return Spread(median(ordered), ordered[below - 1], ordered[-below])
