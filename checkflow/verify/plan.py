"""A plan against the rules of the formulation that it claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from checkflow.verify.bound import check_bound
from checkflow.verify.coverage import check_coverage
from checkflow.verify.failure import fail
from checkflow.verify.link import Steps, fifo, late_bytes
from checkflow.verify.memory import Hold, peak_of
from checkflow.verify.rows import Claims, Part, PlannedTransfer, named
from checkflow.verify.terms import TICKS_PER_BYTE, Terms, first_from, last_to, terms_of_problem

if TYPE_CHECKING:
    from checkflow.plan import Plan, Problem


@dataclass(frozen=True, slots=True)
class VerifiedPlan:
    """What the plan needs, recomputed."""

    training_peak_bytes: int
    peak_bytes: int
    snapshot_bytes: int
    lower_bound_bytes: int | None  # None: only a solver vouches for the plan's bound

    @property
    def bound_checked(self) -> bool:
        return self.lower_bound_bytes is not None


def verify_plan(plan: Plan, problem: Problem) -> VerifiedPlan:
    """Check a plan against its problem. Raises VerificationError at the first rule of docs/model.md that it breaks."""
    claims = Claims(
        formulation=plan.formulation.value,
        transfers=plan.transfers_kind.value,
        peak_bytes=plan.peak_bytes,
        lower_bound_bytes=plan.lower_bound_bytes,
        proven_by=plan.proven_by.value,
        constructive_peak_bytes=plan.constructive_peak_bytes,
    )
    moves = [
        PlannedTransfer(Part(t.chunk.state, t.chunk.offset_bytes, t.chunk.size_bytes), t.snapshot, t.start, t.finish)
        for t in plan.transfers
    ]
    return check_plan(claims, moves, terms_of_problem(problem))


def check_plan(claims: Claims, moves: Sequence[PlannedTransfer], terms: Terms) -> VerifiedPlan:
    """Check what is claimed of these moves. Raises VerificationError at the first rule that is broken."""
    check_coverage(terms, [move.part for move in moves], "plan")
    if claims.formulation != "direct":
        if claims.transfers != "packed":
            fail(f"transfers: formulation {claims.formulation} is always packed, not {claims.transfers}")
        holds = _paper(moves, terms)
    elif claims.transfers == "packed":
        holds = _direct_packed(moves, terms)
    else:
        holds = _direct_streaming(moves, terms)
    peak_bytes = peak_of(terms, holds)
    if claims.peak_bytes != peak_bytes:
        fail(f"peak_bytes: {claims.peak_bytes} is claimed, {peak_bytes} is needed")
    if terms.memory_limit_bytes is not None and peak_bytes > terms.memory_limit_bytes:
        fail(f"peak_bytes: {peak_bytes} is over the memory limit, {terms.memory_limit_bytes}")
    check_bound(claims, terms)
    return VerifiedPlan(
        terms.training_peak_bytes,
        peak_bytes,
        sum(hold.size_bytes for hold in holds),
        claims.lower_bound_bytes if claims.proven_by == "bound" else None,
    )


def check_created(where: str, position: int, release: int, deadline: int) -> None:
    """Raises VerificationError for a snapshot made outside [release, deadline]."""
    if not release <= position <= deadline:
        fail(f"{where}: snapshot at position {position} is outside its tensor's window, {release}..{deadline}")


def _paper(moves: Sequence[PlannedTransfer], terms: Terms) -> list[Hold]:
    """Eqs 2-11: an interval of k repeats the iteration, with each tensor's first write in the first."""
    holds = []
    last = terms.interval * terms.steps
    for number, move in enumerate(moves):
        where = named(terms, "plan", number, move.part)
        first_write = terms.state[move.part.state].first_write
        created, step = move.snapshot, move.start
        if created is None:
            fail(f"{where}: has no snapshot, which this formulation requires (Eq 2)")
        if not 1 <= created < first_write:
            fail(f"{where}: snapshot at step {created} is not within 1..{first_write - 1}, before the write (Eq 8)")
        if move.finish != step:
            fail(f"{where}: starts in step {step} and finishes in {move.finish}, not in one step (Eq 9)")
        if not created < step <= last:
            fail(f"{where}: offloaded at step {step}, not within {created + 1}..{last} (Eqs 3-7)")
        holds.append(Hold(created, step, move.part.size_bytes))
    _check_packing(moves, terms)
    return holds


def _direct_packed(moves: Sequence[PlannedTransfer], terms: Terms) -> list[Hold]:
    holds = []
    for number, move in enumerate(moves):
        where = named(terms, "plan", number, move.part)
        release, deadline = terms.state[move.part.state].window
        last = release + terms.interval * terms.steps
        step = move.start
        if move.finish != step:
            fail(f"{where}: starts in step {step} and finishes in {move.finish}, not in one step (Eq 9)")
        if not release < step <= last:
            fail(f"{where}: offloaded at step {step}, not within {release + 1}..{last}")
        if move.snapshot is not None:
            check_created(where, move.snapshot, release, deadline)
            if not move.snapshot < step:
                fail(f"{where}: offloaded at step {step}, not after its snapshot at {move.snapshot}")
            holds.append(Hold(move.snapshot + 1, step, move.part.size_bytes))
        elif step > deadline:
            fail(f"{where}: a direct offload at step {step} is after the deadline, {deadline}")
    _check_packing(moves, terms)
    return holds


def _check_packing(moves: Sequence[PlannedTransfer], terms: Terms) -> None:
    """Eq 9 for the steps folded modulo kT."""
    load: Counter[int] = Counter()
    for move in moves:
        load[(move.start - 1) % (terms.interval * terms.steps)] += move.part.size_bytes
    for place, size_bytes in sorted(load.items()):
        time_ns = terms.time_ns[place % terms.steps]
        if size_bytes * TICKS_PER_BYTE > terms.bandwidth_bytes_per_s * time_ns:
            fail(
                f"plan: {size_bytes} bytes at step {place + 1} do not fit its {time_ns} ns at "
                f"{terms.bandwidth_bytes_per_s} bytes/s (Eq 9)"
            )


def _direct_streaming(moves: Sequence[PlannedTransfer], terms: Terms) -> list[Hold]:
    ready, deadlines, places = [], [], terms.places()
    for number, move in enumerate(moves):
        release, deadline = terms.state[move.part.state].window
        release, deadline = first_from(release, places, terms.steps), last_to(deadline, places, terms.steps)
        if move.snapshot is not None:
            where = named(terms, "plan", number, move.part)
            if first_from(move.snapshot, places, terms.steps) != move.snapshot:
                fail(f"{where}: snapshot at position {move.snapshot}, where no anchor is")
            check_created(where, move.snapshot, release, deadline)
        ready.append(release if move.snapshot is None else move.snapshot)
        deadlines.append(deadline)
    holds = []
    steps = Steps(terms)
    link = fifo(terms, "plan", ready, [move.part.size_bytes for move in moves])
    for number, (move, deadline, (begin, end)) in enumerate(zip(moves, deadlines, link, strict=True)):
        where = named(terms, "plan", number, move.part)
        start, finish = steps.after(begin), steps.after(end - 1)
        if (move.start, move.finish) != (start, finish):
            fail(f"{where}: on the link in steps {start}..{finish}, not {move.start}..{move.finish}")
        if move.snapshot is not None:
            holds.append(Hold(move.snapshot + 1, first_from(finish, places, terms.steps), move.part.size_bytes))
        elif end > terms.clock(deadline):
            late = late_bytes(end, terms.clock(deadline))
            fail(f"{where}: a direct offload with {late} bytes still to move at its deadline, position {deadline}")
    return holds
