"""What happens when, over one period of a compiled schedule: the data that every picture of it shows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from checkflow.compiler import Compiled
from checkflow.graph import AnchorKind, Graph
from checkflow.plan import Problem
from checkflow.schedule import ActionRow
from checkflow.simulation.simulate import play


@dataclass(frozen=True, slots=True)
class LinkUse:
    """One transfer: when it occupies the link, and from when to when its snapshot exists."""

    name: str
    size_bytes: int
    begin_ns: float
    end_ns: float
    held_ns: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Timeline:
    """Times from position 0. A checkpoint's transfers may begin before it, and end after the period (they repeat)."""

    edges_ns: tuple[int, ...]  # of the period's steps, one more than there are steps; a pause is one of them
    pause: int | None  # index of that step
    training_bytes: tuple[int, ...]  # in each step
    memory_bytes: tuple[int, ...]  # in each step, with the snapshots
    spans: tuple[LinkUse, ...]
    phases: tuple[tuple[str, int], ...]  # name and beginning in ns, of the first iteration
    anchors_ns: tuple[int, ...]  # where hooks run, in each iteration
    due: tuple[tuple[int, int], ...]  # ns and bytes: what has to have left by then, or be held in a snapshot

    @property
    def period_ns(self) -> int:
        return self.edges_ns[-1]


def timeline_of(compiled: Compiled) -> Timeline:
    """The timeline of a schedule, at the derated times it was planned with."""
    problem, schedule, graph = compiled.problem, compiled.schedule, compiled.graph
    steps = problem.steps * schedule.period
    times = list(problem.time_ns * schedule.period)
    pause = None if schedule.pause is None else schedule.position(schedule.pause) % steps or steps
    if pause is not None:
        times.insert(pause, schedule.certificate.pause_ns)
    elapsed = (0, *accumulate(times))
    edges = elapsed if pause is None else (*elapsed[:pause], *elapsed[pause + 1 :])
    extra = [0] * steps
    for row in schedule.actions:
        if row.snapshot is not None and row.release is not None:
            for step in range(schedule.position(row.snapshot), schedule.position(row.release)):
                extra[step % steps] += row.bytes
    training = list(problem.resident_bytes * schedule.period)
    if pause is not None:  # nothing is allocated then
        for held in (training, extra):
            held.insert(pause, min(held[pause - 1], held[pause % steps]))
    return Timeline(
        edges_ns=elapsed,
        pause=pause,
        training_bytes=tuple(training),
        memory_bytes=tuple(a + b for a, b in zip(training, extra, strict=True)),
        spans=_spans(compiled, edges),
        phases=_phases(graph, edges),
        anchors_ns=tuple(
            edges[iteration * graph.steps + anchor.position]
            for iteration in range(schedule.period)
            for anchor in graph.anchors
        ),
        due=() if schedule.gradients else _due(problem, graph, edges),  # parts are of several iterations
    )


def _spans(compiled: Compiled, edges: tuple[int, ...]) -> tuple[LinkUse, ...]:
    """`edges`: when training leaves each position of a period, after a pause there."""
    problem, schedule = compiled.problem, compiled.schedule
    bandwidth = problem.bandwidth_bytes_per_s
    names = schedule.names()

    def held(row: ActionRow) -> tuple[float, float] | None:
        if row.snapshot is None or row.release is None:
            return None
        created, released = (at_ns(schedule.position(place)) for place in (row.snapshot, row.release))
        return created, released

    def at_ns(position: int) -> int:
        period, within = divmod(position, len(edges) - 1)
        return period * edges[-1] + edges[within]

    return tuple(
        LinkUse(
            names[passage.moved.tensor],
            passage.moved.bytes,
            passage.begin_ticks / bandwidth,
            passage.end_ticks / bandwidth,
            held(passage.moved),
        )
        for passage in play(schedule, problem)
    )


def _due(problem: Problem, graph: Graph, edges: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Deadlines on anchors: the last anchor that is not after a tensor's deadline."""
    positions = (0, *(anchor.position for anchor in graph.anchors))
    due: dict[int, int] = {}
    for tensor in problem.state:
        at_ns = edges[max(position for position in positions if position < tensor.first_write)]
        due[at_ns] = due.get(at_ns, 0) + tensor.size_bytes
    return tuple(sorted(due.items()))


def _phases(graph: Graph, edges: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    """Where forward, backward and update begin, as far as the anchors tell."""
    phases = [("forward", 0)]
    gradients = [a.position for a in graph.anchors if a.kind is AnchorKind.GRADIENT]
    updates = [a.position for a in graph.anchors if a.kind is AnchorKind.OPTIMIZER_PRE]
    forwards = [a.position for a in graph.anchors if a.kind is AnchorKind.FORWARD]
    if gradients:
        phases.append(("backward", edges[max((p for p in forwards if p <= gradients[0]), default=gradients[0])]))
    if updates and (not gradients or updates[0] >= gradients[-1]):
        phases.append(("update", edges[updates[0]]))
    return tuple(phases)
