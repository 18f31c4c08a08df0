"""Graph -> proven schedule: plan and lower, or follow a policy's rule, and verify."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from checkflow import policies
from checkflow.errors import InputError, VerificationError
from checkflow.graph import Graph
from checkflow.lower import executed_peak_bytes, lower
from checkflow.plan import (
    PPM,
    TICKS_PER_BYTE,
    Formulation,
    Infeasible,
    Plan,
    Problem,
    Reason,
    Transfers,
    on_anchors,
    problem_of,
)
from checkflow.plan.infeasible import MOST_INTERVAL
from checkflow.plan.solve import construct, solve, transfers_for
from checkflow.policies.rule import Asked
from checkflow.schedule import Schedule
from checkflow.spelling import option
from checkflow.units import format_bytes
from checkflow.verify import verify, verify_plan

CHECKFLOW = "checkflow"  # the policy that plans
ROLLING = "rolling"  # that which has a checkpoint each iteration on a slower link
LONGEST = 1 << 16  # interval: a plan has each of its iterations' operators, and nobody waits for a longer one
AUTO = "auto"  # no policy, but a choice of one: choice.py
RELAXATION_STEP_PERCENT = 5
_ROUND_FIGURES = 20  # tried before an odd one is named
_UNITS = ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


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
    transfers: Transfers | None = None  # None: those of the formulation
    policy: str = CHECKFLOW  # another one has nothing to choose: neither formulation, transfers nor solver
    lanes: int | None = None  # of a policy that has any; None: as few as the link needs
    factors: bool = True  # of policies with gradients: these may leave as their factors
    solver: str = "auto"
    time_limit_s: float = 300.0


@dataclass(frozen=True)
class Compiled:
    """A verified schedule, with what it was made from."""

    graph: Graph
    problem: Problem
    planned: Plan | None  # None: a policy's rule was followed, and nothing had to be found
    schedule: Schedule
    plan_s: float
    why_not_each: str = ""  # for a person: what kept it from checkpointing every iteration, where the interval was open

    @property
    def plan(self) -> Plan:
        """Of policy checkflow, the only one that has any."""
        assert self.planned is not None, f"{self.schedule.policy} follows a rule"
        return self.planned


@dataclass(frozen=True)
class Refused:
    """No plan, and what would make one. Figures are of the link itself, slack added back."""

    graph: Graph
    problem: Problem
    answer: Infeasible
    plan_s: float
    options: Options


def compile_graph(
    graph: Graph, options: Options, progress: Callable[[str], None] = lambda _: None
) -> Compiled | Refused:
    """Plan a traced iteration for its anchors, or follow another policy's rule, and verify the result independently.

    Raises:
        InputError: a graph without times, or an option that makes no sense, alone or with the policy.
        SolverError: the solver that was asked for cannot run.
        VerificationError: the result is not what it claims, a bug in checkflow.
    """
    check_policy(options.policy, options.formulation, options.transfers, options.solver)
    check_lanes(options.policy, options.lanes, options.interval)
    check_interval(options.interval)
    check_ranks(options.policy, graph.world_size, divided=graph.divided)
    _check_entries(graph, options.policy)
    if graph.divided:  # what ranks have to have in common is given: another share would choose another
        options = replace(options, interval=options.interval or 1)
    problem = _problem(graph, options, options.bandwidth_bytes_per_s)
    if problem.iteration_time_ns <= 0:
        raise InputError(f"{graph.model}: its operators take no time at this slack; trace it with {option('device')}")
    started, why_not_each = time.perf_counter(), ""
    if options.policy != CHECKFLOW and options.interval is None:
        problem = _least_paused(problem, graph, options)
    while True:
        answer = _planned(problem, graph, options, progress)
        if not isinstance(answer, Infeasible):
            break
        another = _another_try(problem, answer, options)
        if another is None:
            answer = _without_slack(answer, options.slack_ppm)
            return Refused(graph, problem, answer, time.perf_counter() - started, options)
        if another.interval > problem.interval == 1:
            why_not_each = answer.detail
        problem = another
    plan, schedule = answer
    plan_s = time.perf_counter() - started
    progress("verifying")
    if plan is not None:
        verify_plan(plan, problem)
    verify(schedule, graph)
    if plan is not None:
        _as_planned(schedule, plan)
    _as_asked(schedule, options)
    return Compiled(graph, problem, plan, schedule, plan_s, why_not_each)


def check_policy(policy: str, formulation: Formulation, transfers: Transfers | None, solver: str) -> None:
    """Raises InputError for a policy that there is not, or that would not do what else is asked for."""
    if policy != AUTO:
        policies.load(policy)
    streams = transfers_for(formulation, transfers) is Transfers.STREAMING
    if policy != CHECKFLOW and not (streams and solver == "auto"):
        raise InputError(
            f"{option('policy', policy)}: its rule leaves nothing to choose; leave out {option('formulation')}, "
            f"{option('transfers')} and {option('solver')}, or use {option('policy', CHECKFLOW)}"
        )


def check_ranks(policy: str, world_size: int, *, divided: bool) -> None:
    """Raises InputError for a policy that so many ranks cannot follow, or by which each would choose for itself."""
    if policy != AUTO and world_size > 1 and policies.is_of_one_process(policy):
        raise InputError(
            f"{option('policy', policy)}: is for one process, and these are {world_size} ranks; use "
            f"{option('policy', ROLLING)} or lowdiff"
        )
    if divided and policy == AUTO:
        raise InputError(
            f"{option('divided', True)}: is not for {option('policy', policy)}, for each rank might choose another; "
            "give the one that it chooses without this"
        )


def _check_entries(graph: Graph, policy: str) -> None:
    """Raises InputError for a graph of a share that was traced for another policy than one that sends gradients."""
    if (entry := graph.entry_apart) is not None and policies.sends_gradients(policy):
        raise InputError(
            f"{graph.model}: has {entry.name}, but another rank saves {entry.of}, and gradients update both; compile "
            f"the model with {option('divided', True)} and {option('policy', policy)}, or a graph traced with both"
        )


def check_interval(interval: int | None) -> None:
    """Raises InputError for one that is too long to be planned."""
    if interval is not None and interval > LONGEST:
        raise InputError(
            f"{option('interval', interval)}: is more than {LONGEST}, the longest that is planned; compile for that, "
            "and give the longer one to attach(interval=)"
        )


def check_lanes(policy: str, lanes: int | None, interval: int | None) -> None:
    """Raises InputError for lanes of a policy that has none, of another interval than 1, or too many."""
    if lanes is None:
        return
    asked = option("lanes", lanes)
    most = None if policy == AUTO else policies.most_lanes(policy)
    if most is None:
        raise InputError(f"{asked}: policy {policy} has no lanes; use {option('policy', ROLLING)} or lowdiff")
    if not 2 <= lanes <= most:
        raise InputError(f"{asked}: is not from 2 to {most}, iterations of which each sends a part")
    if interval not in (None, 1):
        raise InputError(f"{asked}: go with a checkpoint each iteration; leave out {option('interval', interval)}")


def _least_paused(problem: Problem, graph: Graph, options: Options) -> Problem:
    """At interval 1, or at the fewest iterations in which the link carries the state where a rule pauses less then."""
    each = _ruled(problem, graph, options)
    if isinstance(each, Infeasible) or not each.certificate.pause_ns:
        return problem
    apart = replace(problem, interval=max(1, _least_interval(problem)))
    then = _ruled(apart, graph, options)
    if isinstance(then, Infeasible):
        return problem
    return apart if then.certificate.pause_ns < each.certificate.pause_ns else problem


def _least_interval(problem: Problem) -> int:
    """The fewest iterations in which the link carries the state."""
    return -(-problem.state_bytes * TICKS_PER_BYTE // problem.clock(problem.steps))


def _ruled(problem: Problem, graph: Graph, options: Options) -> Schedule | Infeasible:
    """What another policy than checkflow does."""
    asked = Asked(options.bandwidth_bytes_per_s, options.slack_ppm, options.lanes, options.factors)
    return policies.load(options.policy).schedule(problem, graph, asked)


def _as_planned(schedule: Schedule, plan: Plan) -> None:
    """Raises VerificationError where what is proven of a streaming plan is not what is proven of what runs."""
    claims = schedule.certificate
    proven, runs = (plan.peak_bytes, plan.lower_bound_bytes), (claims.peak_bytes, claims.lower_bound_bytes)
    if plan.transfers_kind is Transfers.STREAMING and proven != runs:
        raise VerificationError(f"certificate: peak and bound are {runs} bytes, and those of the plan are {proven}")


def _as_asked(schedule: Schedule, options: Options) -> None:
    """Raises VerificationError for a schedule, however sound, of another problem than the one that was asked about."""
    limit = schedule.memory_limit_bytes if options.relax_memory else options.memory_limit_bytes
    for field, asked, found in (
        ("policy", options.policy, schedule.policy),
        ("bandwidth_bytes_per_s", options.bandwidth_bytes_per_s, schedule.bandwidth_bytes_per_s),
        ("slack_ppm", options.slack_ppm, schedule.slack_ppm),
        ("interval", options.interval or schedule.interval, schedule.interval),
        ("lanes", options.lanes or schedule.lanes, schedule.lanes),
        ("chunk_bytes", options.chunk_bytes, schedule.chunk_bytes),
        ("memory_limit_bytes", limit, schedule.memory_limit_bytes),
        ("formulation", options.formulation.value, schedule.formulation),
        ("transfers", transfers_for(options.formulation, options.transfers).value, schedule.transfers),
    ):
        if asked != found:
            raise VerificationError(f"{field}: {asked!r} was asked for and the schedule has {found!r}")


def _planned(
    problem: Problem, graph: Graph, options: Options, progress: Callable[[str], None]
) -> tuple[Plan | None, Schedule] | Infeasible:
    """A plan and its schedule, both within the memory limit; a rule's schedule alone."""
    if options.policy != CHECKFLOW:
        progress(f"following {options.policy} at interval {problem.interval}")
        ruled = _ruled(problem, graph, options)
        return ruled if isinstance(ruled, Infeasible) else (None, ruled)
    progress(f"planning at interval {problem.interval}")
    plan = solve(
        problem,
        options.formulation,
        options.transfers,
        needs=partial(_executed_bytes, graph),
        solver=options.solver,
        time_limit_s=options.time_limit_s,
        progress=progress,
    )
    if isinstance(plan, Infeasible):
        return plan
    progress("moving the plan to anchors")
    bandwidth, slack_ppm = options.bandwidth_bytes_per_s, options.slack_ppm
    return plan, lower(plan, problem, graph, bandwidth_bytes_per_s=bandwidth, slack_ppm=slack_ppm)


def _executed_bytes(graph: Graph, problem: Problem, plan: Plan) -> int:
    return executed_peak_bytes(plan, problem, graph)


def _problem(graph: Graph, options: Options, bandwidth_bytes_per_s: int) -> Problem:
    problem = problem_of(
        graph,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        interval=options.interval or 1,
        chunk_bytes=options.chunk_bytes,
        memory_limit_bytes=options.memory_limit_bytes,
        slack_ppm=options.slack_ppm,
    )
    return on_anchors(problem, graph)


def _another_try(problem: Problem, answer: Infeasible, options: Options) -> Problem | None:
    """The problem to try next, where the options leave one open."""
    longer, limit, least = answer.smallest_interval, problem.memory_limit_bytes, _least_interval(problem)
    packed = transfers_for(options.formulation, options.transfers) is Transfers.PACKED
    if longer is None and answer.reason is Reason.MEMORY and packed:
        # Nothing was constructed, but a solver may find more; past twice what the link needs nothing leaves earlier.
        longer = problem.interval + 1 if problem.interval < 2 * least + 1 else None
    if longer is None and answer.reason is Reason.BANDWIDTH and problem.interval < least <= MOST_INTERVAL:
        longer = least  # there something else keeps it from a plan, which is the answer then
    if options.interval is None and longer is not None:
        return replace(problem, interval=longer)
    if options.relax_memory and answer.reason is Reason.MEMORY and limit is not None:
        return replace(problem, memory_limit_bytes=-(-limit * (100 + RELAXATION_STEP_PERCENT) // 100))
    return None


def _without_slack(answer: Infeasible, slack_ppm: int) -> Infeasible:
    needed = answer.needed_bandwidth_bytes_per_s
    if needed is not None:
        needed = -(-needed * PPM // (PPM - slack_ppm))
    return replace(answer, needed_bandwidth_bytes_per_s=needed)


def explain(refused: Refused) -> str:
    """Why there is no plan and what would make one, in one line. A plan was constructed with each figure in it."""
    ways = [text for way in (_bandwidth, _interval, _policy, _memory, _formulation) if (text := way(refused))]
    if refused.answer.reason is Reason.BANDWIDTH and refused.options.memory_limit_bytes is None:
        ways.append("a larger batch")
    would_do = f"; what would do: {', or '.join(ways)}" if ways else ""
    if ways and refused.graph.divided:
        would_do += f"; give all ranks the same {option('interval')} and {option('policy')}"
    return f"infeasible ({refused.answer.reason}): {refused.answer.detail}{_unsearched(refused)}{would_do}"


def _unsearched(refused: Refused) -> str:
    """Where nobody asked for an interval: that the one it takes is longer than any that is tried."""
    least = _least_interval(refused.problem)
    if refused.options.interval is not None or refused.answer.reason is not Reason.BANDWIDTH or least <= MOST_INTERVAL:
        return ""
    return f", so that it takes {least} iterations, more than the {MOST_INTERVAL} that auto goes to"


def _constructed(refused: Refused, problem: Problem) -> int | None:
    """What a plan of what was asked for needs, as executed within the problem's limit; None where there is none."""
    options = refused.options
    if options.policy != CHECKFLOW:
        ruled = _ruled(problem, refused.graph, options)
        return None if isinstance(ruled, Infeasible) else ruled.certificate.peak_bytes
    plan = construct(problem, options.formulation, options.transfers, needs=partial(_executed_bytes, refused.graph))
    return None if plan is None else max(plan.peak_bytes, executed_peak_bytes(plan, problem, refused.graph))


def _bandwidth(refused: Refused) -> str | None:
    """The bandwidth that is needed, or the first a little above it for which a plan comes out, as a round figure."""
    needed, options = refused.answer.needed_bandwidth_bytes_per_s, refused.options
    if needed is None:
        return None
    step = 10**8 if needed >= 10**9 else 10 ** max(0, len(str(needed)) - 3)
    figure = -(-needed // step) * step
    for tenths in range(_ROUND_FIGURES):
        asked = figure + tenths * step
        problem = replace(
            refused.problem, bandwidth_bytes_per_s=_problem(refused.graph, options, asked).bandwidth_bytes_per_s
        )
        if _constructed(refused, problem) is not None:
            return option("bandwidth", f"{asked / 10**9:.1f}GB/s" if step == 10**8 else asked)
    return option("bandwidth", needed)


def _interval(refused: Refused) -> str | None:
    longer, cost = refused.answer.smallest_interval, refused.answer.snapshot_bytes_at_that_interval
    if longer is None:
        return None
    return option("interval", longer) + (f" (snapshots {format_bytes(cost)})" if cost is not None else "")


def _policy(refused: Refused) -> str | None:
    """The policy that has a checkpoint after each iteration where the link carries the state only in several."""
    options, problem = refused.options, refused.problem
    streams = transfers_for(options.formulation, options.transfers) is Transfers.STREAMING
    bandwidth = refused.answer.reason is Reason.BANDWIDTH
    if options.policy != CHECKFLOW or not streams or not bandwidth or problem.interval > 1:
        return None
    rolling = _ruled(problem, refused.graph, replace(options, policy=ROLLING))
    return None if isinstance(rolling, Infeasible) else option("policy", ROLLING)


def _memory(refused: Refused) -> str | None:
    """The memory limit that a plan keeps to, in whole MiB, KiB or bytes."""
    if refused.answer.reason is not Reason.MEMORY:
        return None
    problem = replace(refused.problem, memory_limit_bytes=None)
    needed = _constructed(refused, problem)
    if needed is None:
        return None
    unit, name = next((unit, name) for unit, name in _UNITS if needed >= 100 * unit or unit == 1)
    return f"{option('memory_limit', f'{-(-needed // unit)}{name}')} or {option('relax_memory', True)}"


def _formulation(refused: Refused) -> str | None:
    """The formulation that plans everything another one plans, and more."""
    options = refused.options
    if options.policy != CHECKFLOW:
        return None
    if transfers_for(options.formulation, options.transfers) is Transfers.STREAMING:
        return None
    if construct(refused.problem) is None:
        return None
    if options.formulation is Formulation.DIRECT:
        return option("transfers", "streaming")
    return option("formulation", "direct")
