"""What every policy promises, whatever it does; then each one's own rule against its definition, played out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from drawn import NS, covers, problems
from hypothesis import event, given, reject
from hypothesis import strategies as st
from player import peak_bytes, play, requests_of, step_of

from checkflow import policies
from checkflow.errors import InputError
from checkflow.graph import Role
from checkflow.plan import Infeasible, Problem, Reason, StateTensor
from checkflow.policies import checkfreq
from checkflow.policies.planned import Planned
from checkflow.verify import verify_plan

ALL = pytest.mark.parametrize("name", policies.names())
HOLDS_NO_SNAPSHOT = ("checkfreq_cpu", "synchronous")


@st.composite
def cases(draw: st.DrawFn, *, limited: bool = False) -> Problem:
    """Buffers and others on links from far too slow to idle; with `limited`, a memory limit that may be too low."""
    problem = draw(problems())[1]
    roles = draw(st.lists(st.sampled_from((Role.BUFFER, Role.PARAMETER, Role.OPTIMIZER)), min_size=4, max_size=4))
    limit = problem.training_peak_bytes + draw(st.integers(-5, problem.state_bytes + 5))
    return replace(
        problem,
        bandwidth_bytes_per_s=max(1, problem.bandwidth_bytes_per_s * draw(st.sampled_from((2, 7, 8, 9, 16, 99))) // 8),
        state=tuple(replace(tensor, role=role) for tensor, role in zip(problem.state, roles, strict=False)),
        memory_limit_bytes=max(1, limit) if limited else None,
    )


def answered(name: str, problem: Problem) -> Planned:
    """The policy's answer to a problem without a memory limit; only checkflow may have none, where it would pause."""
    answer = policies.load(name).plan(problem)
    if not isinstance(answer, Planned):
        assert name == "checkflow" and answer.reason is Reason.BANDWIDTH
        reject()  # another problem
    return answer


def pause_places(problem: Problem, runs: Problem) -> list[int]:
    """The indices of those steps of `runs` without which it would be the problem's iterations."""
    times, resident = problem.time_ns * problem.interval, problem.resident_bytes * problem.interval
    return [
        place
        for place in range(runs.steps)
        if runs.time_ns[:place] + runs.time_ns[place + 1 :] == times
        and runs.resident_bytes[:place] + runs.resident_bytes[place + 1 :] == resident
        and runs.resident_bytes[place] <= min(resident[place - 1], resident[place % len(resident)])
    ]


def windows_without(place: int, runs: Problem) -> list[tuple[int, int]]:
    """The windows of `runs` as they are when the step with that index is taken out."""

    def moved(position: int) -> int:
        iteration, within = divmod(position, runs.steps)
        return iteration * (runs.steps - 1) + within - (within > place)

    return [(moved(release), moved(deadline)) for release, deadline in map(runs.window, runs.state)]


def test_a_policy_is_a_file() -> None:
    """Each file of the folder is a policy, but for what they share."""
    folder = Path(checkfreq.__file__).parent
    assert set(policies.names()) == {path.stem for path in folder.glob("*.py")} - {"__init__", "planned"}


def test_an_unknown_policy_is_refused_in_one_line() -> None:
    """The line names the policies there are."""
    for wrong in ("check_freq", "planned", "__init__", ""):
        with pytest.raises(InputError) as error:
            policies.load(wrong)
        assert "\n" not in str(error.value) and all(name in str(error.value) for name in policies.names())


@ALL
@given(problem=cases())
def test_the_verifier_accepts_the_plan(name: str, problem: Problem) -> None:
    """Every plan keeps the rules of the problem it comes with, and the policy needs no less than its plan."""
    answer = answered(name, problem)
    verified = verify_plan(answer.plan, answer.problem)
    assert verified.bound_checked
    assert answer.peak_bytes >= verified.peak_bytes >= problem.training_peak_bytes
    assert answer.peak_bytes <= problem.training_peak_bytes + problem.state_bytes


@ALL
@given(problem=cases())
def test_a_link_played_event_by_event_agrees(name: str, problem: Problem) -> None:
    """Every byte moves once, over a link that has room for it, while its tensor or its snapshot holds its value."""
    answer = answered(name, problem)
    runs, transfers = answer.problem, answer.plan.transfers
    assert covers(problem, [transfer.chunk for transfer in transfers])
    assert problem.state_bytes * NS <= runs.clock(runs.interval * runs.steps)
    times, late = play(runs, requests_of(answer.plan, runs))
    assert not late
    assert [(t.start, t.finish) for t in transfers] == [
        (step_of(runs, begin), step_of(runs, end - 1)) for begin, end in times
    ]
    holds = [(t.snapshot + 1, t.finish, t.chunk.size_bytes) for t in transfers if t.snapshot is not None]
    assert answer.plan.peak_bytes == peak_bytes(runs, holds)


@ALL
@given(problem=cases())
def test_the_problem_is_the_one_asked_about_with_a_pause(name: str, problem: Problem) -> None:
    """The iterations are longer by the pause and by nothing else, and no tensor's window is wider than it was."""
    answer = answered(name, problem)
    runs = answer.problem
    event(f"{name}: pause {answer.pause_ns > 0}")
    assert runs.interval * runs.iteration_time_ns - problem.interval * problem.iteration_time_ns == answer.pause_ns
    if answer.pause_ns:
        assert (runs.interval, runs.steps) == (1, problem.interval * problem.steps + 1)
        possible = [windows_without(place, runs) for place in pause_places(problem, runs)]
    else:
        assert (runs.interval, runs.time_ns, runs.resident_bytes) == (
            problem.interval,
            problem.time_ns,
            problem.resident_bytes,
        )
        possible = [list(map(runs.window, runs.state))]
    assert any(
        all(
            release <= opens <= 0 <= closes == deadline
            for (release, deadline), (opens, closes) in zip(map(problem.window, problem.state), windows, strict=True)
        )
        for windows in possible
    )
    for before, after in zip(problem.state, runs.state, strict=True):
        assert replace(after, first_write=before.first_write, last_write=before.last_write) == before
    same = ("bandwidth_bytes_per_s", "chunk_bytes", "granule_bytes", "memory_limit_bytes")
    assert all(getattr(runs, field) == getattr(problem, field) for field in same)


@ALL
@given(problem=cases(limited=True))
def test_a_policy_refuses_only_for_a_true_reason(name: str, problem: Problem) -> None:
    """What is planned keeps to the limit; what is refused cannot be done, and would be as the answer says."""
    plan, limit = policies.load(name).plan, problem.memory_limit_bytes
    answer = plan(problem)
    assert limit is not None
    if isinstance(answer, Planned):
        event(f"{name}: planned")
        assert answer.peak_bytes <= limit
        verify_plan(answer.plan, answer.problem)
        return
    event(f"{name}: {answer.reason}")
    assert answer.detail and "\n" not in answer.detail
    unlimited = plan(replace(problem, memory_limit_bytes=None))
    if answer.reason is Reason.MEMORY:
        assert isinstance(unlimited, Planned) and unlimited.peak_bytes > limit
    else:
        assert answer.reason is Reason.BANDWIDTH and isinstance(unlimited, Infeasible)
        assert problem.state_bytes * NS > problem.clock(problem.interval * problem.steps)
    if needed := answer.needed_bandwidth_bytes_per_s:
        assert isinstance(plan(replace(problem, bandwidth_bytes_per_s=needed)), Planned)
        # What a memory limit asks for is found by bisection to a millionth.
        within = needed // 10**6 if name == "checkflow" else 0
        assert isinstance(plan(replace(problem, bandwidth_bytes_per_s=needed - within - 1)), Infeasible)
    elif name != "checkflow":
        assert isinstance(plan(replace(problem, bandwidth_bytes_per_s=10**18)), Infeasible)
    if longer := answer.smallest_interval:
        assert isinstance(plan(replace(problem, interval=longer)), Planned)
    elif name != "checkflow":
        assert isinstance(plan(replace(problem, interval=problem.interval + 20)), Infeasible)


@ALL
@given(problem=cases(limited=True))
def test_a_policy_answers_the_same_each_time(name: str, problem: Problem) -> None:
    """Nothing but the problem decides."""
    plan = policies.load(name).plan
    assert plan(problem) == plan(problem)


@ALL
def test_without_written_state_nothing_is_done(name: str) -> None:
    """No transfer, no pause, no byte."""
    problem = Problem((5, 0), (7, 9), (), NS, interval=2)
    answer = policies.load(name).plan(problem)
    assert isinstance(answer, Planned)
    assert (answer.problem, answer.plan.transfers, answer.pause_ns, answer.peak_bytes) == (problem, (), 0, 9)
    verify_plan(answer.plan, answer.problem)


@given(cases())
def test_checkflow_never_pauses_nor_needs_more_than_checkfreq(problem: Problem) -> None:
    """Its bound is never above CheckFreq's peak, nor is its peak where it meets the bound."""
    ours = answered("checkflow", problem)
    assert ours.problem is problem and ours.pause_ns == 0
    theirs = checkfreq.unlimited(problem)
    event(f"saved: {theirs.peak_bytes > ours.peak_bytes}")
    assert ours.plan.lower_bound_bytes == theirs.plan.lower_bound_bytes <= theirs.peak_bytes
    assert ours.peak_bytes <= theirs.peak_bytes or ours.plan.gap


@given(cases())
def test_checkflow_never_needs_more_where_steps_carry_whole_granules(problem: Problem) -> None:
    """At a granule of a byte, and a byte or more each nanosecond, the bound is met."""
    problem = replace(problem, bandwidth_bytes_per_s=-(-problem.bandwidth_bytes_per_s // NS) * NS, granule_bytes=1)
    ours = answered("checkflow", problem)
    assert ours.peak_bytes <= checkfreq.unlimited(problem).peak_bytes


@given(cases())
def test_pauses_without_a_snapshot(problem: Problem) -> None:
    """Synchronous stands still for S/B, and CheckFreq's CPU mode never longer; neither adds a byte."""
    still, beside = answered("synchronous", problem), answered("checkfreq_cpu", problem)
    assert still.pause_ns == -(-problem.state_bytes * NS // problem.bandwidth_bytes_per_s)
    assert beside.pause_ns <= still.pause_ns
    assert still.peak_bytes == beside.peak_bytes == problem.training_peak_bytes
    assert not still.plan.snapshot_bytes and not beside.plan.snapshot_bytes
    # All bytes move in the step that is the pause, the last before position 0.
    assert {(t.start, t.finish) for t in still.plan.transfers} == {(0, 0)}


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
def test_checkfreq_is_what_its_definition_says(problem: Problem) -> None:
    """Peak and pause with GPU snapshots are those of the definition played out."""
    answer = answered("checkfreq", problem)
    assert (answer.peak_bytes, answer.pause_ns) == checkfreq_played(problem)


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
def test_checkfreq_cpu_is_what_its_definition_says(problem: Problem) -> None:
    """The pause with CPU snapshots is that of the definition played out, and the same at any interval."""
    answer = answered("checkfreq_cpu", problem)
    assert answer.pause_ns == checkfreq_cpu_played(problem)


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
    answer = answered("checkfreq", problem)
    assert (answer.peak_bytes, answer.pause_ns, answer.problem.iteration_time_ns) == (peak, pause, iteration)


def test_checkfreq_frees_its_copy_whole() -> None:
    """The policy needs more than its plan, whose snapshots go one by one."""
    answer = answered("checkfreq", by_hand([(10, 3, Role.PARAMETER), (5, 3, Role.OPTIMIZER)]))
    assert (answer.plan.peak_bytes, answer.peak_bytes) == (105, 115)


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
    answer = policies.load("checkfreq").plan(problem)
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
    answer = answered("checkfreq_cpu", problem)
    assert (answer.pause_ns, answer.peak_bytes) == (pause, 100)
    assert answer.problem.interval * answer.problem.iteration_time_ns == 30 * interval + pause


@pytest.mark.parametrize("interval", [1, 3])
def test_synchronous_by_hand(interval: int) -> None:
    """Forty nanoseconds for forty bytes, at the end of the last iteration."""
    answer = answered("synchronous", by_hand([LARGE], interval=interval))
    assert (answer.pause_ns, answer.peak_bytes) == (40, 100)
    assert answer.problem.time_ns == (10, 10, 10) * interval + (40,)
    assert answer.problem.resident_bytes[-1] == 70
    assert answer.problem.window(answer.problem.state[0]) == (-1, 2)
