"""Arithmetic on the FIFO link against every order of every byte."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import event, given
from hypothesis import strategies as st
from instances import WHOLE, on_some_anchors, problems, unit_chunks
from oracles.exhaustive import exhaustive

from checkflow.plan import Formulation, Infeasible, Plan, Problem, Transfers
from checkflow.plan.streaming.planner import plan_streaming
from checkflow.verify import verify_plan


def tiny(bandwidths: st.SearchStrategy[int]) -> st.SearchStrategy[Problem]:
    """Every order of every byte with every creation is a lot: four bytes on four steps, or three bytes on six."""
    intervals = st.integers(1, 2)
    few_steps = problems(max_steps=4, max_tensors=4, intervals=intervals, bandwidths=bandwidths)
    few_bytes = problems(max_steps=6, max_bytes=3, intervals=intervals, bandwidths=bandwidths)
    return on_some_anchors(
        st.one_of(
            few_steps.filter(lambda problem: problem.state_bytes <= 4),
            few_bytes.filter(lambda problem: problem.state_bytes <= 3),
        )
    )


@given(problem=tiny(WHOLE))
def test_streaming_is_optimal_where_steps_carry_whole_bytes(problem: Problem) -> None:
    """Feasibility and peak are those of exhaustive search, and the bound is met."""
    best = exhaustive(problem, unit_chunks(problem), Formulation.DIRECT, Transfers.STREAMING)
    plan = plan_streaming(problem)
    event("infeasible" if isinstance(best, Infeasible) else f"snapshots: {best.snapshot_bytes > 0}")
    if isinstance(best, Infeasible):
        assert isinstance(plan, Infeasible) and plan.reason is best.reason
        return
    assert isinstance(plan, Plan)
    assert plan.peak_bytes == plan.lower_bound_bytes == best.peak_bytes
    assert verify_plan(plan, problem).peak_bytes == best.peak_bytes


@given(problem=tiny(st.integers(300_000_000, 2_000_000_000)))
def test_the_streaming_bound_holds_for_any_times(problem: Problem) -> None:
    """Where a byte straddles a boundary the bound is still one, and the plan is as good as any of whole bytes."""
    best = exhaustive(problem, unit_chunks(problem), Formulation.DIRECT, Transfers.STREAMING)
    plan = plan_streaming(problem)
    if isinstance(best, Infeasible):
        assert isinstance(plan, Infeasible) and plan.reason is best.reason
        return
    assert isinstance(plan, Plan)
    assert plan.lower_bound_bytes <= best.peak_bytes
    assert plan.peak_bytes >= plan.lower_bound_bytes


@given(problem=tiny(WHOLE))
def test_an_iteration_without_times_has_a_reason(problem: Problem) -> None:
    """No bandwidth and no interval would do."""
    answer = plan_streaming(replace(problem, time_ns=(0,) * problem.steps))
    if isinstance(answer, Infeasible):
        assert answer.needed_bandwidth_bytes_per_s is answer.smallest_interval is None
    else:
        assert not problem.state_bytes
