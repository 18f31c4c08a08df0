"""What the rules of other tools have in common: nothing to choose, one pause for each checkpoint, and a schedule of it.

A rule is followed on whatever positions the problem has: on a graph's anchors it is what runs, and between any two
operators it is what its tool would need at best.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from checkflow.graph import Graph
from checkflow.lower import Act, Pause, schedule_of
from checkflow.plan import TICKS_PER_BYTE, Chunk, Infeasible, Plan, Problem, Reason, SolverRun
from checkflow.plan.streaming.planner import construct_streaming
from checkflow.plan.timeline.grid import TimeGrid
from checkflow.schedule import Schedule
from checkflow.units import size_and_excess

NOTHING_TO_CHOOSE = SolverRun("none", "the policy's rule leaves nothing to choose")


@dataclass(frozen=True, slots=True)
class Ruled:
    """What a rule makes of a problem."""

    acts: tuple[Act, ...]  # in link order
    pause: Pause | None  # None: nothing of the checkpoint could still be under way
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for and no problem says: its bandwidth before slack was taken off, and lanes."""

    bandwidth_bytes_per_s: int
    slack_ppm: int = 0
    lanes: int | None = None  # None: as many as there need be
    factors: bool = True  # gradients may leave as their factors


def scheduled(
    policy: str, ruled: Ruled | Infeasible, problem: Problem, graph: Graph, asked: Asked
) -> Schedule | Infeasible:
    """The schedule of what a rule makes of a problem on the graph's anchors."""
    if isinstance(ruled, Infeasible):
        return ruled
    return schedule_of(
        ruled.acts,
        TimeGrid.of(problem),
        graph,
        bandwidth_bytes_per_s=asked.bandwidth_bytes_per_s,
        slack_ppm=asked.slack_ppm,
        solver=NOTHING_TO_CHOOSE,
        policy=policy,
        pause=ruled.pause,
    )


def whole_state(problem: Problem, *, created: int | None = None, released: int | None = None) -> tuple[Act, ...]:
    """The whole state issued at the iteration's end, what is overwritten first first: directly, or from one copy."""
    size_limit = problem.chunk_bytes and problem.chunk_bytes - problem.chunk_bytes % problem.granule_bytes
    return tuple(
        Act(Chunk(index, offset, min(size_limit or size_bytes, size_bytes - offset)), created, 0, released)
        for index, size_bytes in ((index, problem.state[index].size_bytes) for index in by_first_write(problem))
        for offset in range(0, size_bytes, size_limit or size_bytes)
    )


def constructed(problem: Problem) -> list[tuple[Plan, Problem]]:
    """The plan of a problem, with it, if the construction finds one; there is no other then."""
    plan = construct_streaming(problem)
    return [] if plan is None else [(plan, problem)]


def adds(found: Iterable[tuple[Plan, Problem]], problem: Problem) -> bool:
    """Whether none of these plans leaves the peak as it is."""
    return all(plan.peak_bytes > problem.training_peak_bytes for plan, _ in found)


def by_first_write(problem: Problem) -> list[int]:
    """Indices into Problem.state: what is overwritten first, first."""
    return sorted(range(len(problem.state)), key=lambda index: problem.state[index].first_write)


def until_arrived(grid: TimeGrid, ordinal: int) -> Pause:
    """The pause at an ordinal, for what has not left by then of the state that was issued at the iteration's end."""
    problem = grid.problem
    left_ticks = problem.state_bytes * TICKS_PER_BYTE - grid.clock(ordinal)
    return Pause(ordinal, max(0, -(-left_ticks // problem.bandwidth_bytes_per_s)))


def within_limit(ruled: Ruled, problem: Problem, needed_bandwidth_bytes_per_s: int | None) -> Ruled | Infeasible:
    """The answer, unless it needs more than the problem's memory limit; no interval helps against that."""
    limit = problem.memory_limit_bytes
    if limit is None or ruled.peak_bytes <= limit:
        return ruled
    return Infeasible(
        reason=Reason.MEMORY,
        detail=f"this policy needs {size_and_excess(ruled.peak_bytes, limit)}",
        needed_bandwidth_bytes_per_s=needed_bandwidth_bytes_per_s,
        smallest_interval=None,
        snapshot_bytes_at_that_interval=None,
    )
