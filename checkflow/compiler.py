"""Graph -> proven schedule: plan, lower, verify."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from checkflow.errors import InputError
from checkflow.graph import Graph
from checkflow.lower import lower
from checkflow.plan import PPM, Formulation, Infeasible, Plan, Problem, Reason, Transfers, problem_of
from checkflow.schedule import Schedule
from checkflow.solve import solve
from checkflow.units import format_bytes
from checkflow.verify import verify

RELAXATION_STEP_PERCENT = 5


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
    if graph.iteration_time_ns <= 0:
        raise InputError(f"{graph.model}: its operators have no times; trace it with --device")
    problem = problem_of(
        graph,
        bandwidth_bytes_per_s=options.bandwidth_bytes_per_s,
        interval=options.interval or 1,
        chunk_bytes=options.chunk_bytes,
        memory_limit_bytes=options.memory_limit_bytes,
        slack_ppm=options.slack_ppm,
    )
    started = time.perf_counter()
    problem, answer = _plan(problem, options, progress)
    plan_s = time.perf_counter() - started
    if isinstance(answer, Infeasible):
        return Refused(graph, problem, _without_slack(answer, options.slack_ppm), plan_s)
    progress("moving the plan to anchors")
    schedule = lower(
        answer, problem, graph, bandwidth_bytes_per_s=options.bandwidth_bytes_per_s, slack_ppm=options.slack_ppm
    )
    progress("verifying")
    verify(schedule, graph)
    return Compiled(graph, problem, answer, schedule, plan_s)


def _plan(problem: Problem, options: Options, progress: Callable[[str], None]) -> tuple[Problem, Plan | Infeasible]:
    while True:
        progress(f"planning at interval {problem.interval}")
        answer = solve(
            problem,
            options.formulation,
            options.transfers,
            solver=options.solver,
            time_limit_s=options.time_limit_s,
            progress=progress,
        )
        if isinstance(answer, Plan):
            return problem, answer
        longer = answer.smallest_interval
        if options.interval is None and longer is not None and longer > problem.interval:
            problem = replace(problem, interval=longer)
        elif options.relax_memory and answer.reason is Reason.MEMORY and problem.memory_limit_bytes is not None:
            limit = -(-problem.memory_limit_bytes * (100 + RELAXATION_STEP_PERCENT) // 100)
            problem = replace(problem, memory_limit_bytes=limit)
        else:
            return problem, answer


def _without_slack(answer: Infeasible, slack_ppm: int) -> Infeasible:
    needed = answer.needed_bandwidth_bytes_per_s
    if needed is not None:
        needed = -(-needed * PPM // (PPM - slack_ppm))
    return replace(answer, needed_bandwidth_bytes_per_s=needed)


def explain(refused: Refused) -> str:
    """Why there is no plan and what would make one, in one line."""
    answer = refused.answer
    ways = []
    if answer.needed_bandwidth_bytes_per_s is not None:
        ways.append(f"--bandwidth {-(-answer.needed_bandwidth_bytes_per_s // 10**8) / 10:g}GB/s")
    if answer.smallest_interval is not None:
        cost = answer.snapshot_bytes_at_that_interval
        price = f" (snapshots {format_bytes(cost)})" if cost is not None else ""
        ways.append(f"--interval {answer.smallest_interval}{price}")
    if answer.reason is Reason.BANDWIDTH:
        ways.append("a larger batch")
    if answer.reason is Reason.MEMORY:
        ways.append("a higher --memory-limit, or --relax-memory")
    if answer.reason is Reason.CHUNK:
        ways.append("a smaller --chunk")
    if answer.reason is Reason.DEADLINE or (answer.reason is not Reason.MEMORY and not ways):
        ways.append("--formulation direct")
    return f"infeasible ({answer.reason}): {answer.detail}; what would do: {', or '.join(ways)}"
