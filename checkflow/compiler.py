"""Graph -> proven schedule: plan, lower, verify."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from checkflow.errors import InputError, VerificationError
from checkflow.graph import Graph
from checkflow.lower import anchor_grid, lower
from checkflow.plan import PPM, Formulation, Infeasible, Plan, Problem, Reason, Transfers, problem_of
from checkflow.schedule import Schedule
from checkflow.solve import solve
from checkflow.solve.link import too_large
from checkflow.solve.packed import TICKS_PER_BYTE
from checkflow.units import format_bytes
from checkflow.verify import verify

RELAXATION_STEP_PERCENT = 5
_SIZES = re.compile(r"(?:(?<=\blimit )|(?<=\blimit is )|(?<=\bmoves )|(?=\d+ bytes\b))(\d+)(?: bytes\b)?")


@dataclass(frozen=True, slots=True)
class Options:
    """What the user may choose; the defaults are the command line's."""

    bandwidth_bytes_per_s: int
    interval: int | None = 1  # None: the smallest that works
    chunk_bytes: int | None = None
    memory_limit_bytes: int | None = None
    relax_memory: bool = False  # raise the limit until a plan keeps to it, as the paper does
    slack_ppm: int = 0
    formulation: Formulation = Formulation.DIRECT
    transfers: Transfers = Transfers.STREAMING
    solver: str = "auto"
    time_limit_s: float = 300.0


@dataclass(frozen=True)
class Compiled:
    """A verified schedule, with what it was made from."""

    graph: Graph
    problem: Problem
    plan: Plan
    schedule: Schedule
    plan_s: float
    why_not_each: str = ""  # for a person: what kept it from checkpointing every iteration, where the interval was open


@dataclass(frozen=True)
class Refused:
    """No plan, and what would make one. Figures are of the link itself, slack added back."""

    graph: Graph
    problem: Problem
    answer: Infeasible
    plan_s: float


def compile_graph(
    graph: Graph, options: Options, progress: Callable[[str], None] = lambda _: None
) -> Compiled | Refused:
    """Plan a traced iteration, move the plan to anchors, and verify the result independently.

    Raises:
        InputError: a graph without times, or an option that makes no sense.
        SolverError: the solver that was asked for cannot run.
        VerificationError: the result is not what it claims, a bug in checkflow.
    """
    problem = problem_of(
        graph,
        bandwidth_bytes_per_s=options.bandwidth_bytes_per_s,
        interval=options.interval or 1,
        chunk_bytes=options.chunk_bytes,
        memory_limit_bytes=options.memory_limit_bytes,
        slack_ppm=options.slack_ppm,
    )
    if problem.iteration_time_ns <= 0:
        raise InputError(f"{graph.model}: its operators take no time at this slack; trace it with --device")
    started, why_not_each = time.perf_counter(), ""
    while True:
        answer = _planned(problem, graph, options, progress)
        if not isinstance(answer, Infeasible):
            break
        another = _another_try(problem, answer, options)
        if another is None:
            return Refused(graph, problem, _without_slack(answer, options.slack_ppm), time.perf_counter() - started)
        if another.interval > problem.interval == 1:
            why_not_each = in_units(answer.detail)
        problem = another
    plan, schedule = answer
    plan_s = time.perf_counter() - started
    progress("verifying")
    verify(schedule, graph)
    _as_asked(schedule, options)
    return Compiled(graph, problem, plan, schedule, plan_s, why_not_each)


def _as_asked(schedule: Schedule, options: Options) -> None:
    """Raises VerificationError for a schedule, however sound, of another problem than the one that was asked about."""
    limit = schedule.memory_limit_bytes if options.relax_memory else options.memory_limit_bytes
    for field, asked, found in (
        ("bandwidth_bytes_per_s", options.bandwidth_bytes_per_s, schedule.bandwidth_bytes_per_s),
        ("slack_ppm", options.slack_ppm, schedule.slack_ppm),
        ("interval", options.interval or schedule.interval, schedule.interval),
        ("chunk_bytes", options.chunk_bytes, schedule.chunk_bytes),
        ("memory_limit_bytes", limit, schedule.memory_limit_bytes),
        ("formulation", options.formulation.value, schedule.formulation),
        ("transfers", options.transfers.value, schedule.transfers),
    ):
        if asked != found:
            raise VerificationError(f"{field}: {asked!r} was asked for and the schedule has {found!r}")


def _planned(
    problem: Problem, graph: Graph, options: Options, progress: Callable[[str], None]
) -> tuple[Plan, Schedule] | Infeasible:
    """A plan and its schedule, both within the memory limit."""
    progress(f"planning at interval {problem.interval}")
    plan = solve(
        problem,
        options.formulation,
        options.transfers,
        solver=options.solver,
        time_limit_s=options.time_limit_s,
        progress=progress,
    )
    if isinstance(plan, Infeasible):
        return plan
    progress("moving the plan to anchors")
    schedule = lower(
        plan, problem, graph, bandwidth_bytes_per_s=options.bandwidth_bytes_per_s, slack_ppm=options.slack_ppm
    )
    executed, limit = schedule.certificate.executed_peak_bytes, problem.memory_limit_bytes
    if limit is None or executed <= limit:
        return plan, schedule
    detail = f"as executed, with hooks at anchors alone, the plan needs {executed} bytes and the limit is {limit}"
    if plan.formulation is not Formulation.DIRECT:
        return Infeasible(Reason.MEMORY, detail, None, None, None)
    return replace(too_large(problem, executed, limit, lambda other: anchor_grid(other, graph)), detail=detail)


def _another_try(problem: Problem, answer: Infeasible, options: Options) -> Problem | None:
    """The problem to try next, where the options leave one open."""
    longer, limit = answer.smallest_interval, problem.memory_limit_bytes
    # Past twice the interval that the link needs, nothing leaves earlier; what a bound says would do may not.
    longest = 2 * -(-problem.state_bytes * TICKS_PER_BYTE // problem.clock(problem.steps)) + 1
    hopeless = answer.reason is Reason.MEMORY and problem.interval >= longest
    if options.interval is None and longer is not None and longer > problem.interval and not hopeless:
        return replace(problem, interval=longer)
    if options.relax_memory and answer.reason is Reason.MEMORY and limit is not None:
        return replace(problem, memory_limit_bytes=-(-limit * (100 + RELAXATION_STEP_PERCENT) // 100))
    return None


def _without_slack(answer: Infeasible, slack_ppm: int) -> Infeasible:
    needed = answer.needed_bandwidth_bytes_per_s
    if needed is not None:
        needed = -(-needed * PPM // (PPM - slack_ppm))
    return replace(answer, needed_bandwidth_bytes_per_s=needed)


def in_units(detail: str) -> str:
    """ "5368709120 bytes of state" -> "5.00 GiB of state", and figures that follow "limit" or "moves"."""
    return _SIZES.sub(lambda size: format_bytes(int(size[1])), detail)


def explain(refused: Refused) -> str:
    """Why there is no plan and what would make one, in one line."""
    answer = refused.answer
    ways = []
    if answer.needed_bandwidth_bytes_per_s is not None:
        ways.append(f"--bandwidth {-(-answer.needed_bandwidth_bytes_per_s // 10**8) / 10:.1f}GB/s")
    if answer.smallest_interval is not None:
        cost = answer.snapshot_bytes_at_that_interval
        price = f" (snapshots {format_bytes(cost)})" if cost is not None else ""
        ways.append(f"--interval {answer.smallest_interval}{price}")
    if answer.reason is Reason.BANDWIDTH:
        ways.append("a larger batch")
    if answer.reason is Reason.MEMORY:
        ways.append("a higher --memory-limit, or --relax-memory")
    if answer.reason in (Reason.DEADLINE, Reason.CHUNK):
        ways.append("--formulation direct")
    return f"infeasible ({answer.reason}): {in_units(answer.detail)}; what would do: {', or '.join(ways)}"
