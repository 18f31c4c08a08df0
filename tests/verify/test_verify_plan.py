"""Plans without a schedule, against each rule of each formulation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from handmade import GRAPH, A, B, C

from checkflow.errors import VerificationError
from checkflow.plan import (
    Chunk,
    Formulation,
    Plan,
    Problem,
    ProvenBy,
    SolverRun,
    StateTensor,
    Transfer,
    Transfers,
    problem_of,
)
from checkflow.verify import VerifiedPlan, verify_plan
from checkflow.verify.bound import fluid_bound
from checkflow.verify.memory import Hold, peak_of
from checkflow.verify.terms import terms_of_problem

# a and c alone: resident 564, 564, 664, 364; 100 bytes in a step
PACKED = Problem(
    time_ns=(10, 10, 10, 10),
    resident_bytes=(564, 564, 664, 364),
    state=(StateTensor(A, "a", 100, 3, 4), StateTensor(C, "c", 50, 4, 4)),
    bandwidth_bytes_per_s=10_000_000_000,
    granule_bytes=10,
)
# a held at 1..2, c at 3..4: 664, 664, 714, 414
PAPER = Plan(
    Formulation.PAPER,
    Transfers.PACKED,
    (Transfer(Chunk(0, 0, 100), 1, 2, 2), Transfer(Chunk(1, 0, 50), 3, 4, 4)),
    peak_bytes=714,
    lower_bound_bytes=714,
    proven_by=ProvenBy.EXHAUSTIVE,
    solver=SolverRun("exhaustive", "asked for"),
)
# b's first 100 bytes at -2, the rest beside c at -1 and 3, a at 1; nothing is held
DIRECT = Plan(
    Formulation.DIRECT,
    Transfers.PACKED,
    (
        Transfer(Chunk(1, 0, 100), None, -2, -2),
        Transfer(Chunk(1, 100, 50), None, -1, -1),
        Transfer(Chunk(0, 0, 100), None, 1, 1),
        Transfer(Chunk(2, 0, 50), None, 3, 3),
    ),
    peak_bytes=664,
    lower_bound_bytes=664,
    proven_by=ProvenBy.BOUND,
    solver=SolverRun("none", "the plan meets the bound"),
)
EASY_PROBLEM = problem_of(GRAPH, bandwidth_bytes_per_s=10_000_000_000, granule_bytes=10)


def with_transfer(plan: Plan, number: int, transfer: Transfer, peak_bytes: int | None = None) -> Plan:
    transfers = list(plan.transfers)
    transfers[number] = transfer
    peak_bytes = plan.peak_bytes if peak_bytes is None else peak_bytes
    return replace(plan, transfers=tuple(transfers), peak_bytes=peak_bytes)


@pytest.mark.parametrize("formulation", [Formulation.PAPER, Formulation.COMPACT])
def test_plan_of_the_paper_needs_what_paper_says(formulation: Formulation) -> None:
    """Memory is held from the step of creation to that of the offload, inclusive."""
    verified = verify_plan(replace(PAPER, formulation=formulation), PACKED)
    assert verified == VerifiedPlan(664, 714, 150, None)
    assert not verified.bound_checked


def test_bound_of_the_paper_is_rederived() -> None:
    """With 713 step 3 has room for 49 bytes, and c's 50 cannot have left, for a fills step 2; with 714 all fits."""
    proven = replace(PAPER, proven_by=ProvenBy.BOUND)
    assert verify_plan(proven, PACKED).lower_bound_bytes == 714
    assert verify_plan(replace(proven, lower_bound_bytes=664), PACKED).lower_bound_bytes == 664
    larger = with_transfer(proven, 0, Transfer(Chunk(0, 0, 100), 1, 3, 3), peak_bytes=814)
    verify_plan(larger, PACKED)
    with pytest.raises(VerificationError, match="715 is said to follow from arithmetic, which gives 714"):
        verify_plan(replace(larger, lower_bound_bytes=715), PACKED)


def test_earlier_creation_in_the_paper_is_allowed_if_counted() -> None:
    """c made at step 1 is held at 1..4, which the same peak covers; a made at step 2 cannot leave in step 2."""
    verify_plan(with_transfer(PAPER, 1, Transfer(Chunk(1, 0, 50), 1, 4, 4)), PACKED)


@pytest.mark.parametrize(
    ("number", "transfer", "message"),
    [
        (0, Transfer(Chunk(0, 0, 100), None, 2, 2), "Eq 2"),
        (0, Transfer(Chunk(0, 0, 100), 0, 2, 2), r"snapshot at step 0 is not within 1\.\.2"),
        (0, Transfer(Chunk(0, 0, 100), 3, 4, 4), r"snapshot at step 3 is not within 1\.\.2"),
        (0, Transfer(Chunk(0, 0, 100), 2, 2, 2), r"offloaded at step 2, not within 3\.\.4"),
        (1, Transfer(Chunk(1, 0, 50), 3, 5, 5), r"offloaded at step 5, not within 4\.\.4"),
        (0, Transfer(Chunk(0, 0, 100), 1, 2, 3), "not in one step"),
        (1, Transfer(Chunk(1, 0, 50), 1, 2, 2), "150 bytes at step 2 do not fit its 10 ns"),
        (0, Transfer(Chunk(0, 0, 100), 1, 3, 3), "peak_bytes: 714 is claimed, 814 is needed"),
        (0, Transfer(Chunk(2, 0, 100), 1, 2, 2), "state 2 is not one of 2"),
        (0, Transfer(Chunk(-2, 0, 100), 1, 2, 2), "state -2 is not one of 2"),
        (0, Transfer(Chunk(0, 0, 0), 1, 2, 2), "0 bytes are not a chunk"),
        (0, Transfer(Chunk(0, -10, 110), 1, 2, 2), "twice"),
    ],
)
def test_plan_that_breaks_an_equation_is_refused(number: int, transfer: Transfer, message: str) -> None:
    """One transfer of the paper's plan changed against each of Eqs 2-12."""
    with pytest.raises(VerificationError, match=message):
        verify_plan(with_transfer(PAPER, number, transfer), PACKED)


def test_interval_repeats_the_iteration_for_the_paper() -> None:
    """At interval 2 c may leave in step 6 of 8, held at 3..6: 664 + 50 at steps 3 and, c's value made at 3, 6."""
    plan = with_transfer(PAPER, 1, Transfer(Chunk(1, 0, 50), 3, 6, 6))
    verify_plan(plan, replace(PACKED, interval=2))
    with pytest.raises(VerificationError, match=r"not within 4\.\.4"):
        verify_plan(plan, PACKED)


def test_direct_packed_plan_wraps_around_the_iteration() -> None:
    """Steps before the iteration share the link with those they are congruent to."""
    assert verify_plan(DIRECT, EASY_PROBLEM) == VerifiedPlan(664, 664, 0, 664)
    # c made at position 3 and offloaded in step 4: 364 + 50 there
    snapshot = with_transfer(DIRECT, 3, Transfer(Chunk(2, 0, 50), 3, 4, 4))
    assert verify_plan(snapshot, EASY_PROBLEM).snapshot_bytes == 50


@pytest.mark.parametrize(
    ("number", "transfer", "message"),
    [
        (3, Transfer(Chunk(2, 0, 50), None, 2, 2), "150 bytes at step 2 do not fit"),
        (3, Transfer(Chunk(2, 0, 50), None, 4, 4), "a direct offload at step 4 is after the deadline, 3"),
        (3, Transfer(Chunk(2, 0, 50), None, 0, 0), r"offloaded at step 0, not within 1\.\.4"),
        (3, Transfer(Chunk(2, 0, 50), 3, 5, 5), r"offloaded at step 5, not within 1\.\.4"),
        (3, Transfer(Chunk(2, 0, 50), 3, 3, 3), "not after its snapshot at 3"),
        (3, Transfer(Chunk(2, 0, 50), 4, 4, 4), r"window, 0\.\.3"),
        (3, Transfer(Chunk(2, 0, 50), None, 3, 4), "not in one step"),
        (1, Transfer(Chunk(1, 100, 50), None, -3, -3), r"offloaded at step -3, not within -2\.\.1"),
        (1, Transfer(Chunk(1, 100, 50), None, 1, 1), "after the deadline, 0"),
    ],
)
def test_direct_packed_plan_that_breaks_a_rule_is_refused(number: int, transfer: Transfer, message: str) -> None:
    """One transfer of the packed plan changed against each rule."""
    with pytest.raises(VerificationError, match=message):
        verify_plan(with_transfer(DIRECT, number, transfer), EASY_PROBLEM)


def test_packed_plan_may_claim_the_training_peak_as_its_bound() -> None:
    """Both the training peak and the fluid bound hold for packed transfers; more does not follow from arithmetic."""
    problem = problem_of(GRAPH, bandwidth_bytes_per_s=4_000_000_000, granule_bytes=10, interval=2)
    assert fluid_bound(terms_of_problem(problem)) == 714
    # 40 bytes in each step from -2 on; b's last 30 and what is not out by its deadline are held
    held = [(1, 0, 40, None, -2), (1, 40, 40, None, -1), (1, 80, 40, None, 0), (1, 120, 30, 0, 1)]
    held += [(0, 0, 10, None, 1), (0, 10, 40, None, 2), (0, 50, 40, 2, 3), (0, 90, 10, 2, 4), (2, 0, 30, 3, 4)]
    held += [(2, 30, 20, 3, 5)]
    plan = Plan(
        Formulation.DIRECT,
        Transfers.PACKED,
        tuple(Transfer(Chunk(state, offset, size), c, s, s) for state, offset, size, c, s in held),
        peak_bytes=714,
        lower_bound_bytes=714,
        proven_by=ProvenBy.BOUND,
        solver=SolverRun("none", ""),
    )
    assert verify_plan(plan, problem).lower_bound_bytes == 714
    assert verify_plan(replace(plan, lower_bound_bytes=664), problem).lower_bound_bytes == 664
    larger = with_transfer(plan, 9, Transfer(Chunk(2, 30, 20), 2, 5, 5), peak_bytes=734)
    verify_plan(larger, problem)
    with pytest.raises(VerificationError, match="arithmetic, which gives 714"):
        verify_plan(replace(larger, lower_bound_bytes=734), problem)


def test_window_of_no_length_needs_a_snapshot_at_position_0() -> None:
    """A tensor written by the first and the last operator is final at position 0 only."""
    problem = Problem((10, 10), (100, 100), (StateTensor(0, "s", 20, 1, 2),), 2_000_000_000, granule_bytes=1)
    plan = Plan(
        Formulation.DIRECT,
        Transfers.STREAMING,
        (Transfer(Chunk(0, 0, 20), 0, 1, 1),),
        peak_bytes=120,
        lower_bound_bytes=120,
        proven_by=ProvenBy.BOUND,
        solver=SolverRun("none", ""),
    )
    assert verify_plan(plan, problem) == VerifiedPlan(100, 120, 20, 120)
    with pytest.raises(VerificationError, match="20 bytes still to move"):
        verify_plan(with_transfer(plan, 0, Transfer(Chunk(0, 0, 20), None, 1, 1)), problem)


def test_snapshot_that_outlives_the_period_is_counted_twice() -> None:
    """A link that is always busy: made at -1, first in line only at 1, done at 3, with a period of 2."""
    problem = Problem(
        (10, 10),
        (100, 100),
        (StateTensor(0, "s", 10, 2, 2), StateTensor(1, "r", 10, 1, 1)),
        1_000_000_000,
        granule_bytes=1,
    )
    plan = Plan(
        Formulation.DIRECT,
        Transfers.STREAMING,
        # link: s 0..10 direct, then r, made at -1, 10..20: held at steps 0, 1 and 2 of a period of 2
        (Transfer(Chunk(0, 0, 10), None, 1, 1), Transfer(Chunk(1, 0, 10), -1, 2, 2)),
        peak_bytes=120,
        lower_bound_bytes=110,
        proven_by=ProvenBy.MILP,
        solver=SolverRun("highs", ""),
    )
    assert verify_plan(plan, problem).peak_bytes == 120


def test_nothing_to_save_is_a_plan() -> None:
    """An iteration that writes no state needs no transfer."""
    problem = Problem((10,), (100,), (), 1, granule_bytes=1)
    plan = Plan(
        Formulation.DIRECT, Transfers.STREAMING, (), 100, 100, proven_by=ProvenBy.BOUND, solver=SolverRun("none", "")
    )
    assert verify_plan(plan, problem) == VerifiedPlan(100, 100, 0, 100)


def test_hand_graph_names_its_tensors_as_the_plans_do() -> None:
    """The indices that the tables above use."""
    assert [GRAPH.tensors[i].name for i in (A, B, C)] == ["model/a", "model/b", "optimizer/a.c"]


def test_direct_read_a_tick_past_its_deadline_is_refused() -> None:
    """At 20 GB/s 20 bytes take just the nanosecond before the write, at a byte a second less a tick more."""
    problem = Problem((1, 1), (20, 20), (StateTensor(0, "s", 20, 2, 2),), 20 * 10**9, granule_bytes=1)
    plan = Plan(
        Formulation.DIRECT,
        Transfers.STREAMING,
        (Transfer(Chunk(0, 0, 20), None, 1, 1),),
        peak_bytes=20,
        lower_bound_bytes=20,
        proven_by=ProvenBy.MILP,
        solver=SolverRun("none", ""),
    )
    verify_plan(plan, problem)
    with pytest.raises(VerificationError, match="1 bytes still to move at its deadline"):
        verify_plan(
            with_transfer(plan, 0, Transfer(Chunk(0, 0, 20), None, 1, 2)),
            replace(problem, bandwidth_bytes_per_s=20 * 10**9 - 1),
        )


@pytest.mark.parametrize(
    ("hold", "peak"),
    [
        (Hold(2, 3, 5), 9),
        (Hold(2, 4, 5), 9),
        (Hold(3, 5, 5), 14),
        (Hold(4, 5, 5), 14),
        (Hold(8, 9, 5), 14),
        (Hold(0, 0, 10), 11),
        (Hold(-7, -7, 5), 14),
        (Hold(2, 9, 5), 14),
        (Hold(2, 10, 5), 14),
        (Hold(6, 17, 5), 19),
        (Hold(1, 16, 5), 19),
        (Hold(1, 17, 5), 24),
    ],
)
def test_memory_is_folded_over_the_period(hold: Hold, peak: int) -> None:
    """Residents 9, 1, 1, 1 twice over: steps 1 and 5 are full, and 9 is step 1 of the next period."""
    problem = Problem((1, 1, 1, 1), (9, 1, 1, 1), (), 1, interval=2)
    assert peak_of(terms_of_problem(problem), [hold]) == peak
