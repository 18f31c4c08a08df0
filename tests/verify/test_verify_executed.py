"""Random schedules, whole and damaged: the verifier against the event-by-event link of player.py."""

from __future__ import annotations

from itertools import pairwise

from drawn import NS, covers, problems
from hypothesis import assume, event, given
from hypothesis import strategies as st
from player import Request, clock, peak_bytes, play, window

from checkflow.errors import VerificationError
from checkflow.graph import Anchor, AnchorKind, Graph, Op, Role, Tensor, View
from checkflow.lower import lower
from checkflow.plan import Chunk, Infeasible, Plan, Problem, on_anchors, problem_of
from checkflow.plan.streaming.planner import plan_streaming
from checkflow.schedule import Place, Schedule, sealed
from checkflow.verify import verify


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
    plan = plan_streaming(on_anchors(problem, graph))
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
        release, deadline = window(problem, problem.state[index[action.tensor]])
        allowed = [p for p in at.values() if release <= p <= deadline]
        if action.snapshot is None:
            if action.release is not None or number in late:
                return None
            if at[action.offload] < min(allowed) or end > clock(problem, max(allowed)):
                return None
        elif (
            action.release is None
            or at[action.snapshot] not in allowed
            or action.offload < action.snapshot
            or clock(problem, at[action.release]) < end
        ):
            return None
        else:
            holds.append((at[action.snapshot] + 1, at[action.release], action.bytes))
    return peak_bytes(problem, holds), sum(size for _, _, size in holds)


def claiming(schedule: Schedule, found: tuple[int, int]) -> Schedule:
    peak_bytes, snapshot_bytes = found
    least_bytes = schedule.certificate.lower_bound_bytes
    assert least_bytes is not None and peak_bytes >= least_bytes
    figures = {
        "peak_bytes": peak_bytes,
        "snapshot_bytes": snapshot_bytes,
        "gap": (peak_bytes - least_bytes) / least_bytes if peak_bytes > least_bytes else 0.0,
    }
    certificate = schedule.certificate.model_copy(update=figures)
    return sealed(schedule.model_copy(update={"certificate": certificate}))


@given(schedules(), st.data())
def test_action_at_another_anchor_is_accepted_only_if_it_is_still_sound(
    found: tuple[Graph, Problem, Schedule], data: st.DataObject
) -> None:
    """Verifier and player agree on actions moved to other anchors, dropped, repeated and swapped."""
    graph, problem, schedule = found
    assert verify(schedule, graph).peak_bytes == schedule.certificate.peak_bytes
    actions = list(schedule.actions)
    assert executed(schedule, problem) == (
        schedule.certificate.peak_bytes,
        schedule.certificate.snapshot_bytes,
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
        assert needs == (verified.peak_bytes, verified.snapshot_bytes)


@given(schedules())
def test_no_tensor_is_read_after_its_deadline(found: tuple[Graph, Problem, Schedule]) -> None:
    """A schedule, played event by event over several checkpoints, reads only values that are final."""
    _, problem, schedule = found
    index = {state.tensor: number for number, state in enumerate(problem.state)}
    acted = [
        Request(schedule.position(row.offload), row.bytes, index[row.tensor] if row.snapshot is None else None)
        for row in schedule.actions
    ]
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
