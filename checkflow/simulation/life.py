"""What one life of a training, from a restore to a failure, has done and has kept. Closed form: no iteration is walked.

Taken for granted: there is always a slot to fill (`when_full="skip"`), a disk that is free takes the newest that is
staged, and with deltas each checkpoint is written.
"""

from __future__ import annotations

from dataclasses import dataclass

from checkflow.simulation.costs import Costs


@dataclass(frozen=True, slots=True)
class Life:
    """Checkpoints by number: m is that of iteration m * interval."""

    iterations: int  # completed, since training began
    stall_ns: int
    staged: int  # the newest that a killed trainer leaves
    durable: int | None  # the newest written in this life; None: none was
    link_bytes: int
    disk_bytes: int  # of all writes that were begun
    writing: int | None = None  # whose write is under way
    left_ns: int = 0  # of that write


class Lives:
    """Of a policy."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._work_ns = costs.interval * costs.iteration_ns
        self._cycle_ns = (
            costs.base_every * self._work_ns + costs.stall_ns + (costs.base_every - 1) * costs.delta_stall_ns
        )
        self._pace_ns = max(costs.persist_gap_ns, costs.write_ns)
        self._each = 1 if costs.base_every > 1 else max(1, -(-self._pace_ns // costs.period_ns))
        # A disk that is never idle takes what is newest when it is done, between two checkpoints' times.
        self._busy = costs.base_every == 1 and costs.write_ns > max(costs.period_ns, costs.persist_gap_ns)

    def of(self, restored: int, length_ns: int) -> Life:
        """The one that began `length_ns` ago with checkpoint `restored`."""
        costs = self._costs
        newest = self._newest(restored, length_ns)
        since_ns = length_ns - self._ended_ns(restored, newest)
        stall_ns = min(self._stall_ns(newest), since_ns) if newest > restored else 0
        staged = self._newest(restored, length_ns - costs.staged_after_ns)
        durable, written, bases_written, last, began_ns = self._written(restored, staged, length_ns)
        left_ns = 0 if last is None else max(0, began_ns + self._write_ns(last) - length_ns)
        bases = self._bases(restored, newest)
        return Life(
            iterations=newest * costs.interval + (since_ns - stall_ns) // costs.iteration_ns,
            stall_ns=self._stalls_ns(restored, newest - 1) + stall_ns,
            staged=staged,
            durable=durable,
            link_bytes=bases * costs.link_bytes + (newest - restored - bases) * costs.delta_link_bytes,
            disk_bytes=bases_written * costs.disk_bytes + (written - bases_written) * costs.delta_disk_bytes,
            writing=last if left_ns else None,
            left_ns=left_ns,
        )

    def _written(self, restored: int, staged: int, length_ns: int) -> tuple[int | None, int, int, int | None, int]:
        """The newest durable, how many writes were begun, how many of bases, the last one's checkpoint, and when."""
        costs, first = self._costs, restored + 1
        if staged < first:
            return None, 0, 0, None, 0
        if self._busy:
            began_ns = self._ended_ns(restored, first) + costs.staged_after_ns
            done = (length_ns - began_ns) // costs.write_ns
            before, now = (
                self._newest(restored, began_ns + number * costs.write_ns - costs.staged_after_ns)
                for number in (done - 1, done)
            )
            return (before if done else None), done + 1, done + 1, now, began_ns + done * costs.write_ns
        quick_ns = costs.write_ns if costs.base_every == 1 else min(costs.write_ns, costs.delta_write_ns)
        durable = self._newest(restored, length_ns - costs.staged_after_ns - quick_ns)
        while durable >= first and not self._done(restored, durable, length_ns):
            durable -= 1
        durable -= (durable - first) % self._each if durable >= first else 0
        begun = (staged - first) // self._each + 1
        bases = begun if costs.base_every == 1 else self._bases(restored, staged)
        last = first + (begun - 1) * self._each
        began_ns = self._ended_ns(restored, last) + costs.staged_after_ns
        return (durable if durable >= first else None), begun, bases, last, began_ns

    def _done(self, restored: int, checkpoint: int, length_ns: int) -> bool:
        staged_ns = self._ended_ns(restored, checkpoint) + self._costs.staged_after_ns
        return staged_ns + self._write_ns(checkpoint) <= length_ns

    def _write_ns(self, checkpoint: int) -> int:
        return self._costs.delta_write_ns if checkpoint % self._costs.base_every else self._costs.write_ns

    def _newest(self, restored: int, time_ns: int) -> int:
        """The last checkpoint whose iteration has ended by then; `restored` where none of this life's has."""
        if time_ns < self._work_ns:
            return restored
        if self._costs.base_every == 1:  # each takes as long, and the first has no other's stall before it
            return restored + (time_ns + self._costs.stall_ns) // self._cycle_ns
        found = restored + time_ns * self._costs.base_every // self._cycle_ns  # off by less than a cycle
        while self._ended_ns(restored, found + 1) <= time_ns:
            found += 1
        while found > restored and self._ended_ns(restored, found) > time_ns:
            found -= 1
        return found

    def _ended_ns(self, restored: int, checkpoint: int) -> int:
        """When a checkpoint's iteration ends, since the life began."""
        return (checkpoint - restored) * self._work_ns + self._stalls_ns(restored, checkpoint - 1)

    def _stalls_ns(self, restored: int, last: int) -> int:
        """Of the checkpoints after `restored` up to the last."""
        if last <= restored:
            return 0
        bases = self._bases(restored, last)
        return bases * self._costs.stall_ns + (last - restored - bases) * self._costs.delta_stall_ns

    def _bases(self, restored: int, last: int) -> int:
        return last // self._costs.base_every - restored // self._costs.base_every

    def _stall_ns(self, checkpoint: int) -> int:
        return self._costs.delta_stall_ns if checkpoint % self._costs.base_every else self._costs.stall_ns
