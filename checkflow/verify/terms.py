"""What a plan is measured against: the terms of docs/model.md, derived here a second time.

No function of the planner runs in this package. Of a graph, a schedule's header and a policy's problem only the fields
are read; the state to be saved, its windows, the link's clock, slack and training's memory follow from them here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from checkflow.graph import Graph, Tensor
from checkflow.schedule import Schedule
from checkflow.verify.failure import fail

if TYPE_CHECKING:
    from checkflow.plan import Problem

TICKS_PER_BYTE = 10**9  # the page's, not the planner's: what checks a plan takes no figure from it
MILLION = 10**6
STATE_ROLES = ("parameter", "buffer", "optimizer")


class Saved(NamedTuple):
    """A state tensor that the iteration writes, or a gradient; the live one is as it is saved until the deadline."""

    tensor: int  # index into Graph.tensors
    name: str
    size_bytes: int
    first_write: int  # step, 1..T
    release: int  # unrolled positions
    deadline: int
    back: int = 0  # iterations before the checkpoint's whose value it is

    @property
    def window(self) -> tuple[int, int]:
        return self.release, self.deadline


@dataclass(frozen=True)
class Terms:
    """Times and bandwidth have the slack taken off."""

    time_ns: tuple[int, ...]  # of steps 1..T
    resident_bytes: tuple[int, ...]  # of training alone, at steps 1..T
    state: tuple[Saved, ...]
    bandwidth_bytes_per_s: int
    interval: int
    chunk_bytes: int | None
    granule_bytes: int
    memory_limit_bytes: int | None
    anchors: tuple[int, ...] | None  # positions, ascending, the last is T; None: something may be done at each

    @cached_property
    def steps(self) -> int:
        return len(self.time_ns)

    def places(self) -> Sequence[int]:
        """Positions in 1..T at which something may be done."""
        return range(1, self.steps + 1) if self.anchors is None else self.anchors

    @cached_property
    def training_peak_bytes(self) -> int:
        return max(self.resident_bytes, default=0)

    @cached_property
    def _elapsed_ns(self) -> list[int]:
        return [0, *accumulate(self.time_ns)]

    def clock(self, position: int) -> int:
        """B·t at an unrolled position, in ticks of 1e-9 byte."""
        iteration, within = divmod(position, self.steps)
        return self.bandwidth_bytes_per_s * (iteration * self._elapsed_ns[-1] + self._elapsed_ns[within])


def terms_of_schedule(schedule: Schedule, graph: Graph) -> Terms:
    """What the header states about the graph. Raises VerificationError for a header that cannot be kept."""
    left = MILLION - schedule.slack_ppm
    bandwidth = schedule.bandwidth_bytes_per_s * left // MILLION
    if bandwidth < 1:
        fail(f"bandwidth_bytes_per_s: {bandwidth} is not positive once slack is taken off")
    if schedule.chunk_bytes is not None and schedule.chunk_bytes < schedule.granule_bytes:
        fail(f"chunk_bytes: {schedule.chunk_bytes} is less than the granule, {schedule.granule_bytes}")
    writes: dict[int, list[int]] = {}
    for step, op in enumerate(graph.ops, start=1):
        for index in op.writes:
            writes.setdefault(index, []).append(step)
    return Terms(
        time_ns=tuple(op.time_ns * left // MILLION for op in graph.ops),
        resident_bytes=_resident_bytes(graph.tensors, len(graph.ops)),
        state=tuple(
            _saved(index, tensor.name, tensor.size_bytes, min(writes[index]), max(writes[index]), len(graph.ops))
            for index, tensor in enumerate(graph.tensors)
            if is_state(tensor) and index in writes
        ),
        bandwidth_bytes_per_s=bandwidth,
        interval=schedule.period,
        chunk_bytes=schedule.chunk_bytes,
        granule_bytes=schedule.granule_bytes,
        memory_limit_bytes=schedule.memory_limit_bytes,
        anchors=tuple(anchor.position for anchor in schedule.anchors),
    )


def terms_of_problem(problem: Problem) -> Terms:
    """The same from a problem's fields: a policy's problem has steps that no graph has."""
    return Terms(
        time_ns=problem.time_ns,
        resident_bytes=problem.resident_bytes,
        state=tuple(
            _saved(s.tensor, s.name, s.size_bytes, s.first_write, s.last_write, len(problem.time_ns))
            for s in problem.state
        ),
        bandwidth_bytes_per_s=problem.bandwidth_bytes_per_s,
        interval=problem.interval,
        chunk_bytes=problem.chunk_bytes,
        granule_bytes=problem.granule_bytes,
        memory_limit_bytes=problem.memory_limit_bytes,
        anchors=problem.anchors,
    )


def is_state(tensor: Tensor) -> bool:
    """Whether a resume needs it."""
    return tensor.role.value in STATE_ROLES


def _saved(tensor: int, name: str, size_bytes: int, first_write: int, last_write: int, steps: int) -> Saved:
    """Final from the end of the last write, one iteration back, until just before the first write."""
    return Saved(tensor, name, size_bytes, first_write, last_write - steps, first_write - 1)


def _resident_bytes(tensors: Iterable[Tensor], steps: int) -> tuple[int, ...]:
    """Bytes of all tensors that are alive at each step, from 1 on."""
    change = [0] * (steps + 2)
    for tensor in tensors:
        change[max(tensor.born, 1)] += tensor.size_bytes
        change[max(tensor.freed + 1, tensor.born, 1)] -= tensor.size_bytes
    return tuple(accumulate(change))[1:-1]


def first_from(position: int, positions: Sequence[int], steps: int) -> int:
    """The first anchor position at or after an unrolled position, r'. An anchor stands at each iteration's end."""
    iteration, within = divmod(position, steps)
    return iteration * steps + (positions[bisect_left(positions, within)] if within else 0)


def last_to(position: int, positions: Sequence[int], steps: int) -> int:
    """The last anchor position at or before an unrolled position, d'. An anchor stands at each iteration's end."""
    iteration, within = divmod(position, steps)
    before = bisect_right(positions, within)
    return iteration * steps + (positions[before - 1] if before else 0)
