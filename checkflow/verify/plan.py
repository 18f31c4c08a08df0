"""A plan against the rules of the formulation that it claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from checkflow.plan import Formulation, Plan, Problem, ProvenBy, Transfer, Transfers
from checkflow.verify.bound import check_bound
from checkflow.verify.coverage import check_coverage
from checkflow.verify.failure import fail, row
from checkflow.verify.link import TICKS_PER_BYTE, Steps, fifo, late_bytes
from checkflow.verify.memory import Hold, peak_of


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
    check_coverage(problem, [transfer.chunk for transfer in plan.transfers], "plan")
    if plan.formulation is not Formulation.DIRECT:
        if plan.transfers_kind is not Transfers.PACKED:
            fail(f"transfers: formulation {plan.formulation} is always packed, not {plan.transfers_kind}")
        holds = _paper(plan.transfers, problem)
    elif plan.transfers_kind is Transfers.PACKED:
        holds = _direct_packed(plan.transfers, problem)
    else:
        holds = _direct_streaming(plan.transfers, problem)
    peak_bytes, training_peak_bytes = peak_of(problem, holds), max(problem.resident_bytes, default=0)
    if plan.peak_bytes != peak_bytes:
        fail(f"peak_bytes: {plan.peak_bytes} is claimed, {peak_bytes} is needed")
    if problem.memory_limit_bytes is not None and peak_bytes > problem.memory_limit_bytes:
        fail(f"peak_bytes: {peak_bytes} is over the memory limit, {problem.memory_limit_bytes}")
    check_bound(plan, problem, training_peak_bytes)
    return VerifiedPlan(
        training_peak_bytes,
        peak_bytes,
        sum(hold.size_bytes for hold in holds),
        plan.lower_bound_bytes if plan.proven_by is ProvenBy.BOUND else None,
    )


def check_created(where: str, position: int, release: int, deadline: int) -> None:
    """Raises VerificationError for a snapshot made outside [release, deadline]."""
    if not release <= position <= deadline:
        fail(f"{where}: snapshot at position {position} is outside its tensor's window, {release}..{deadline}")


def _paper(transfers: Sequence[Transfer], problem: Problem) -> list[Hold]:
    """Eqs 2-11: an interval of k repeats the iteration, with each tensor's first write in the first."""
    holds = []
    last = problem.interval * problem.steps
    for number, transfer in enumerate(transfers):
        where = row(problem, "plan", number, transfer.chunk)
        first_write = problem.state[transfer.chunk.state].first_write
        created, step = transfer.snapshot, transfer.start
        if created is None:
            fail(f"{where}: has no snapshot, which this formulation requires (Eq 2)")
        if not 1 <= created < first_write:
            fail(f"{where}: snapshot at step {created} is not within 1..{first_write - 1}, before the write (Eq 8)")
        if transfer.finish != step:
            fail(f"{where}: starts in step {step} and finishes in {transfer.finish}, not in one step (Eq 9)")
        if not created < step <= last:
            fail(f"{where}: offloaded at step {step}, not within {created + 1}..{last} (Eqs 3-7)")
        holds.append(Hold(created, step, transfer.chunk.size_bytes))
    _check_packing(transfers, problem)
    return holds


def _direct_packed(transfers: Sequence[Transfer], problem: Problem) -> list[Hold]:
    holds = []
    for number, transfer in enumerate(transfers):
        where = row(problem, "plan", number, transfer.chunk)
        release, deadline = problem.window(problem.state[transfer.chunk.state])
        last = release + problem.interval * problem.steps
        step = transfer.start
        if transfer.finish != step:
            fail(f"{where}: starts in step {step} and finishes in {transfer.finish}, not in one step (Eq 9)")
        if not release < step <= last:
            fail(f"{where}: offloaded at step {step}, not within {release + 1}..{last}")
        if transfer.snapshot is not None:
            check_created(where, transfer.snapshot, release, deadline)
            if not transfer.snapshot < step:
                fail(f"{where}: offloaded at step {step}, not after its snapshot at {transfer.snapshot}")
            holds.append(Hold(transfer.snapshot + 1, step, transfer.chunk.size_bytes))
        elif step > deadline:
            fail(f"{where}: a direct offload at step {step} is after the deadline, {deadline}")
    _check_packing(transfers, problem)
    return holds


def _check_packing(transfers: Sequence[Transfer], problem: Problem) -> None:
    """Eq 9 for the steps folded modulo kT."""
    load: Counter[int] = Counter()
    for transfer in transfers:
        load[(transfer.start - 1) % (problem.interval * problem.steps)] += transfer.chunk.size_bytes
    for place, size_bytes in sorted(load.items()):
        time_ns = problem.time_ns[place % problem.steps]
        if size_bytes * TICKS_PER_BYTE > problem.bandwidth_bytes_per_s * time_ns:
            fail(
                f"plan: {size_bytes} bytes at step {place + 1} do not fit its {time_ns} ns at "
                f"{problem.bandwidth_bytes_per_s} bytes/s (Eq 9)"
            )


def _direct_streaming(transfers: Sequence[Transfer], problem: Problem) -> list[Hold]:
    ready, deadlines = [], []
    for number, transfer in enumerate(transfers):
        release, deadline = problem.window(problem.state[transfer.chunk.state])
        if transfer.snapshot is not None:
            check_created(row(problem, "plan", number, transfer.chunk), transfer.snapshot, release, deadline)
        ready.append(release if transfer.snapshot is None else transfer.snapshot)
        deadlines.append(deadline)
    holds = []
    steps = Steps(problem)
    link = fifo(problem, "plan", ready, [transfer.chunk.size_bytes for transfer in transfers])
    for number, (transfer, deadline, (begin, end)) in enumerate(zip(transfers, deadlines, link, strict=True)):
        where = row(problem, "plan", number, transfer.chunk)
        start, finish = steps.after(begin), steps.after(end - 1)
        if (transfer.start, transfer.finish) != (start, finish):
            fail(f"{where}: on the link in steps {start}..{finish}, not {transfer.start}..{transfer.finish}")
        if transfer.snapshot is not None:
            holds.append(Hold(transfer.snapshot + 1, finish, transfer.chunk.size_bytes))
        elif end > problem.clock(deadline):
            late = late_bytes(end, problem.clock(deadline))
            fail(f"{where}: a direct offload with {late} bytes still to move at its deadline, position {deadline}")
    return holds
