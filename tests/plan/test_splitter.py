"""Algorithm 1: every reason, in its order; an end; and plans that an independent check agrees with."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, event, given, reject
from hypothesis import strategies as st
from instances import BYTE_PER_NS, problems

from checkflow.errors import SolverError
from checkflow.graphfile import read_graph
from checkflow.plan import Formulation, Infeasible, Plan, Problem, ProvenBy, Reason, StateTensor, problem_of
from checkflow.plan.packed import packing
from checkflow.plan.packed.bounds import least_peak_bytes, link_fits
from checkflow.plan.packed.splitter import halvings, plan_packed, smallest_chunk_bytes
from checkflow.plan.packed.steps import whole_chunks
from checkflow.verify import verify_plan
from checkflow.verify.bound import fluid_bound
from checkflow.verify.terms import terms_of_problem

THE_PAPERS = (Formulation.PAPER, Formulation.COMPACT)


def problem_with(
    times: tuple[int, ...], resident: tuple[int, ...], *tensors: tuple[int, int], limit: int | None = None
) -> Problem:
    """One byte a nanosecond, tensors as (bytes, step of their only write)."""
    state = tuple(StateTensor(i, f"model/p{i}", size, write, write) for i, (size, write) in enumerate(tensors))
    return Problem(times, resident, state, BYTE_PER_NS, granule_bytes=1, memory_limit_bytes=limit)


def infeasible(problem: Problem, formulation: Formulation) -> Infeasible:
    answer = plan_packed(problem, formulation)
    assert isinstance(answer, Infeasible)
    assert "\n" not in answer.detail
    return answer


@pytest.mark.parametrize("formulation", THE_PAPERS)
def test_a_write_at_step_1_is_a_deadline(formulation: Formulation) -> None:
    """Nothing helps, the tensor is named, and `direct` plans it."""
    problem = problem_with((9, 9), (5, 5), (2, 1))
    answer = infeasible(problem, formulation)
    assert answer.reason is Reason.DEADLINE
    assert "model/p0" in answer.detail
    assert answer.needed_bandwidth_bytes_per_s is answer.smallest_interval is None
    assert isinstance(plan_packed(problem, Formulation.DIRECT), Plan)


@pytest.mark.parametrize("formulation", Formulation)
def test_more_bytes_than_the_link_moves_are_bandwidth(formulation: Formulation) -> None:
    """The figures are exact: with them there is room for the bytes, with one less there is not."""
    problem = problem_with((3, 3, 4), (5, 5, 5), (12, 3), (12, 2))
    answer = infeasible(problem, formulation)
    assert answer.reason is Reason.BANDWIDTH
    needed, smallest = answer.needed_bandwidth_bytes_per_s, answer.smallest_interval
    assert needed is not None and smallest is not None
    assert link_fits(replace(problem, bandwidth_bytes_per_s=needed), formulation)
    assert not link_fits(replace(problem, bandwidth_bytes_per_s=needed - 1), formulation)
    assert smallest == 3 and not link_fits(replace(problem, interval=2), formulation)
    planned = plan_packed(replace(problem, interval=smallest), formulation)
    assert isinstance(planned, Plan)
    assert answer.snapshot_bytes_at_that_interval is not None
    assert answer.snapshot_bytes_at_that_interval <= planned.snapshot_bytes


@pytest.mark.parametrize("formulation", Formulation)
def test_a_link_that_never_moves_a_byte_is_hopeless(formulation: Formulation) -> None:
    """Steps of no duration cannot be helped by bandwidth or interval."""
    answer = infeasible(problem_with((0, 0, 0), (5, 5, 5), (3, 2)), formulation)
    assert answer.reason is Reason.BANDWIDTH
    assert (answer.needed_bandwidth_bytes_per_s, answer.smallest_interval) == (None, None)


@pytest.mark.parametrize("formulation", Formulation)
def test_pieces_that_no_step_can_carry_are_chunk(formulation: Formulation) -> None:
    """Where even the smallest piece fits no step although the bytes fit the link, the reason is the chunk."""
    problem = replace(problem_with((3, 3, 3, 3), (5, 5, 5, 5), (8, 3)), granule_bytes=4)
    answer = infeasible(problem, formulation)
    assert answer.reason is Reason.CHUNK
    needed = answer.needed_bandwidth_bytes_per_s
    assert needed == 1_333_333_334  # 4 bytes in 3 ns
    assert isinstance(plan_packed(replace(problem, bandwidth_bytes_per_s=needed), formulation), Plan)
    assert answer.smallest_interval is None  # more iterations make no step longer


@pytest.mark.parametrize("formulation", Formulation)
def test_splitting_finds_what_whole_tensors_cannot(formulation: Formulation) -> None:
    """A tensor larger than any step is cut until it fits, into pieces of one size."""
    problem = replace(problem_with((5,) * 6, (5,) * 6, (16, 5)), chunk_bytes=16)
    plan = plan_packed(problem, formulation)
    assert isinstance(plan, Plan)
    assert {transfer.chunk.size_bytes for transfer in plan.transfers} == {4}
    verify_plan(plan, problem)


@pytest.mark.parametrize("formulation", Formulation)
def test_a_limit_below_the_bound_is_memory(formulation: Formulation) -> None:
    """Training alone over the limit cannot be helped; the reason comes after bandwidth."""
    problem = problem_with((9, 9, 9), (5, 7, 5), (3, 3), limit=6)
    answer = infeasible(problem, formulation)
    assert answer.reason is Reason.MEMORY
    assert (answer.needed_bandwidth_bytes_per_s, answer.smallest_interval) == (None, None)
    slow = replace(problem, bandwidth_bytes_per_s=100_000_000)
    assert infeasible(slow, formulation).reason is Reason.BANDWIDTH


@pytest.mark.parametrize("formulation", THE_PAPERS)
def test_a_limit_that_bandwidth_would_meet_says_how_much(formulation: Formulation) -> None:
    """With the bandwidth named the plan keeps to the limit, and with a little less the bound is over it."""
    problem = problem_with((4, 4, 4, 4, 4), (0, 0, 10, 10, 10), (12, 4), limit=12)
    answer = infeasible(problem, formulation)
    assert answer.reason is Reason.MEMORY
    needed = answer.needed_bandwidth_bytes_per_s
    assert needed is not None
    plan = plan_packed(replace(problem, bandwidth_bytes_per_s=needed), formulation)
    assert isinstance(plan, Plan) and plan.peak_bytes <= 12
    short = replace(problem, bandwidth_bytes_per_s=needed - 1, memory_limit_bytes=None)
    assert least_peak_bytes(short, formulation) > 12


@pytest.mark.parametrize("formulation", THE_PAPERS)
def test_smaller_chunks_are_tried_for_the_memory_limit(formulation: Formulation) -> None:
    """A limit that whole tensors exceed and halves keep is met, although chunks of the size asked for were possible."""
    problem = replace(problem_with((8,) * 6, (0, 4, 4, 4, 4, 10), (8, 6)), chunk_bytes=8)
    whole = plan_packed(problem, formulation)
    limited = plan_packed(replace(problem, memory_limit_bytes=11), formulation)
    assert isinstance(whole, Plan) and isinstance(limited, Plan)
    assert whole.peak_bytes == 12
    assert limited.peak_bytes <= 11


@pytest.mark.parametrize("formulation", THE_PAPERS)
def test_time_out_is_not_infeasible(formulation: Formulation, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no time and no constructed plan nothing is known, and that is what is said."""
    monkeypatch.setattr(packing, "construct", lambda *_: None)
    problem = problem_with((5,) * 6, (5,) * 6, (16, 5))
    with pytest.raises(SolverError, match="neither a plan nor a proof"):
        plan_packed(problem, formulation, time_limit_s=0.0)


def test_the_literal_model_has_a_size_limit() -> None:
    """A literal model too large to build is refused in one line that names the way out."""
    problem = replace(problem_with((9_000,) * 3000, (0,) * 3000, (4_000_000, 2900)), chunk_bytes=4_000)
    with pytest.raises(SolverError, match="compact"):
        plan_packed(problem, Formulation.PAPER)


@pytest.mark.parametrize("formulation", Formulation)
def test_no_state_needs_no_transfers(formulation: Formulation) -> None:
    """An iteration that writes no state has the empty plan, at the training peak."""
    plan = plan_packed(problem_with((5, 5), (3, 4)), formulation)
    assert isinstance(plan, Plan)
    assert (plan.transfers, plan.peak_bytes, plan.gap) == ((), 4, 0.0)


@given(
    size=st.integers(1, 1 << 34),
    first=st.integers(1, 1 << 30),
    granule=st.sampled_from((1, 4, 512, 4096)),
    more=st.booleans(),
)
def test_splitting_ends(size: int, first: int, granule: int, more: bool) -> None:
    """Chunk sizes strictly decrease, in about log2(first / smallest) rounds, down to the smallest chunk."""
    tensors = ((size, 2), (1, 2)) if more else ((size, 2),)
    problem = replace(problem_with((1, 1), (0, 0), *tensors), granule_bytes=granule)
    sizes = list(halvings(problem, first))
    smallest = smallest_chunk_bytes(problem)
    assert sizes[0] == min(first, size)
    assert all(after < before for before, after in pairwise(sizes))
    assert all(after % granule == 0 for after in sizes[1:])
    assert sizes[-1] == smallest or (sizes == [sizes[0]] and sizes[0] <= smallest)
    assert len(sizes) <= max(1, sizes[0] // smallest).bit_length() + 1


@given(problem=problems(max_bytes=9), per_size=st.integers(1, 9))
def test_chunks_cover_every_byte_once(problem: Problem, per_size: int) -> None:
    """Each tensor is pieces of one size and one remainder, in order."""
    chunks = whole_chunks(problem, per_size)
    for index, tensor in enumerate(problem.state):
        mine = [chunk for chunk in chunks if chunk.state == index]
        assert [chunk.offset_bytes for chunk in mine] == list(range(0, tensor.size_bytes, per_size))
        assert sum(chunk.size_bytes for chunk in mine) == tensor.size_bytes
        assert all(chunk.size_bytes == per_size for chunk in mine[:-1])


@pytest.mark.parametrize("formulation", Formulation)
@given(data=st.data())
def test_plans_pass_the_verifier(formulation: Formulation, data: st.DataObject) -> None:
    """Every answer is a plan that the independent verifier accepts, or a reason in the documented order."""
    problem = data.draw(problems(max_steps=8, max_tensors=5, max_bytes=9, intervals=st.integers(1, 3)))
    answer = plan_packed(problem, formulation)
    if isinstance(answer, Infeasible):
        at_once = formulation is not Formulation.DIRECT and any(t.first_write == 1 for t in problem.state)
        expected = Reason.DEADLINE if at_once else Reason.BANDWIDTH
        if at_once or not link_fits(problem, formulation):
            assert answer.reason is expected
        else:
            assert answer.reason is Reason.CHUNK
        return
    assert answer.gap == 0.0
    verify_plan(answer, problem)


@given(problem=problems(max_steps=8, max_tensors=5, max_bytes=9, intervals=st.integers(1, 3)))
def test_bounds_are_those_of_the_verifier_or_sharper(problem: Problem) -> None:
    """The bound of `direct` is the verifier's own; the paper's, of plans that `direct` has too, is never below it."""
    assume(link_fits(problem, Formulation.DIRECT))
    recomputed = max(problem.training_peak_bytes, fluid_bound(terms_of_problem(problem)))
    assert least_peak_bytes(problem, Formulation.DIRECT) == recomputed
    if all(tensor.first_write > 1 for tensor in problem.state) and link_fits(problem, Formulation.COMPACT):
        assert least_peak_bytes(problem, Formulation.COMPACT) >= recomputed


@given(problem=problems(max_steps=6, max_tensors=4, max_bytes=6, earliest_write=2, intervals=st.integers(1, 2)))
def test_direct_never_needs_more_than_the_paper(problem: Problem) -> None:
    """In chunks of a byte the paper has no plan that `direct` lacks, and none of a lower peak."""
    units = replace(problem, chunk_bytes=1)
    by_paper, by_direct = (plan_packed(units, which) for which in (Formulation.COMPACT, Formulation.DIRECT))
    assume(isinstance(by_paper, Plan))
    assert isinstance(by_paper, Plan) and isinstance(by_direct, Plan)
    assert by_direct.peak_bytes <= by_paper.peak_bytes


@given(problem=problems(max_steps=8, max_tensors=5, max_bytes=9))
def test_the_literal_program_has_no_plan_without_a_solver(problem: Problem) -> None:
    """Given no time, it is refused or known to be infeasible."""
    try:
        answer = plan_packed(replace(problem, chunk_bytes=4), Formulation.PAPER, time_limit_s=0.0)
    except SolverError as error:
        assert "neither a plan nor a proof" in str(error)
    else:
        assert isinstance(answer, Infeasible)


@pytest.mark.parametrize("formulation", [Formulation.COMPACT, Formulation.DIRECT])
@given(data=st.data())
def test_only_a_solver_that_ran_proves_a_bound(formulation: Formulation, data: st.DataObject) -> None:
    """With no time for a solver a plan has the bound of arithmetic and says so, its gap beside it."""
    problem = data.draw(problems(max_steps=8, max_tensors=5, max_bytes=9))
    try:
        plan = plan_packed(replace(problem, chunk_bytes=4), formulation, time_limit_s=0.0)
    except SolverError:
        reject()  # neither a plan nor a proof
    assume(isinstance(plan, Plan))
    assert isinstance(plan, Plan)
    event(f"gap: {plan.gap > 0}")
    assert (plan.solver.name, plan.proven_by) == ("none", ProvenBy.BOUND)
    assert verify_plan(plan, replace(problem, chunk_bytes=4)).lower_bound_bytes == plan.lower_bound_bytes


def test_a_time_limit_is_for_all_that_a_solver_needs() -> None:
    """The literal model of a real network takes longer to build than the limit allows: it is given up half-built."""
    graph = read_graph(Path(__file__).parents[2] / "graphs" / "alexnet-1.json")
    problem = problem_of(graph, bandwidth_bytes_per_s=63 * 10**9, interval=2, chunk_bytes=16 << 10)
    began = time.monotonic()
    with pytest.raises(SolverError, match="neither a plan nor a proof"):
        plan_packed(problem, Formulation.PAPER, time_limit_s=1.0, solver="highs")
    assert time.monotonic() - began < 10
