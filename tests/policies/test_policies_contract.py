"""What every policy promises, whatever it does; then each one's own rule against its definition, played out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
from drawn import NS, covers, problems
from hypothesis import event, given, reject
from hypothesis import strategies as st
from player import Request, clock, peak_bytes, play, standing_still, window

from checkflow import policies
from checkflow.errors import InputError, VerificationError
from checkflow.graph import Graph, Role
from checkflow.plan import Chunk, Infeasible, Problem, Reason, StateTensor
from checkflow.policies import checkfreq, checkfreq_cpu, synchronous
from checkflow.policies.rule import Asked, Ruled
from checkflow.runtime.counters import Cause
from checkflow.schedule import Place, Schedule, read_schedule, schedule_document, sealed, write_schedule
from checkflow.simulation.simulate import simulate
from checkflow.verify import verify

ALL = pytest.mark.parametrize("name", policies.names())
PLANNED = (
    "checkflow",
    "gockpt",
    "lowdiff",
    "lowdiff_plus",
    "rolling",
)  # never pause, and have no answer where the link is too slow
RULES = {"checkfreq": checkfreq, "checkfreq_cpu": checkfreq_cpu, "synchronous": synchronous}


@st.composite
def cases(draw: st.DrawFn, *, limited: bool = False) -> tuple[Graph, Problem]:
    """Buffers and others on links from far too slow to idle; with `limited`, a memory limit that may be too low."""
    graph, problem = draw(problems())
    roles = draw(st.lists(st.sampled_from((Role.BUFFER, Role.PARAMETER, Role.OPTIMIZER)), min_size=4, max_size=4))
    limit = problem.training_peak_bytes + draw(st.integers(-5, problem.state_bytes + 5))
    eighths = draw(st.sampled_from((2, 7, 8, 9, 16, 99)))
    role_of = dict(zip(graph.written_state, roles, strict=False))
    return (
        replace(graph, tensors=tuple(replace(t, role=role_of.get(i, t.role)) for i, t in enumerate(graph.tensors))),
        replace(
            problem,
            bandwidth_bytes_per_s=max(1, problem.bandwidth_bytes_per_s * eighths // 8),
            state=tuple(replace(tensor, role=role_of[tensor.tensor]) for tensor in problem.state),
            memory_limit_bytes=max(1, limit) if limited else None,
        ),
    )


def asked(name: str, case: tuple[Graph, Problem]) -> Schedule | Infeasible:
    graph, problem = case
    return policies.load(name).schedule(problem, graph, Asked(problem.bandwidth_bytes_per_s))


def answered(name: str, case: tuple[Graph, Problem]) -> Schedule:
    """The answer to a problem without a memory limit; only what plans may have none, where it would pause."""
    answer = asked(name, case)
    if isinstance(answer, Infeasible):
        assert name in PLANNED and answer.reason is Reason.BANDWIDTH
        reject()  # another problem
    return answer


def ruled(name: str, problem: Problem) -> Ruled:
    """What a rule makes of a problem without a memory limit."""
    answer = RULES[name].rule(problem)
    assert isinstance(answer, Ruled)
    return answer


def pause_ns_of(found: Ruled) -> int:
    return 0 if found.pause is None else found.pause.time_ns


def test_a_policy_is_a_file() -> None:
    """Each file of the folder is a policy, but for what they share."""
    folder = Path(checkfreq.__file__).parent
    assert set(policies.names()) == {path.stem for path in folder.glob("*.py")} - {"__init__", "rule"}
    assert set(policies.names()) == {*RULES, *PLANNED}


def test_an_unknown_policy_is_refused_in_one_line() -> None:
    """The line names the policies there are."""
    for wrong in ("check_freq", "rule", "__init__", ""):
        with pytest.raises(InputError) as error:
            policies.load(wrong)
        assert "\n" not in str(error.value) and all(name in str(error.value) for name in policies.names())


@ALL
@given(case=cases())
def test_the_verifier_accepts_the_schedule(name: str, case: tuple[Graph, Problem]) -> None:
    """What each policy answers is the schedule of the problem it was asked about, and keeps its promises."""
    graph, problem = case
    schedule = answered(name, case)
    event(f"{name}: pause {schedule.certificate.pause_ns > 0}")
    verified = verify(schedule, graph)
    assert schedule.policy == name
    assert problem.training_peak_bytes <= verified.peak_bytes
    if name in RULES:  # a copy of each byte at most; checkflow's may overlap with those of the checkpoint before
        assert verified.peak_bytes <= problem.training_peak_bytes + problem.state_bytes
    header = ("bandwidth_bytes_per_s", "interval", "chunk_bytes", "granule_bytes", "memory_limit_bytes")
    assert all(getattr(schedule, field) == getattr(problem, field) for field in header)


@ALL
@given(case=cases())
def test_a_link_played_event_by_event_agrees(name: str, case: tuple[Graph, Problem]) -> None:
    """Every byte moves once, while its tensor or snapshot holds its value; the pause is as long as it has to be."""
    _, problem = case
    schedule = answered(name, case)
    claims = schedule.certificate
    assert needed(schedule, problem) == (claims.peak_bytes, claims.snapshot_bytes, claims.pause_ns)


@pytest.mark.parametrize("name", RULES)
@given(case=cases(), data=st.data())
def test_a_changed_schedule_is_accepted_only_if_it_is_sound(
    name: str, case: tuple[Graph, Problem], data: st.DataObject
) -> None:
    """Verifier and player agree on pauses and actions at other places, and on what is read live and not copied."""
    graph, problem = case
    schedule = answered(name, case)
    place = st.tuples(st.integers(0, problem.interval + 1), st.integers(1, len(graph.anchors)))
    kind = data.draw(st.sampled_from(("pause", "offload", "release", "held", "live")))
    rows, number = list(schedule.actions), data.draw(st.integers(0, len(schedule.actions) - 1))
    if kind == "live":
        rows[number] = rows[number].model_copy(update={"snapshot": None, "release": None})
    elif kind == "held":
        rows[number] = rows[number].model_copy(update={"snapshot": rows[number].offload, "release": data.draw(place)})
    elif kind != "pause":
        rows[number] = rows[number].model_copy(update={kind: data.draw(place)})
    pause = data.draw(place) if kind == "pause" or data.draw(st.booleans()) else schedule.pause
    changed = schedule.model_copy(update={"actions": tuple(rows), "pause": pause})
    found = needed(changed, problem)
    event(f"{name}, {kind}: {'sound' if found else 'broken'}")
    if found is not None:
        training = problem.training_peak_bytes
        update = dict(zip(("peak_bytes", "snapshot_bytes", "pause_ns"), found, strict=True))
        update["gap"] = (found[0] - training) / training  # type: ignore[assignment]
        changed = changed.model_copy(update={"certificate": schedule.certificate.model_copy(update=update)})
    try:
        verify(sealed(changed), graph)
    except VerificationError as error:
        assert found is None, error
    else:
        assert found is not None


def needed(schedule: Schedule, problem: Problem) -> tuple[int, int, int] | None:
    """(peak, snapshot bytes, pause in ns) of what is played event by event; None where something is late or early."""
    pause, rows = schedule.pause, schedule.actions
    index = {state.tensor: number for number, state in enumerate(problem.state)}
    if not covers(problem, [Chunk(index[row.tensor], row.offset, row.bytes) for row in rows]):
        return None
    following = (rows[0].offload[0] + problem.interval, rows[0].offload[1])
    if any(row.offload > after.offload for row, after in pairwise(rows)) or rows[-1].offload > following:
        return None
    runs, pause_ns = problem, 0
    if pause is not None:
        if not max(rows[-1].offload, (0, len(schedule.anchors))) <= pause <= following:
            return None
        pause_ns = pause_played(schedule, pause, problem)
        runs = standing_still(problem, schedule.position(pause), pause_ns)
    requests = [
        Request(played(schedule, row.offload), row.bytes, index[row.tensor] if row.snapshot is None else None)
        for row in rows
    ]
    times, late = play(runs, requests)
    if late:
        return None
    holds = []
    for row, (_, end) in zip(rows, times, strict=True):
        opens, closes = window(problem, problem.state[index[row.tensor]])
        if row.snapshot is None or row.release is None:
            closing = sum(anchor.position <= closes for anchor in schedule.anchors)  # the last that is not after it
            at = (1, closing) if closing else (0, len(schedule.anchors))
            if row.release is not None or end > clock(runs, played(schedule, at, after_pause=True)):
                return None
            continue
        created, released = schedule.position(row.snapshot), played(schedule, row.release, after_pause=True)
        if not opens <= created <= closes or row.offload < row.snapshot or end > clock(runs, released):
            return None
        holds.append((played(schedule, row.snapshot) + 1, released, row.bytes))
    return peak_bytes(runs, holds), sum(size for _, _, size in holds), pause_ns


def pause_played(schedule: Schedule, pause: Place, problem: Problem) -> int:
    """Whole ns from arriving at the pause until the last byte has left, on a link that is idle before the first."""
    free = clock(problem, schedule.position(schedule.actions[0].offload))
    for row in schedule.actions:
        free = max(free, clock(problem, schedule.position(row.offload))) + row.bytes * NS
    left = free - clock(problem, schedule.position(pause))
    return max(0, -(-left // problem.bandwidth_bytes_per_s))


def played(schedule: Schedule, place: Place, *, after_pause: bool = False) -> int:
    """The position of a place where each checkpoint's pause is a step; `after_pause`: of what comes after it there."""
    position, pause = schedule.position(place), schedule.pause
    if pause is None:
        return position
    at, period = schedule.position(pause), schedule.interval * schedule.steps
    turn, beside = divmod(position - at, period)
    passed = turn + 1
    if not beside:  # at one place an older checkpoint comes first, and what is issued before the pause
        other = (pause[0] + turn * schedule.interval, pause[1])
        passed -= not (place > other or (place == other and (turn < 0 or (turn == 0 and after_pause))))
    return position + passed - (-at // period + 1)  # of these, as many are at position 0 or before


@ALL
@given(case=cases())
def test_training_waits_for_nothing_but_the_pause(name: str, case: tuple[Graph, Problem]) -> None:
    """At the times that were planned with, once for each checkpoint and as long as certified."""
    _, problem = case
    schedule = answered(name, case)
    checkpoints = 3
    ends = 0 if schedule.pause is None else schedule.pause[0]  # the last of them pauses in that iteration after its own
    played = simulate(schedule, problem, [problem.time_ns] * (checkpoints * problem.interval + ends))
    assert set(played.stall_ns_by_cause) <= {Cause.PAUSE}
    pauses = [found.stall_ticks[Cause.PAUSE] for found in played.iterations if found.stall_ticks]
    paused = schedule.certificate.pause_ns > 0
    assert len(pauses) >= checkpoints * paused
    assert {-(-ticks // problem.bandwidth_bytes_per_s) for ticks in pauses} <= {schedule.certificate.pause_ns}


@ALL
@given(case=cases(limited=True))
def test_a_policy_refuses_only_for_a_true_reason(name: str, case: tuple[Graph, Problem]) -> None:
    """What is scheduled keeps to the limit; what is refused cannot be done, and would be as the answer says."""
    graph, problem = case
    limit, answer = problem.memory_limit_bytes, asked(name, case)
    assert limit is not None
    if isinstance(answer, Schedule):
        event(f"{name}: scheduled")
        assert verify(answer, graph).peak_bytes <= limit
        return
    event(f"{name}: {answer.reason}")
    assert answer.detail and "\n" not in answer.detail

    def changed(**fields: object) -> Schedule | Infeasible:
        return asked(name, (graph, replace(problem, **fields)))  # type: ignore[arg-type]

    unlimited = changed(memory_limit_bytes=None)
    if answer.reason is Reason.MEMORY:
        assert isinstance(unlimited, Schedule) and unlimited.certificate.peak_bytes > limit
    else:
        assert answer.reason is Reason.BANDWIDTH and isinstance(unlimited, Infeasible)
        assert problem.state_bytes * NS > problem.clock(problem.interval * problem.steps)
    if needed := answer.needed_bandwidth_bytes_per_s:
        assert isinstance(changed(bandwidth_bytes_per_s=needed), Schedule)
        # What a memory limit asks for is found by bisection to a millionth.
        within = needed // 10**6 if name in PLANNED else 0
        assert isinstance(changed(bandwidth_bytes_per_s=needed - within - 1), Infeasible)
    elif name in RULES:
        assert isinstance(changed(bandwidth_bytes_per_s=10**18), Infeasible)
    if longer := answer.smallest_interval:
        assert isinstance(changed(interval=longer), Schedule)
    elif name in RULES:
        assert isinstance(changed(interval=problem.interval + 20), Infeasible)


@ALL
@given(case=cases(limited=True))
def test_a_policy_answers_the_same_each_time(name: str, case: tuple[Graph, Problem]) -> None:
    """Nothing but the problem decides."""
    assert asked(name, case) == asked(name, case)


@ALL
@given(case=cases())
def test_a_file_gives_the_schedule_back(name: str, case: tuple[Graph, Problem], tmp_path_factory: object) -> None:
    """What a policy says is read as it was written; what has no pause says nothing of one."""
    schedule = answered(name, case)
    assert isinstance(tmp_path_factory, pytest.TempPathFactory)
    path = tmp_path_factory.mktemp("schedules") / "s.json"
    write_schedule(path, schedule)
    assert read_schedule(path) == schedule
    document = schedule_document(schedule)
    assert ("pause" in document) == (schedule.pause is not None)
    assert ("policy" in document) == (name != "checkflow")


@ALL
@given(case=cases())
def test_without_written_state_nothing_is_done(name: str, case: tuple[Graph, Problem]) -> None:
    """No transfer, no pause, no byte."""
    graph, problem = case
    graph = replace(graph, ops=tuple(replace(op, writes=()) for op in graph.ops))
    schedule = answered(name, (graph, replace(problem, state=())))
    verify(schedule, graph)
    assert (schedule.actions, schedule.pause, schedule.certificate.pause_ns) == ((), None, 0)
    assert schedule.certificate.peak_bytes == problem.training_peak_bytes


@given(cases())
def test_checkflow_never_pauses_nor_needs_more_than_checkfreq(case: tuple[Graph, Problem]) -> None:
    """Its bound is never above CheckFreq's peak, nor is its peak where it meets the bound."""
    ours, theirs = answered("checkflow", case), answered("checkfreq", case)
    assert ours.pause is None and ours.certificate.pause_ns == 0
    claims = ours.certificate
    event(f"saved: {theirs.certificate.peak_bytes > claims.peak_bytes}")
    assert claims.lower_bound_bytes is not None and claims.lower_bound_bytes <= theirs.certificate.peak_bytes
    assert claims.peak_bytes <= theirs.certificate.peak_bytes or claims.gap


@given(cases())
def test_checkflow_never_needs_more_where_steps_carry_whole_granules(case: tuple[Graph, Problem]) -> None:
    """At a granule of a byte, and a byte or more each nanosecond, the bound is met."""
    graph, problem = case
    problem = replace(problem, bandwidth_bytes_per_s=-(-problem.bandwidth_bytes_per_s // NS) * NS, granule_bytes=1)
    ours = answered("checkflow", (graph, problem)).certificate
    assert ours.peak_bytes <= answered("checkfreq", (graph, problem)).certificate.peak_bytes
    assert ours.ideal_peak_bytes is not None
    assert ours.ideal_peak_bytes <= checkfreq.at_best(problem).peak_bytes


@given(cases())
def test_pauses_without_a_snapshot(case: tuple[Graph, Problem]) -> None:
    """Synchronous stands still for S/B, and CheckFreq's CPU mode never longer; neither adds a byte."""
    _, problem = case
    still, beside = (answered(name, case).certificate for name in ("synchronous", "checkfreq_cpu"))
    assert still.pause_ns == -(-problem.state_bytes * NS // problem.bandwidth_bytes_per_s)
    assert beside.pause_ns <= still.pause_ns
    assert still.peak_bytes == beside.peak_bytes == problem.training_peak_bytes
    assert not still.snapshot_bytes and not beside.snapshot_bytes


@given(cases())
def test_missing_anchors_never_help_a_rule(case: tuple[Graph, Problem]) -> None:
    """What runs needs no less than the rule would between any two operators, nor does it pause for less."""
    _, problem = case
    for name in RULES:
        best, runs = ruled(name, problem), answered(name, case).certificate
        assert best.peak_bytes <= runs.peak_bytes and pause_ns_of(best) <= runs.pause_ns


def checkfreq_played(problem: Problem) -> tuple[int, int]:
    """(peak, pause) of the third checkpoint with GPU snapshots, nanosecond by nanosecond, byte by byte."""
    a_ns = Fraction(problem.bandwidth_bytes_per_s, NS)
    left, peak, pause = Fraction(0), 0, 0
    for _ in range(3):
        pause = 0
        while left > 0:  # one checkpoint at a time
            left -= a_ns
            pause += 1
        left, peak = Fraction(problem.state_bytes), 0
        for _ in range(problem.interval):
            for time_ns, resident in zip(problem.time_ns, problem.resident_bytes, strict=True):
                peak = max(peak, resident + (problem.state_bytes if left > 0 else 0))
                for _ in range(time_ns):
                    left -= a_ns
    return peak, pause


@given(cases())
def test_checkfreq_is_what_its_definition_says(case: tuple[Graph, Problem]) -> None:
    """Peak and pause with GPU snapshots are those of the definition played out."""
    _, problem = case
    answer = ruled("checkfreq", problem)
    assert (answer.peak_bytes, pause_ns_of(answer)) == checkfreq_played(problem)


def checkfreq_cpu_played(problem: Problem) -> int:
    """The pause with CPU snapshots, nanosecond by nanosecond, byte by byte, in the order of first writes."""
    a_ns = Fraction(problem.bandwidth_bytes_per_s, NS)
    queue = sorted(problem.state, key=lambda tensor: tensor.first_write)
    bytes_to_go = {tensor.tensor: Fraction(tensor.size_bytes) for tensor in queue}
    pause = 0

    def pass_a_nanosecond() -> None:
        budget = a_ns
        for tensor in queue:
            moved = min(budget, bytes_to_go[tensor.tensor])
            bytes_to_go[tensor.tensor] -= moved
            budget -= moved

    for step, time_ns in enumerate(problem.time_ns, start=1):
        written = [tensor for tensor in queue if tensor.first_write == step]
        if any(tensor.role is not Role.BUFFER or bytes_to_go[tensor.tensor] for tensor in written):
            while any(bytes_to_go.values()):  # the guard waits for all, not for what is about to be written
                pass_a_nanosecond()
                pause += 1
        for _ in range(time_ns):
            pass_a_nanosecond()
    return pause


@given(cases())
def test_checkfreq_cpu_is_what_its_definition_says(case: tuple[Graph, Problem]) -> None:
    """The pause with CPU snapshots is that of the definition played out, and the same at any interval."""
    _, problem = case
    answer = ruled("checkfreq_cpu", problem)
    assert pause_ns_of(answer) == checkfreq_cpu_played(problem)


# Three steps of 10 ns on a link of one byte a nanosecond, worked out on paper.


def by_hand(
    state: Sequence[tuple[int, int, Role]], *, interval: int = 1, resident: tuple[int, int, int] = (80, 100, 70)
) -> Problem:
    """State as (bytes, step that writes it, role)."""
    tensors = tuple(StateTensor(i, f"s{i}", size, step, step, role) for i, (size, step, role) in enumerate(state))
    return Problem((10, 10, 10), resident, tensors, NS, interval=interval, granule_bytes=1)


WEIGHT = (15, 3, Role.PARAMETER)
LARGE = (40, 3, Role.PARAMETER)


@pytest.mark.parametrize(
    ("problem", "peak", "pause", "iteration"),
    [
        (by_hand([WEIGHT]), 115, 0, 30),  # gone during step 2
        (by_hand([WEIGHT], resident=(70, 80, 100)), 100, 0, 30),  # 85, 95, 100
        (by_hand([(5, 3, Role.PARAMETER), (10, 3, Role.OPTIMIZER)], resident=(70, 90, 100)), 105, 0, 30),  # whole
        (by_hand([(10, 3, Role.PARAMETER)], resident=(70, 95, 100)), 100, 0, 30),  # gone as step 1 ends
        (by_hand([LARGE]), 140, 10, 40),
        (by_hand([LARGE], interval=2), 140, 0, 30),  # gone in the second iteration's first step
        (by_hand([(70, 3, Role.PARAMETER)], interval=2), 170, 10, 70),  # the two as one
    ],
)
def test_checkfreq_by_hand(problem: Problem, peak: int, pause: int, iteration: int) -> None:
    """The whole copy is held through the step in which its last byte leaves; the next checkpoint waits for it."""
    answer = ruled("checkfreq", problem)
    period = problem.interval * problem.iteration_time_ns + pause_ns_of(answer)
    longer = period if pause_ns_of(answer) else problem.iteration_time_ns
    assert (answer.peak_bytes, pause_ns_of(answer), longer) == (peak, pause, iteration)


def test_checkfreq_frees_its_copy_whole() -> None:
    """All of it is held until its last byte has left, though the first tensor left before."""
    answer = ruled("checkfreq", by_hand([(10, 3, Role.PARAMETER), (5, 3, Role.OPTIMIZER)]))
    assert answer.peak_bytes == 115
    assert {(act.created, act.issued, act.released) for act in answer.acts} == {(0, 0, 2)}


@pytest.mark.parametrize(
    ("resident", "limit", "bandwidth"),
    [
        ((80, 100, 70), 114, 1_500_000_000),  # room at step 1 alone: 15 bytes in 10 ns
        ((85, 100, 70), 100, 1_500_000_000),  # just room at step 1
        ((86, 100, 70), 100, None),  # no room at step 1
        ((80, 85, 100), 100, 750_000_000),  # room at steps 1 and 2
        ((80, 100, 70), 99, None),  # no room for training
    ],
)
def test_checkfreq_says_which_bandwidth_keeps_to_the_limit(
    resident: tuple[int, int, int], limit: int, bandwidth: int | None
) -> None:
    """The copy has to leave before the first step that has no room for it."""
    problem = replace(by_hand([WEIGHT], resident=resident), memory_limit_bytes=limit, bandwidth_bytes_per_s=NS // 2)
    answer = checkfreq.rule(problem)
    assert isinstance(answer, Infeasible) and answer.reason is Reason.MEMORY
    assert (answer.needed_bandwidth_bytes_per_s, answer.smallest_interval) == (bandwidth, None)


@pytest.mark.parametrize(
    ("state", "pause"),
    [
        ([WEIGHT], 0),  # 20 bytes leave before step 3
        ([LARGE], 20),
        ([LARGE, (1, 2, Role.OPTIMIZER)], 31),  # one guard for all, before step 2
        ([LARGE, (10, 2, Role.BUFFER)], 30),  # the buffer leaves first and in time
        ([LARGE, (11, 2, Role.BUFFER)], 41),  # it doesn't: the guard stands before step 2
        ([LARGE, (1, 1, Role.BUFFER)], 41),  # nothing leaves before step 1
        ([(10, 2, Role.BUFFER)], 0),
    ],
)
@pytest.mark.parametrize("interval", [1, 3])
def test_checkfreq_cpu_by_hand(state: list[tuple[int, int, Role]], interval: int, pause: int) -> None:
    """Training waits at one guard for what has not left by then, once in `interval` iterations."""
    problem = by_hand(state, interval=interval)
    answer = ruled("checkfreq_cpu", problem)
    assert (pause_ns_of(answer), answer.peak_bytes) == (pause, 100)


@pytest.mark.parametrize("interval", [1, 3])
def test_synchronous_by_hand(interval: int) -> None:
    """Forty nanoseconds for forty bytes, at the end of the last iteration."""
    answer = ruled("synchronous", by_hand([LARGE], interval=interval))
    assert answer.pause is not None and answer.pause.ordinal == 0
    assert (pause_ns_of(answer), answer.peak_bytes) == (40, 100)
    assert [(act.created, act.issued, act.released) for act in answer.acts] == [(None, 0, None)]
