"""The verifier against a slow second opinion (player.py) on random plans, whole and damaged.

Each test changes a plan at random and asks both whether it still keeps every rule: they have to agree.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from drawn import NS, covers, problems
from hypothesis import assume, event, given
from hypothesis import strategies as st
from player import fluid_bound, peak_bytes, play, requests_of, step_of, window

from checkflow.errors import VerificationError
from checkflow.graph import Graph
from checkflow.plan import (
    Chunk,
    Formulation,
    Plan,
    Problem,
    ProvenBy,
    SolverRun,
    Transfer,
    Transfers,
)
from checkflow.verify import bound, verify_plan
from checkflow.verify.terms import terms_of_problem


@st.composite
def chunks(draw: st.DrawFn, problem: Problem) -> list[Chunk]:
    """The state cut at random granules, in random order."""
    found = []
    for index, state in enumerate(problem.state):
        granules = range(problem.granule_bytes, state.size_bytes, problem.granule_bytes)
        cuts = set(draw(st.sets(st.sampled_from(granules), max_size=3))) if granules else set()
        if problem.chunk_bytes:
            cuts |= set(range(problem.chunk_bytes, state.size_bytes, problem.chunk_bytes))
        ends = [0, *sorted(cuts), state.size_bytes]
        found += [Chunk(index, a, b - a) for a, b in pairwise(ends)]
    return draw(st.permutations(found))


def verified_bound(problem: Problem) -> int:
    """The bound of `direct` as the verifier derives it."""
    return bound.fluid_bound(terms_of_problem(problem))


def holds_of(plan: Plan) -> list[tuple[int, int, int]]:
    """A snapshot of the paper is held from its step on, others from the step after their position on."""
    later = plan.formulation is Formulation.DIRECT
    return [(t.snapshot + later, t.finish, t.chunk.size_bytes) for t in plan.transfers if t.snapshot is not None]


def timed(plan: Plan, problem: Problem) -> Plan:
    """A streaming plan with the steps and the peak that the player finds."""
    times, _ = play(problem, requests_of(plan, problem))
    transfers = tuple(
        replace(t, start=step_of(problem, begin), finish=step_of(problem, end - 1))
        for t, (begin, end) in zip(plan.transfers, times, strict=True)
    )
    plan = replace(plan, transfers=transfers)
    return replace(plan, peak_bytes=peak_bytes(problem, holds_of(plan)))


@st.composite
def streaming(draw: st.DrawFn) -> tuple[Problem, Plan]:
    """A valid streaming plan by no rule at all: any order, any snapshot position, direct where nobody minds."""
    problem = draw(problems())[1]
    transfers = []
    for chunk in draw(chunks(problem)):
        release, deadline = window(problem, problem.state[chunk.state])
        transfers.append(Transfer(chunk, draw(st.none() | st.integers(release, deadline)), 0, 0))
    plan = Plan(
        Formulation.DIRECT,
        Transfers.STREAMING,
        tuple(transfers),
        peak_bytes=0,
        lower_bound_bytes=problem.training_peak_bytes,
        proven_by=ProvenBy.MILP,
        solver=SolverRun("none", ""),
    )
    while late := play(problem, requests_of(plan, problem))[1]:
        transfers = list(plan.transfers)
        for number in late:
            deadline = window(problem, problem.state[transfers[number].chunk.state])[1]
            transfers[number] = replace(transfers[number], snapshot=deadline)
        plan = replace(plan, transfers=tuple(transfers))
    return problem, timed(plan, problem)


@st.composite
def packed(draw: st.DrawFn) -> tuple[Problem, Plan]:
    """A packed plan of any formulation, whose windows and peak are right but whose steps may be too full."""
    formulation = draw(st.sampled_from(Formulation))
    direct = formulation is Formulation.DIRECT
    problem = draw(problems(earliest=1 if direct else 2, spare=(NS, 10 * NS, 40 * NS)))[1]
    period = problem.interval * problem.steps
    transfers = []
    for chunk in draw(chunks(problem)):
        release, deadline = window(problem, problem.state[chunk.state])
        first, last = (release, release + period) if direct else (1, period)
        created = draw(st.integers(first, max(first, deadline)))
        step = draw(st.integers(created + 1, max(created + 1, last)))
        snapshot = None if direct and step <= deadline and draw(st.booleans()) else created
        transfers.append(Transfer(chunk, snapshot, step, step))
    plan = Plan(
        formulation,
        Transfers.PACKED,
        tuple(transfers),
        peak_bytes=0,
        lower_bound_bytes=problem.training_peak_bytes,
        proven_by=ProvenBy.MILP,
        solver=SolverRun("none", ""),
    )
    return problem, replace(plan, peak_bytes=peak_bytes(problem, holds_of(plan)))


@st.composite
def damaged(draw: st.DrawFn, problem: Problem, plan: Plan) -> Plan:
    """One thing changed, to something that may be as good."""
    transfers = list(plan.transfers)
    number = draw(st.integers(0, len(transfers) - 1))
    chosen, state = transfers[number], problem.state[transfers[number].chunk.state]
    kind = draw(
        st.sampled_from(("drop", "repeat", "offset", "bytes", "snapshot", "start", "finish", "swap", "cut", "peak"))
    )
    by = draw(st.sampled_from((-1, 1)))
    if kind == "drop":
        del transfers[number]
    elif kind == "repeat":
        transfers.append(chosen)
    elif kind == "offset":
        transfers[number] = replace(chosen, chunk=replace(chosen.chunk, offset_bytes=chosen.chunk.offset_bytes + by))
    elif kind == "bytes":
        transfers[number] = replace(chosen, chunk=replace(chosen.chunk, size_bytes=chosen.chunk.size_bytes + by))
    elif kind == "snapshot":
        release, deadline = window(problem, state)
        transfers[number] = replace(chosen, snapshot=draw(st.none() | st.integers(release - 1, deadline + 1)))
    elif kind == "start":
        transfers[number] = replace(chosen, start=chosen.start + by)
    elif kind == "finish":
        transfers[number] = replace(chosen, finish=chosen.finish + by)
    elif kind == "swap":
        other = draw(st.integers(0, len(transfers) - 1))
        transfers[number], transfers[other] = transfers[other], transfers[number]
    elif kind == "cut":
        at = draw(st.integers(1, chosen.chunk.size_bytes))
        transfers[number] = replace(chosen, chunk=replace(chosen.chunk, size_bytes=at))
        if rest := chosen.chunk.size_bytes - at:
            chunk = Chunk(chosen.chunk.state, chosen.chunk.offset_bytes + at, rest)
            transfers.insert(number + 1, replace(chosen, chunk=chunk))
    else:
        return replace(plan, peak_bytes=plan.peak_bytes + by)
    return replace(plan, transfers=tuple(transfers))


def keeps_windows(problem: Problem, plan: Plan) -> bool:
    for t in plan.transfers:
        release, deadline = window(problem, problem.state[t.chunk.state])
        if t.snapshot is not None and t.snapshot not in range(release, deadline + 1):
            return False
    return True


def streaming_is_sound(problem: Problem, plan: Plan) -> bool:
    if not covers(problem, [t.chunk for t in plan.transfers]) or not keeps_windows(problem, plan):
        return False
    return not play(problem, requests_of(plan, problem))[1] and timed(plan, problem) == plan


def packed_is_sound(problem: Problem, plan: Plan) -> bool:
    period = problem.interval * problem.steps
    if not covers(problem, [t.chunk for t in plan.transfers]) or any(t.start != t.finish for t in plan.transfers):
        return False
    for t in plan.transfers:
        release, deadline = window(problem, problem.state[t.chunk.state])
        if plan.formulation is not Formulation.DIRECT:
            u = deadline + 1
            fits = t.snapshot is not None and 1 <= t.snapshot <= u - 1 and t.snapshot < t.start <= period
        elif t.snapshot is None:
            fits = release < t.start <= deadline
        else:
            fits = release <= t.snapshot <= deadline and t.snapshot < t.start <= release + period
        if not fits:
            return False
    for step in range(1, period + 1):
        moved = sum(t.chunk.size_bytes for t in plan.transfers if (t.start - step) % period == 0)
        if moved * NS > problem.bandwidth_bytes_per_s * problem.time_ns[(step - 1) % problem.steps]:
            return False
    return plan.peak_bytes == peak_bytes(problem, holds_of(plan))


def accepts(problem: Problem, plan: Plan) -> bool:
    try:
        verify_plan(plan, problem)
    except VerificationError as error:
        assert "\n" not in str(error)
        return False
    return True


@given(streaming())
def test_valid_streaming_plan_is_accepted(found: tuple[Problem, Plan]) -> None:
    """Whatever order, cut and snapshots: a plan that the player finds sound passes."""
    problem, plan = found
    assert streaming_is_sound(problem, plan)
    assert verify_plan(plan, problem).peak_bytes == plan.peak_bytes


@given(streaming(), st.data())
def test_damaged_streaming_plan_is_accepted_only_if_it_is_still_sound(
    found: tuple[Problem, Plan], data: st.DataObject
) -> None:
    """Verifier and player agree on every changed plan, as it is and with its steps and peak brought up to date."""
    problem, plan = found
    plan = data.draw(damaged(problem, plan))
    sound = streaming_is_sound(problem, plan)
    event(f"as it is: {'sound' if sound else 'broken'}")
    assert accepts(problem, plan) == sound
    if covers(problem, [t.chunk for t in plan.transfers]) and keeps_windows(problem, plan):
        plan = timed(plan, problem)
        sound = streaming_is_sound(problem, plan)
        event(f"brought up to date: {'sound' if sound else 'broken'}")
        assert accepts(problem, plan) == sound


@given(packed(), st.data())
def test_packed_plan_is_accepted_only_if_it_is_sound(found: tuple[Problem, Plan], data: st.DataObject) -> None:
    """The same for packed plans of each formulation, before and after the damage."""
    problem, plan = found
    for changed in (plan, data.draw(damaged(problem, plan))):
        sound = packed_is_sound(problem, changed)
        event(f"{plan.formulation}: {'sound' if sound else 'broken'}")
        assert accepts(problem, changed) == sound


@given(problems())
def test_fluid_bound_is_that_of_the_earliest_deadline_first(found: tuple[Graph, Problem]) -> None:
    """The bound in closed form is what serving the earliest deadline first, step by step, leaves."""
    problem = found[1]
    assert max(verified_bound(problem), problem.training_peak_bytes) == fluid_bound(problem)


@given(streaming())
def test_no_plan_beats_the_fluid_bound(found: tuple[Problem, Plan]) -> None:
    """No random plan needs less than the bound that the verifier derives."""
    problem, plan = found
    assert plan.peak_bytes >= verified_bound(problem)


@given(packed())
def test_no_packed_plan_beats_its_bound(found: tuple[Problem, Plan]) -> None:
    """The bound of the paper's model holds for its plans, and is never below that of direct plans."""
    problem, plan = found
    assume(packed_is_sound(problem, plan))
    fluid = max(verified_bound(problem), problem.training_peak_bytes)
    assert plan.peak_bytes >= fluid
    if plan.formulation is not Formulation.DIRECT:
        enough = problem.training_peak_bytes + problem.state_bytes
        assert plan.peak_bytes >= bound.paper_bound(terms_of_problem(problem), enough) >= fluid
