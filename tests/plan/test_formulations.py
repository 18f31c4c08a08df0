"""The integer programs against every plan there is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from instances import chunkings, problems
from oracles.exhaustive import exhaustive

from checkflow.plan import Chunk, Formulation, Infeasible, Plan, Problem, ProvenBy, StateTensor, Transfers
from checkflow.plan.packed.bounds import chunks_can_fit, least_peak_bytes, link_fits
from checkflow.plan.packed.constructive import construct, construct_within
from checkflow.plan.packed.formulations import compact, direct_packed, paper
from checkflow.plan.packed.packing import Unpacked, pack
from checkflow.plan.packed.program import SolverStatus, choose, solvers
from checkflow.plan.packed.steps import Model, classes_of, peak_bytes

BUILD: dict[Formulation, Callable[[Problem, tuple[Chunk, ...]], Model]] = {
    Formulation.PAPER: paper.build,
    Formulation.COMPACT: compact.build,
    Formulation.DIRECT: direct_packed.build,
}
PACKED = [(formulation, solver) for formulation in Formulation for solver in solvers()]
instances = problems(intervals=st.integers(1, 2), bandwidths=st.sampled_from((10**9, 1_300_000_000)))


def reference(problem: Problem, chunks: tuple[Chunk, ...], formulation: Formulation) -> Plan | None:
    found = exhaustive(problem, chunks, formulation, Transfers.PACKED)
    return found if isinstance(found, Plan) else None


@pytest.mark.parametrize(("formulation", "solver"), PACKED)
@given(data=st.data())
def test_a_program_has_the_optimum_of_all_plans(formulation: Formulation, solver: str, data: st.DataObject) -> None:
    """Feasibility and peak are those of exhaustive search, and the decoded plan really has that peak."""
    problem = data.draw(instances)
    chunks = data.draw(chunkings(problem, most=4))
    model = BUILD[formulation](problem, chunks)
    best = reference(problem, chunks, formulation)
    backend = choose(model.program, solver).backend
    solution = backend.solve(model.program, time_limit_s=60, warm_start=None, log=None)
    if best is None:
        assert solution.status is SolverStatus.INFEASIBLE
        return
    assert solution.status is SolverStatus.OPTIMAL and solution.x is not None
    transfers = model.decode(solution.x)
    assert sorted(map(id, (t.chunk for t in transfers))) == sorted(map(id, chunks))
    assert peak_bytes(problem, transfers, formulation) == best.peak_bytes
    assert model.bytes_of(solution.bound) == best.peak_bytes


@pytest.mark.parametrize("formulation", Formulation)
@given(data=st.data())
def test_every_decoded_plan_is_among_all_plans(formulation: Formulation, data: st.DataObject) -> None:
    """Encoding a decoded plan gives a point that the program admits, of the same objective: warm starts are exact."""
    problem = data.draw(instances)
    chunks = data.draw(chunkings(problem, most=4))
    model = BUILD[formulation](problem, chunks)
    solution = choose(model.program).backend.solve(model.program, time_limit_s=60, warm_start=None, log=None)
    assume(solution.x is not None)
    assert solution.x is not None
    again = model.encode(model.decode(solution.x))
    assert model.program.admits(again)
    assert model.bytes_of(float(model.program.objective @ again)) == model.bytes_of(solution.objective)


@given(data=st.data())
def test_the_literal_program_admits_every_plan_of_exhaustive_search(data: st.DataObject) -> None:
    """The best plan found by search, written as C, P, S and alpha, satisfies Eqs 1-12."""
    problem = data.draw(problems(earliest_write=2, intervals=st.integers(1, 2)))
    chunks = data.draw(chunkings(problem, most=4))
    best = reference(problem, chunks, Formulation.PAPER)
    assume(best is not None)
    assert best is not None
    model = paper.build(problem, chunks)
    x = model.encode(best.transfers)
    assert model.program.admits(x)
    assert model.bytes_of(float(x[-1])) == best.peak_bytes


@pytest.mark.parametrize("formulation", Formulation)
@given(data=st.data())
def test_bounds_hold_and_constructed_plans_are_plans(formulation: Formulation, data: st.DataObject) -> None:
    """No plan beats the bound, what counting calls impossible is, and a constructed plan is never below the optimum."""
    problem = data.draw(instances)
    chunks = data.draw(chunkings(problem, most=4))
    best = reference(problem, chunks, formulation)
    written_at_once = formulation is not Formulation.DIRECT and any(t.first_write == 1 for t in problem.state)
    if written_at_once or not link_fits(problem, formulation) or not chunks_can_fit(problem, chunks, formulation):
        assert best is None
        return
    bound = least_peak_bytes(problem, formulation)
    found = construct(problem, chunks, formulation, bound)
    if best is None:
        assert found is None
        return
    assert bound <= best.peak_bytes
    if found is not None:
        assert peak_bytes(problem, found.transfers, formulation) == found.peak_bytes >= best.peak_bytes
        model = BUILD[formulation](problem, chunks)
        assert model.program.admits(model.encode(found.transfers))
        assert sorted(map(id, (t.chunk for t in found.transfers))) == sorted(map(id, chunks))


@given(data=st.data())
def test_a_constructed_plan_keeps_to_the_peak_it_is_given(data: st.DataObject) -> None:
    """Whatever peak is allowed, a plan that comes out does not need more."""
    problem = data.draw(problems(max_steps=8, max_tensors=5, max_bytes=9, earliest_write=2))
    kinds = classes_of(problem, data.draw(chunkings(problem, most=12)), Formulation.COMPACT)
    extra = data.draw(st.integers(0, problem.state_bytes))
    found = construct_within(problem, kinds, problem.training_peak_bytes + extra)
    assume(found is not None)
    assert found is not None and found.peak_bytes <= problem.training_peak_bytes + extra


@pytest.mark.parametrize("formulation", Formulation)
@given(data=st.data())
def test_packing_is_proven_optimal(formulation: Formulation, data: st.DataObject) -> None:
    """With or without a solver, the plan has the least peak, its bound says so, and so does what proved it."""
    problem = data.draw(instances)
    chunks = data.draw(chunkings(problem, most=4))
    assume(formulation is Formulation.DIRECT or all(t.first_write > 1 for t in problem.state))
    assume(link_fits(problem, formulation))
    best = reference(problem, chunks, formulation)
    bound = least_peak_bytes(problem, formulation)
    result = pack(problem, chunks, formulation, bound)
    if best is None:
        assert result is Unpacked.IMPOSSIBLE
        return
    assert isinstance(result, Plan)
    assert result.peak_bytes == result.lower_bound_bytes == best.peak_bytes
    assert result.proven_by is (ProvenBy.BOUND if bound == best.peak_bytes else ProvenBy.MILP)
    assert (result.constructive_peak_bytes is None) or result.constructive_peak_bytes >= best.peak_bytes
    if formulation is Formulation.PAPER:
        assert (result.solver.name != "none" and result.constructive_peak_bytes is None) or not chunks


@given(data=st.data())
def test_compact_is_the_paper_with_fewer_columns(data: st.DataObject) -> None:
    """The same optimum to the byte, from fewer columns."""
    problem = data.draw(problems(max_steps=9, max_tensors=5, max_bytes=9, earliest_write=2))
    chunks = data.draw(chunkings(problem, most=9))
    answers = []
    for build in (paper.build, compact.build):
        model = build(problem, chunks)
        solution = choose(model.program, "highs").backend.solve(
            model.program, time_limit_s=60, warm_start=None, log=None
        )
        assert solution.status in (SolverStatus.OPTIMAL, SolverStatus.INFEASIBLE)
        answers.append((solution.status, None if solution.x is None else model.bytes_of(solution.objective)))
    assert answers[0] == answers[1]
    assert compact.build(problem, chunks).program.columns < paper.build(problem, chunks).program.columns


def test_the_literal_program_names_its_equations() -> None:
    """Each of Eqs 2-11 is a family of rows of the size the paper gives it, and Eq 1 makes all but peak_mem binary."""
    problem = Problem((5, 5, 5), (4, 9, 4), (StateTensor(0, "a", 4, 3, 3), StateTensor(1, "b", 2, 2, 2)), 10**9)
    chunks = (Chunk(0, 0, 4), Chunk(1, 0, 2))
    program = paper.build(problem, chunks).program
    sizes = {name: rows.stop - rows.start for name, rows in program.families.items()}
    assert sizes == {
        "eq2": 6, "eq3": 4, "eq4": 4, "eq5": 2, "eq6": 6, "eq7": 4, "first_step": 2, "eq8": 2, "eq9": 3, "eq10": 3,
        "eq11": 18,
    }  # fmt: skip
    assert program.rows == sum(sizes.values())
    assert program.columns == 4 * 2 * 3 + 1
    assert program.integral.sum() == program.columns - 1
    assert np.all(program.upper[:-1] == 1.0) and program.upper[-1] == np.inf


def test_a_worked_example_of_the_paper_and_of_direct() -> None:
    """Two tensors of 4 bytes, 4 steps of 4 bytes, memory full at step 2: the paper needs 4 bytes more, direct none."""
    state = (StateTensor(0, "a", 4, 4, 4), StateTensor(1, "b", 4, 4, 4))
    problem = Problem((4, 4, 4, 4), (8, 12, 8, 8), state, 10**9, granule_bytes=1)
    chunks = (Chunk(0, 0, 4), Chunk(1, 0, 4))
    by_paper = pack(problem, chunks, Formulation.PAPER, least_peak_bytes(problem, Formulation.PAPER))
    by_direct = pack(problem, chunks, Formulation.DIRECT, least_peak_bytes(problem, Formulation.DIRECT))
    assert isinstance(by_paper, Plan) and isinstance(by_direct, Plan)
    assert by_paper.peak_bytes == 16  # both leave at steps 3 and 4: at step 3 both snapshots are there
    assert (by_direct.peak_bytes, by_direct.snapshot_bytes) == (12, 0)


def test_one_byte_chunks_of_a_large_tensor_build_at_once() -> None:
    """The literal model of 100 chunks over 1000 steps has its 400,001 columns in seconds: it is built by arrays."""
    problem = Problem((1000,) * 1000, (0,) * 1000, (StateTensor(0, "a", 100, 990, 990),), 10**9, granule_bytes=1)
    model = paper.build(problem, tuple(Chunk(0, offset, 1) for offset in range(100)))
    assert model.program.columns == 400_001
    assert model.program.matrix.nnz > 1_500_000


def test_exhaustive_names_the_reason() -> None:
    """A write at step 1 is a deadline to the paper; too many bytes are bandwidth; too large a chunk is a chunk."""
    early = Problem((9, 9), (0, 0), (StateTensor(0, "a", 2, 1, 1),), 10**9, granule_bytes=1)
    slow = Problem((1, 1), (0, 0), (StateTensor(0, "a", 9, 2, 2),), 10**9, granule_bytes=1)
    wide = Problem((3, 3, 3), (0, 0, 0), (StateTensor(0, "a", 4, 2, 2),), 10**9, granule_bytes=1)
    for problem, reason in ((early, "deadline"), (slow, "bandwidth"), (wide, "chunk")):
        whole = tuple(Chunk(i, 0, tensor.size_bytes) for i, tensor in enumerate(problem.state))
        answer = exhaustive(problem, whole, Formulation.PAPER, Transfers.PACKED)
        assert isinstance(answer, Infeasible) and answer.reason == reason
