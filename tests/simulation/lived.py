"""The whole of a training amid failures, nanosecond by nanosecond: a trainer, and a saver that is one loop.

It shares no code with `failures.run` and `life.Lives`, and knows no closed form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from checkflow.simulation.costs import Costs
from checkflow.simulation.incidents import Incident, Loss


@dataclass
class Saver:
    """Ends what it writes, and then takes the newest staged checkpoint; with deltas each of them."""

    costs: Costs
    staged: list[int]  # not taken yet, oldest first
    durable: int
    writing: int | None = None
    until: int = 0
    disk_bytes: int = 0

    def look(self, now: int) -> None:
        """At what has ended and what is there, as often as something can begin."""
        while True:
            if self.writing is not None:
                if now < self.until:
                    return
                self.durable, self.writing = self.writing, None
            if not self.staged:
                return
            costs = self.costs
            taken = self.staged.pop(0) if costs.base_every > 1 else self.staged[-1]
            self.staged = self.staged if costs.base_every > 1 else []
            base = taken % costs.base_every == 0
            self.writing, self.until = taken, now + (costs.write_ns if base else costs.delta_write_ns)
            self.disk_bytes += costs.disk_bytes if base else costs.delta_disk_bytes


@dataclass
class Outcome:
    """By its names in `failures.Trial` and `failures.Spent`."""

    spent: Counter[str] = field(default_factory=Counter)
    iterations: int = 0
    redone: Counter[Loss] = field(default_factory=Counter)
    disk_bytes: int = 0


def lived(costs: Costs, incidents: Sequence[Incident], span: int) -> Outcome:
    """`incidents` ascend. Writes are begun back to back: no gap is kept between them."""
    outcome, saver = Outcome(), Saver(costs, [], 0)
    restored, iteration = 0, 0  # the checkpoint that was restored, and the iterations that its trainer has completed
    ran, stall = 0, 0  # ns of the iteration that runs, and of the pause that is left
    staging: dict[int, int] = {}
    staged = 0  # the newest
    down: tuple[int, int, int] | None = None  # ns of restart, restore and replay that are left
    from_disk = False  # whether what is restored is
    saving = False  # a dead trainer's saver, for which the next one waits
    for now in range(span + 1):
        if now and down:
            phase = next(index for index, left in enumerate(down) if left or (index == 0 and saving))
            outcome.spent[("restart", "restore", "replay")[phase]] += 1
            down = (down[0] - (phase == 0 and down[0] > 0), down[1] - (phase == 1), down[2] - (phase == 2))
        elif now and stall:
            stall -= 1
            outcome.spent["stall"] += 1
        elif now:
            ran += 1
            outcome.spent["ran"] += 1
            if ran == costs.iteration_ns:
                ran, iteration = 0, iteration + 1
                if iteration % costs.interval == 0:
                    number = iteration // costs.interval
                    stall = costs.delta_stall_ns if number % costs.base_every else costs.stall_ns
                    staging[number] = now + costs.staged_after_ns
        for number in [number for number, at in staging.items() if at <= now]:
            del staging[number]
            staged = number
            saver.staged.append(number)
        saver.look(now)
        saving = saving and saver.writing is not None
        if down and not any(down) and not saving:
            down = None
        if now == span:
            break
        for incident in [each for each in incidents if each.at_ns == now]:
            lost = incident.loss is Loss.MACHINE
            kept = saver.durable if lost else staged
            outcome.redone[incident.loss] += iteration - kept * costs.interval
            outcome.spent["redo"] += ran + (iteration - kept * costs.interval) * costs.iteration_ns
            # Who is killed again before it trains restores from where it would have.
            from_disk = lost or (down is not None and from_disk)
            restored, iteration, ran, stall, staged = kept, kept * costs.interval, 0, 0, kept
            staging = {}
            if lost:
                saver = Saver(costs, [], kept, disk_bytes=saver.disk_bytes)
            saving = saver.writing is not None
            replay = restored % costs.base_every * costs.replay_ns + (costs.remake_ns if restored else 0)
            restore = costs.restore_disk_ns if from_disk else costs.restore_memory_ns
            down = (costs.replace_ns if lost else costs.restart_ns, restore, replay)
            if not any(down) and not saving:
                down = None
    outcome.iterations, outcome.disk_bytes = iteration, saver.disk_bytes
    outcome.spent["useful"] = outcome.spent.pop("ran", 0) - outcome.spent["redo"]
    return outcome
