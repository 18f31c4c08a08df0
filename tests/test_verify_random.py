"""The verifier against a slow second opinion (player.py) on random plans, whole and damaged.

Each test changes a plan at random and asks both whether it still keeps every rule: they have to agree.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import assume, event, given
from hypothesis import strategies as st
from player import Request, fluid_bound, peak_bytes, play, requests_of, step_of

from checkflow.errors import VerificationError
from checkflow.graph import Anchor, AnchorKind, Graph, Op, Role, Tensor, View
from checkflow.lower import lower
from checkflow.plan import (
    Chunk,
    Formulation,
    Infeasible,
    Plan,
    Problem,
    ProvenBy,
    SolverRun,
    Transfer,
    Transfers,
    problem_of,
)
from checkflow.schedule import Place, Schedule, sealed
from checkflow.solve.link import plan_streaming
from checkflow.verify import verify, verify_plan
from checkflow.verify.bound import fluid_bound as verified_bound
from checkflow.verify.bound import paper_bound

NS = 10**9


@st.composite
def graphs(draw: st.DrawFn, earliest: int) -> Graph:
    """A few operators, some of no duration, with state written anywhere from a step on and anchors anywhere."""
    steps = draw(st.integers(earliest, 6))
    writes: list[list[int]] = [[] for _ in range(steps)]
    tensors = []
    for index in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 30))
        tensors.append(Tensor(f"s{index}", Role.PARAMETER, size, 0, steps, (View(f"s{index}", "uint8", (size,)),)))
        for step in draw(st.sets(st.integers(earliest, steps), min_size=index == 0, max_size=3)):
            writes[step - 1].append(index)
    for _ in range(draw(st.integers(0, 3))):
        born = draw(st.integers(1, steps))
        tensors.append(Tensor("x", Role.ACTIVATION, draw(st.integers(0, 40)), born, draw(st.integers(born, steps))))
    times = draw(st.lists(st.sampled_from((0, 5, 10, 50)), min_size=steps, max_size=steps))
    times[draw(st.integers(0, steps - 1))] += 10
    positions = sorted(draw(st.sets(st.integers(0, steps - 1))))
    return Graph(
        model="random",
        arguments=(),
        device="d",
        traced_on="cpu",
        ops=tuple(Op("op", (), tuple(w), 0, 0, "float32", ns) for w, ns in zip(writes, times, strict=True)),
        tensors=tuple(tensors),
        anchors=(
            *(Anchor(AnchorKind.FORWARD, "m", number, p) for number, p in enumerate(positions, start=1)),
            Anchor(AnchorKind.ITERATION_END, "", 1, steps),
        ),
    )


@st.composite
def problems(
    draw: st.DrawFn, earliest: int = 1, spare: tuple[int, ...] = (0, 1, NS // 3, NS, 40 * NS)
) -> tuple[Graph, Problem]:
    """A graph and a link that carries its state in a period, with so many bytes a second to spare."""
    graph = draw(graphs(earliest))
    interval = draw(st.integers(1, 3))
    size = sum(graph.tensors[i].size_bytes for i in graph.written_state)
    least = -(-size * NS // (interval * graph.iteration_time_ns))
    problem = problem_of(
        graph,
        bandwidth_bytes_per_s=least + draw(st.sampled_from(spare)),
        interval=interval,
        granule_bytes=draw(st.sampled_from((1, 3))),
        chunk_bytes=draw(st.sampled_from((None, 9))),
    )
    return graph, problem


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
        release, deadline = problem.window(problem.state[chunk.state])
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
            deadline = problem.window(problem.state[transfers[number].chunk.state])[1]
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
        release, deadline = problem.window(problem.state[chunk.state])
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
        release, deadline = problem.window(state)
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


def covers(problem: Problem, pieces: list[Chunk]) -> bool:
    """Byte by byte."""
    counts = [[0] * state.size_bytes for state in problem.state]
    for piece in pieces:
        end = piece.offset_bytes + piece.size_bytes
        if piece.size_bytes < 1 or piece.offset_bytes < 0 or end > len(counts[piece.state]):
            return False
        if piece.offset_bytes % problem.granule_bytes or piece.size_bytes > (problem.chunk_bytes or end):
            return False
        for byte in range(piece.offset_bytes, end):
            counts[piece.state][byte] += 1
    return all(count == 1 for tensor in counts for count in tensor)


def keeps_windows(problem: Problem, plan: Plan) -> bool:
    for t in plan.transfers:
        release, deadline = problem.window(problem.state[t.chunk.state])
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
        release, deadline = problem.window(problem.state[t.chunk.state])
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
        assert plan.peak_bytes >= paper_bound(problem, problem.training_peak_bytes, enough) >= fluid


# --- schedules -------------------------------------------------------------------------------------------------------


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Graph, Problem, Schedule]:
    """What checkflow itself makes of a random graph."""
    graph, problem = draw(problems())
    slack_ppm = draw(st.sampled_from((0, 100_000)))
    bandwidth_bytes_per_s = problem.bandwidth_bytes_per_s * 5 // 4  # room for the slack, mostly
    problem = problem_of(
        graph,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        interval=problem.interval,
        granule_bytes=problem.granule_bytes,
        chunk_bytes=problem.chunk_bytes,
        slack_ppm=slack_ppm,
    )
    plan = plan_streaming(problem)
    assume(not isinstance(plan, Infeasible))
    assert isinstance(plan, Plan)
    return graph, problem, lower(plan, problem, graph, bandwidth_bytes_per_s=bandwidth_bytes_per_s, slack_ppm=slack_ppm)


def executed(schedule: Schedule, problem: Problem) -> tuple[int, int] | None:
    """(executed peak, executed snapshot bytes), or None where a rule of "As executed" is broken."""
    index = {state.tensor: number for number, state in enumerate(problem.state)}
    actions = schedule.actions
    if any(action.tensor not in index for action in actions):
        return None
    if not covers(problem, [Chunk(index[a.tensor], a.offset, a.bytes) for a in actions]):
        return None
    steps = problem.steps
    anchors = [(i, n) for i in range(-1, 4 * problem.interval + 4) for n in range(1, len(schedule.anchors) + 1)]
    at = {place: (place[0] - 1) * steps + schedule.anchors[place[1] - 1].position for place in anchors}
    for action, after in pairwise(actions):
        if after.offload < action.offload:
            return None
    if actions[-1].offload > (actions[0].offload[0] + problem.interval, actions[0].offload[1]):
        return None
    requests = [Request(at[a.offload], a.bytes, index[a.tensor] if a.snapshot is None else None) for a in actions]
    times, late = play(problem, requests)
    holds = []
    for number, (action, (_, end)) in enumerate(zip(actions, times, strict=True)):
        release, deadline = problem.window(problem.state[index[action.tensor]])
        allowed = [p for p in at.values() if release <= p <= deadline]
        if action.snapshot is None:
            if action.release is not None or number in late:
                return None
            if at[action.offload] < min(allowed) or end > problem.clock(max(allowed)):
                return None
        elif (
            action.release is None
            or at[action.snapshot] not in allowed
            or action.offload < action.snapshot
            or problem.clock(at[action.release]) < end
        ):
            return None
        else:
            holds.append((at[action.snapshot] + 1, at[action.release], action.bytes))
    return peak_bytes(problem, holds), sum(size for _, _, size in holds)


def claiming(schedule: Schedule, found: tuple[int, int]) -> Schedule:
    certificate = schedule.certificate.model_copy(
        update={"executed_peak_bytes": found[0], "executed_snapshot_bytes": found[1]}
    )
    return sealed(schedule.model_copy(update={"certificate": certificate}))


@given(schedules(), st.data())
def test_action_at_another_anchor_is_accepted_only_if_it_is_still_sound(
    found: tuple[Graph, Problem, Schedule], data: st.DataObject
) -> None:
    """Verifier and player agree on actions moved to other anchors, dropped, repeated and swapped."""
    graph, problem, schedule = found
    assert verify(schedule, graph).executed_peak_bytes == schedule.certificate.executed_peak_bytes
    actions = list(schedule.actions)
    assert executed(schedule, problem) == (
        schedule.certificate.executed_peak_bytes,
        schedule.certificate.executed_snapshot_bytes,
    )
    number = data.draw(st.integers(0, len(actions) - 1))
    place: st.SearchStrategy[Place] = st.tuples(
        st.integers(0, 2 * problem.interval + 1), st.integers(1, len(graph.anchors))
    )
    kind = data.draw(st.sampled_from(("snapshot", "offload", "release", "held", "drop", "repeat", "swap")))
    if kind == "drop":
        del actions[number]
        assume(actions)
    elif kind == "repeat":
        actions.append(actions[number])
    elif kind == "swap":
        other = data.draw(st.integers(0, len(actions) - 1))
        actions[number], actions[other] = actions[other], actions[number]
    elif kind == "held":
        held = {name: data.draw(place) for name in ("snapshot", "offload", "release")}
        actions[number] = actions[number].model_copy(update=held)
    else:
        moved = data.draw(place if kind == "offload" else st.none() | place)
        actions[number] = actions[number].model_copy(update={kind: moved})
    changed = sealed(schedule.model_copy(update={"actions": tuple(actions)}))
    needs = executed(changed, problem)
    event(f"{kind}: {'sound' if needs else 'broken'}")
    changed = claiming(changed, needs) if needs else changed
    try:
        verified = verify(changed, graph)
    except VerificationError as error:
        assert needs is None, error
    else:
        assert needs == (verified.executed_peak_bytes, verified.executed_snapshot_bytes)


@given(schedules())
def test_no_tensor_is_read_after_its_deadline(found: tuple[Graph, Problem, Schedule]) -> None:
    """A schedule and its plan, played event by event over several checkpoints, read only values that are final."""
    _, problem, schedule = found
    index = {state.tensor: number for number, state in enumerate(problem.state)}
    planned = [
        Request(
            problem.window(problem.state[index[row.tensor]])[0] if row.snapshot is None else row.snapshot,
            row.bytes,
            index[row.tensor] if row.snapshot is None else None,
        )
        for row in schedule.plan
    ]
    acted = [
        Request(schedule.position(row.offload), row.bytes, index[row.tensor] if row.snapshot is None else None)
        for row in schedule.actions
    ]
    assert play(problem, planned)[1] == []
    assert play(problem, acted)[1] == []


def test_player_finds_a_late_read() -> None:
    """The player is not blind: a read that ends a tick after the overwrite begins is late."""
    problem = Problem((10, 10), (0, 0), (), 1)
    graph = Graph(
        "m", (), "d", "cpu", (Op("a", (), (), 0, 0, "", 10), Op("b", (), (0,), 0, 0, "", 10)),
        (Tensor("s", Role.PARAMETER, 20, 0, 2, (View("s", "uint8", (20,)),)),),
        (Anchor(AnchorKind.ITERATION_END, "", 1, 2),),
    )  # fmt: skip
    problem = problem_of(graph, bandwidth_bytes_per_s=2 * NS, granule_bytes=1)
    assert play(problem, [Request(0, 20, 0)]) == ([(0, 20 * NS)], [])
    assert play(problem_of(graph, bandwidth_bytes_per_s=2 * NS - 1), [Request(0, 20, 0)])[1] == [0]
    assert play(problem, [Request(-1, 20, 0)])[1] == [0]
