"""Link and compute stream, a nanosecond at a time, as slowly as it takes to be obviously right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from checkflow.graph import Graph, Role
from checkflow.runtime.counters import Cause
from checkflow.schedule import ActionRow, Schedule


class _World:
    """One byte at a time leaves the front of the queue, in as many ns as the link took when it was issued."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.queue: list[tuple[int, ActionRow]] = []  # (checkpoint, action), each byte of it
        self.left_ns: list[int] = []
        self.stalls: Counter[Cause] = Counter()

    def pass_ns(self) -> None:
        self.now_ns += 1
        if self.queue:
            self.left_ns[0] -= 1
            if not self.left_ns[0]:
                del self.queue[0], self.left_ns[0]

    def wait(self, moving: Sequence[tuple[int, ActionRow]], cause: Cause) -> None:
        """Until none of these is in the queue."""
        while any(item in moving for item in self.queue):
            self.pass_ns()
            self.stalls[cause] += 1


def stepped(
    schedule: Schedule, graph: Graph, times_ns: Sequence[Sequence[int]], ns_per_byte: Sequence[int]
) -> list[tuple[int, dict[Cause, int]]]:
    """(ns, stalls by cause) of each iteration."""
    world, found = _World(), []
    anchored = {anchor.position for anchor in schedule.anchors} | {0}
    for iteration, times in enumerate(times_ns, start=1):
        began_ns, world.stalls = world.now_ns, Counter()
        checkpoints = [c for c in range(1, iteration + 1) if c % schedule.interval == 0]
        for position in range(graph.steps + 1):
            for number, anchor in enumerate(schedule.anchors, start=1):
                if anchor.position == position:
                    for checkpoint in checkpoints:
                        place = iteration - checkpoint, number
                        released = [(checkpoint, row) for row in schedule.actions if row.release == place]
                        if schedule.pause != place:
                            world.wait(released, Cause.RELEASE)
                        for row in schedule.actions:
                            if row.offload == place:
                                world.queue += [(checkpoint, row)] * row.bytes
                                world.left_ns += [ns_per_byte[iteration - 1]] * row.bytes
                        if schedule.pause == place:
                            world.wait([item for item in world.queue if item[0] == checkpoint], Cause.PAUSE)
            if position == graph.steps:
                break
            for cause in (Cause.OPTIMIZER, Cause.FORWARD):
                guarded = [
                    tensor
                    for tensor in graph.written_state
                    if max(p for p in anchored if p < graph.writes[tensor][0]) == position
                    and (graph.tensors[tensor].role is Role.BUFFER) == (cause is Cause.FORWARD)
                ]
                reading = [item for item in world.queue if item[1].tensor in guarded and item[1].snapshot is None]
                world.wait(reading, cause)
            for _ in range(times[position]):
                world.pass_ns()
        found.append((world.now_ns - began_ns, dict(world.stalls)))
    return found
