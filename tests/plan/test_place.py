"""Direct offload on a streaming link: the bound is right, and the plan meets it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.graphfile import read_graph
from checkflow.plan import TICKS_PER_BYTE, Infeasible, Plan, Problem, Reason, StateTensor
from checkflow.plan.streaming.place import place, snapshots_of
from checkflow.plan.streaming.planner import plan_streaming
from checkflow.plan.timeline.fluid import earliest_deadline_first, link_carries, lower_bound_bytes
from checkflow.plan.timeline.grid import TimeGrid
from checkflow.verify import verify_plan

BYTE_PER_NS = 1_000_000_000


@st.composite
def problems(draw: st.DrawFn, bandwidth: int | None = BYTE_PER_NS) -> Problem:
    """Small problems; with one byte a nanosecond every step carries a whole number of bytes."""
    steps = draw(st.integers(1, 7))
    writes = st.tuples(st.integers(1, steps), st.integers(1, steps)).map(sorted)
    tensors = draw(st.lists(st.tuples(st.integers(1, 6), writes), min_size=1, max_size=5))
    return Problem(
        time_ns=tuple(draw(st.lists(st.integers(0, 4), min_size=steps, max_size=steps).filter(any))),
        resident_bytes=tuple(draw(st.lists(st.integers(0, 20), min_size=steps, max_size=steps))),
        state=tuple(StateTensor(i, f"t{i}", size, u, w) for i, (size, (u, w)) in enumerate(tensors)),
        bandwidth_bytes_per_s=bandwidth or draw(st.integers(BYTE_PER_NS // 3, 3 * BYTE_PER_NS)),
        interval=draw(st.integers(1, 3)),
        granule_bytes=1,
    )


@st.composite
def grids(draw: st.DrawFn, bandwidth: int | None = BYTE_PER_NS) -> TimeGrid:
    """All positions, or some of them."""
    problem = draw(problems(bandwidth))
    chosen = draw(st.sets(st.integers(1, problem.steps)))
    return TimeGrid(problem, tuple(sorted(chosen | {problem.steps})))


def byte_by_byte(grid: TimeGrid) -> int:
    """The least peak, by moving one byte a nanosecond, earliest deadline first, over several periods from empty."""
    problem = grid.problem
    period_ns = problem.iteration_time_ns * problem.interval
    periods = 4
    jobs = [
        [grid.clock(release) // TICKS_PER_BYTE + turn * period_ns, deadline + turn * grid.period_cells, t.size_bytes]
        for turn in range(-1, periods + 2)
        for t, (release, deadline) in ((t, grid.window(t)) for t in problem.state)
    ]
    clocks = [(cell, grid.clock(cell) // TICKS_PER_BYTE) for cell in range(periods * grid.period_cells)]
    peak = 0
    now = min(release for release, _, _ in jobs)
    for cell, at_ns in clocks:
        while now < at_ns:
            waiting = [job for job in jobs if job[0] <= now and job[2] > 0]
            if waiting:
                min(waiting, key=lambda job: job[1])[2] -= 1
            now += 1
        late = sum(left for _, deadline, left in jobs if deadline <= cell)
        if cell >= (periods - 1) * grid.period_cells:
            peak = max(peak, late + grid.resident_bytes[cell % grid.cells_per_iteration])
    return peak


@given(grids())
def test_bound_is_what_a_byte_by_byte_link_needs(grid: TimeGrid) -> None:
    """The bound by arithmetic equals the peak of a simulation that moves single bytes."""
    assume(link_carries(grid))
    assert lower_bound_bytes(grid, earliest_deadline_first(grid)) == byte_by_byte(grid)


@given(grids())
def test_plan_meets_the_bound_where_steps_carry_whole_bytes(grid: TimeGrid) -> None:
    """With a granule of one byte and whole bytes in every step, the plan's peak is the bound."""
    assume(link_carries(grid))
    placement = place(grid)
    assert placement.peak_bytes == placement.lower_bound_bytes


@given(grids(bandwidth=None))
def test_plan_covers_the_state_in_order_on_one_link(grid: TimeGrid) -> None:
    """At any bandwidth: every byte once, one transfer at a time, direct ones in time, snapshots made in the window."""
    assume(link_carries(grid))
    placement = place(grid)
    covered: dict[int, list[tuple[int, int]]] = {}
    free = placement.placed[-1].end_ticks - grid.period_ticks
    for part in placement.placed:
        release, deadline = grid.window(grid.problem.state[part.chunk.state])
        covered.setdefault(part.chunk.state, []).append((part.chunk.offset_bytes, part.chunk.size_bytes))
        assert part.begin_ticks >= max(free, grid.clock(release))
        free = part.end_ticks
        if part.created is None:
            assert part.end_ticks <= grid.clock(deadline)
        else:
            assert part.released is not None
            assert release <= part.created <= deadline
            assert grid.clock(part.created) <= part.begin_ticks
            assert grid.clock(part.released) >= part.end_ticks
    for state, tensor in enumerate(grid.problem.state):
        at = 0
        for offset, size in sorted(covered[state]):
            assert offset == at
            at += size
        assert at == tensor.size_bytes
    assert placement.lower_bound_bytes <= placement.peak_bytes
    assert placement.peak_bytes == max(grid.memory_bytes(snapshots_of(placement.placed)))


@given(problems(), st.integers(1, 4))
def test_smaller_chunks_never_change_the_peak(problem: Problem, chunk_bytes: int) -> None:
    """A limit on chunks cuts them, and costs nothing."""
    whole, cut = plan_streaming(problem), plan_streaming(replace(problem, chunk_bytes=chunk_bytes))
    assert isinstance(cut, Plan) == isinstance(whole, Plan)
    assume(isinstance(whole, Plan))
    assert isinstance(cut, Plan) and isinstance(whole, Plan)
    assert cut.peak_bytes == whole.peak_bytes
    assert max(t.chunk.size_bytes for t in cut.transfers) <= chunk_bytes


@given(problems(bandwidth=None))
def test_what_an_infeasible_answer_advises_works(problem: Problem) -> None:
    """The needed bandwidth and the smallest interval are feasible, and one less of either is not."""
    answer = plan_streaming(problem)
    assume(isinstance(answer, Infeasible))
    assert isinstance(answer, Infeasible) and answer.reason is Reason.BANDWIDTH
    needed, interval = answer.needed_bandwidth_bytes_per_s, answer.smallest_interval
    assert needed is not None and interval is not None
    assert isinstance(plan_streaming(replace(problem, bandwidth_bytes_per_s=needed)), Plan)
    assert isinstance(plan_streaming(replace(problem, bandwidth_bytes_per_s=needed - 1)), Infeasible)
    there = plan_streaming(replace(problem, interval=interval))
    assert isinstance(there, Plan)
    assert there.snapshot_bytes == answer.snapshot_bytes_at_that_interval
    assert isinstance(plan_streaming(replace(problem, interval=interval - 1)), Infeasible)


def test_state_that_leaves_in_time_costs_nothing() -> None:
    """Hand-made: 6 bytes due after 6 ns leave directly, and the peak is the training peak."""
    problem = Problem((3, 3, 1), (5, 9, 5), (StateTensor(0, "w", 6, 3, 3),), BYTE_PER_NS, granule_bytes=1)
    plan = plan_streaming(problem)
    assert isinstance(plan, Plan)
    assert (plan.peak_bytes, plan.lower_bound_bytes, plan.snapshot_bytes, plan.gap) == (9, 9, 0, 0.0)


def test_what_cannot_leave_in_time_is_cut_at_the_byte() -> None:
    """Hand-made: 7 of 10 bytes leave before the update of 3 ns; 3 are snapshot just before it."""
    problem = Problem((3, 4, 3), (5, 9, 8), (StateTensor(0, "w", 10, 3, 3),), BYTE_PER_NS, granule_bytes=1)
    plan = plan_streaming(problem)
    assert isinstance(plan, Plan)
    assert [(t.chunk.size_bytes, t.snapshot) for t in plan.transfers] == [(7, None), (3, 2)]
    assert plan.peak_bytes == 8 + 3


def test_a_memory_limit_below_the_bound_says_which_bandwidth_would_do() -> None:
    """Hand-made: with a limit of 10 bytes only 2 may be snapshot, so 8 have to leave in 7 ns."""
    problem = Problem(
        (3, 4, 3), (5, 9, 8), (StateTensor(0, "w", 10, 3, 3),), BYTE_PER_NS, granule_bytes=1, memory_limit_bytes=10
    )
    answer = plan_streaming(problem)
    assert isinstance(answer, Infeasible)
    assert answer.reason is Reason.MEMORY
    assert answer.needed_bandwidth_bytes_per_s == pytest.approx(8 / 7 * BYTE_PER_NS, rel=1e-5)
    assert answer.smallest_interval is None


def test_the_granule_that_a_deadline_falls_into_waits_where_memory_is_short() -> None:
    """Hand-made: 7 of 12 bytes could leave in time, in granules 4; the next one waits 3 ns rather than need 12 + 4."""
    problem = Problem((3, 4, 6), (5, 12, 3), (StateTensor(0, "w", 12, 3, 3),), BYTE_PER_NS, interval=2, granule_bytes=4)
    plan = plan_streaming(problem)
    assert isinstance(plan, Plan)
    assert (plan.peak_bytes, plan.lower_bound_bytes) == (12, 12)
    assert [(t.chunk.size_bytes, t.snapshot, t.start) for t in plan.transfers] == [(4, None, 1), (4, 2, 3), (4, 2, 3)]
    verify_plan(plan, problem)


def test_a_real_network_needs_no_granule_more_than_training() -> None:
    """What the limit allows at 184.6 GB/s on all positions is allowed on those with a hook, too."""
    graph = read_graph(Path(__file__).parents[2] / "graphs" / "alexnet-1.json")
    made = compile_graph(graph, Options(184_600_000_000, memory_limit_bytes=graph.training_peak_bytes))
    assert isinstance(made, Compiled)
    assert made.schedule.certificate.peak_bytes == graph.training_peak_bytes
