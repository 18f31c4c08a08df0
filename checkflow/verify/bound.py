"""The lower bounds that arithmetic gives, from docs/model.md."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from checkflow.plan import Formulation, Plan, Problem, ProvenBy, Transfers
from checkflow.verify.failure import fail
from checkflow.verify.link import TICKS_PER_BYTE, late_bytes


def check_bound(plan: Plan, problem: Problem, training_peak_bytes: int) -> None:
    """Raises VerificationError for a bound that cannot be one, or that arithmetic is said to give and does not.

    Packed plans may claim any bound from the training peak up to what arithmetic gives.
    """
    claimed = plan.lower_bound_bytes
    if not training_peak_bytes <= claimed <= plan.peak_bytes:
        fail(
            f"lower_bound_bytes: {claimed} is not between the training peak, {training_peak_bytes}, and the plan's "
            f"peak, {plan.peak_bytes}"
        )
    if plan.constructive_peak_bytes is not None and plan.constructive_peak_bytes < claimed:
        fail(f"constructive_peak_bytes: {plan.constructive_peak_bytes} is below the lower bound, {claimed}")
    if plan.proven_by is ProvenBy.BOUND:
        if plan.formulation is Formulation.DIRECT:
            bound_bytes = max(training_peak_bytes, fluid_bound(problem))
        else:
            bound_bytes = paper_bound(problem, training_peak_bytes, plan.peak_bytes)
        if claimed > bound_bytes or (claimed < bound_bytes and plan.transfers_kind is Transfers.STREAMING):
            fail(f"lower_bound_bytes: {claimed} is said to follow from arithmetic, which gives {bound_bytes}")


def fluid_bound(problem: Problem) -> int:
    """Largest of resident + ⌈left⌉ over the steps, in bytes. The state has to fit what the link carries in a period.

    At position 0 all is released, and each class {deadline <= p} only shrinks from there: all there is to find is the
    tick at which it is empty. The previous checkpoint's bytes go first, but since both fit the period they are gone
    before they can make a class empty later than its own releases do.
    """
    latest_first = [
        (problem.clock(release), deadline, size_bytes)
        for (release, deadline), size_bytes in sorted(
            ((problem.window(state), state.size_bytes) for state in problem.state), reverse=True
        )
    ]
    deadlines = sorted({deadline for _, deadline, _ in latest_first})
    emptied = [_emptied(latest_first, deadline) for deadline in deadlines]
    bound_bytes = 0
    for step in range(1, min(problem.interval, 2) * problem.steps + 1):  # later iterations repeat, with fewer left
        classes = bisect_left(deadlines, step)
        left_bytes = max(late_bytes(emptied[classes - 1], problem.clock(step - 1)), 0) if classes else 0
        bound_bytes = max(bound_bytes, problem.resident_bytes[(step - 1) % problem.steps] + left_bytes)
    return bound_bytes


def _emptied(latest_first: Sequence[tuple[int, int, int]], deadline: int) -> int:
    """Tick at which the link has sent all that is due by a deadline, from rows (tick of release, deadline, bytes).

    The largest, over the releases a, of clock(a) + what is released from a on.
    """
    ticks, ends = 0, []
    for opened, due, size_bytes in latest_first:
        if due <= deadline:
            ticks += size_bytes * TICKS_PER_BYTE
            ends.append(opened + ticks)
    return max(ends)


def paper_bound(problem: Problem, training_peak_bytes: int, known_bytes: int) -> int:
    """The least peak for which the fluid relaxation of the paper's model fits, known to be at most known_bytes."""
    steps = problem.steps * problem.interval
    resident = problem.resident_bytes * problem.interval
    moved = [problem.bandwidth_bytes_per_s * time_ns // TICKS_PER_BYTE for time_ns in problem.time_ns]
    due = [0] * (steps + 1)  # by step, from 1: bytes of which it holds what has not left
    for state in problem.state:
        due[max(state.first_write - 1, 1)] += state.size_bytes
    due = list(accumulate(due))

    def fits(peak_bytes: int) -> bool:
        left = 0  # what has left before the step
        for step in range(1, steps + 1):
            headroom = peak_bytes - resident[step - 1]
            if due[step] - left > headroom:
                return False
            if step > 1:
                left += min(moved[(step - 1) % problem.steps], peak_bytes - resident[step - 2], headroom)
        return left >= problem.state_bytes

    return bisect_left(range(training_peak_bytes, known_bytes), True, key=fits) + training_peak_bytes
