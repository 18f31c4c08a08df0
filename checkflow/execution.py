"""A schedule's actions played on the link: when each transfer runs, and how much drift they survive unstalled."""

from __future__ import annotations

from dataclasses import dataclass

from checkflow.graph import Graph
from checkflow.link.grid import TICKS_PER_BYTE
from checkflow.plan import PPM, Problem, problem_of
from checkflow.schedule import ActionRow, Schedule


@dataclass(frozen=True, slots=True)
class Played:
    """One action on the link clock (ticks of 1e-9 byte, see Problem.clock)."""

    row: ActionRow
    begin_ticks: int
    end_ticks: int


def play(schedule: Schedule, problem: Problem) -> tuple[Played, ...]:
    """One checkpoint's actions in the steady state, at the times and bandwidth of `problem`."""
    period = problem.clock(problem.steps) * problem.interval
    played = _round(schedule, problem, None)
    if played and (carried := played[-1].end_ticks - period) > played[0].begin_ticks:
        played = _round(schedule, problem, carried)
    return played


def _round(schedule: Schedule, problem: Problem, free: int | None) -> tuple[Played, ...]:
    played = []
    for row in schedule.actions:
        issued = problem.clock(schedule.position(row.offload))
        begin = issued if free is None else max(free, issued)
        free = begin + row.bytes * TICKS_PER_BYTE
        played.append(Played(row, begin, free))
    return tuple(played)


def tolerated_drift_ppm(schedule: Schedule, graph: Graph) -> int:
    """How much slower the link (or faster every operator) may be before a guard or a release waits, in millionths.

    Found by bisection: a slower link only ever ends each transfer later.
    """
    low, high = 0, PPM
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _unstalled(schedule, graph, middle) else (low, middle)
    return low


def _unstalled(schedule: Schedule, graph: Graph, drift_ppm: int) -> bool:
    bandwidth = schedule.bandwidth_bytes_per_s * (PPM - drift_ppm) // PPM
    if bandwidth < 1:
        return False
    problem = problem_of(graph, bandwidth_bytes_per_s=bandwidth, interval=schedule.interval)
    if problem.state_bytes * TICKS_PER_BYTE > problem.clock(problem.steps) * problem.interval:
        return False
    positions = [anchor.position for anchor in schedule.anchors]
    due = {
        tensor.tensor: problem.clock(max((p for p in (0, *positions) if p < tensor.first_write), default=0))
        for tensor in problem.state
    }
    return all(
        item.end_ticks
        <= (due[item.row.tensor] if item.row.release is None else problem.clock(schedule.position(item.row.release)))
        for item in play(schedule, problem)
    )
