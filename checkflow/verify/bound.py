"""The lower bounds that arithmetic gives, from docs/model.md."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from checkflow.verify.failure import fail
from checkflow.verify.link import late_bytes
from checkflow.verify.rows import Claims
from checkflow.verify.terms import TICKS_PER_BYTE, Terms, first_from, last_to


def check_bound(claims: Claims, terms: Terms) -> None:
    """Raises VerificationError for a bound that cannot be one, or that arithmetic is said to give and does not.

    Packed plans may claim any bound from the training peak up to what arithmetic gives.
    """
    claimed, training_peak_bytes = claims.lower_bound_bytes, terms.training_peak_bytes
    if not training_peak_bytes <= claimed <= claims.peak_bytes:
        fail(
            f"lower_bound_bytes: {claimed} is not between the training peak, {training_peak_bytes}, and the plan's "
            f"peak, {claims.peak_bytes}"
        )
    if claims.constructive_peak_bytes is not None and claims.constructive_peak_bytes < claimed:
        fail(f"constructive_peak_bytes: {claims.constructive_peak_bytes} is below the lower bound, {claimed}")
    if claims.proven_by == "bound":
        if claims.transfers == "streaming":
            bound_bytes = max(training_peak_bytes, fluid_bound(terms))
        elif claims.formulation == "direct":
            bound_bytes = max(training_peak_bytes, ideal_bound(terms))
        else:
            bound_bytes = paper_bound(terms, claims.peak_bytes)
        if claimed > bound_bytes or (claimed < bound_bytes and claims.transfers == "streaming"):
            fail(f"lower_bound_bytes: {claimed} is said to follow from arithmetic, which gives {bound_bytes}")


def fluid_bound(terms: Terms) -> int:
    """Largest of resident + ⌈left⌉ over the steps, in bytes. The state has to fit what the link carries in a period.

    Nothing is done between two anchors: windows end on them, and what is left at one stays until the next.

    At its deadline all of a class {deadline <= p} is released, and it only shrinks from there: all there is to find is
    the tick at which it is empty. The previous checkpoint's bytes go first: it begins when they are gone, or later.
    Until then all of the class is left, and so is what of theirs is past its deadline: they are a period further on.
    """
    places = terms.places()
    windows = [
        (first_from(saved.release, places, terms.steps), last_to(saved.deadline, places, terms.steps), saved.size_bytes)
        for saved in terms.state
    ]
    due_at: Counter[int] = Counter()
    for _, last, size_bytes in windows:
        due_at[last] += size_bytes * TICKS_PER_BYTE
    deadlines = sorted(due_at)
    due = list(accumulate(due_at[deadline] for deadline in deadlines))  # of each class
    sent = _sent([(terms.clock(release), last, size_bytes) for release, last, size_bytes in sorted(windows)])
    free = sent[-1] - terms.clock(terms.interval * terms.steps) if deadlines else 0
    emptied = [max(tick, free + ticks) for tick, ticks in zip(sent, due, strict=True)]
    left: Counter[int] = Counter()  # ticks by step - 1, folded
    position = deadlines[0] if deadlines else 0
    while deadlines and terms.clock(held_from := last_to(position, places, terms.steps)) < emptied[-1]:
        classes = bisect_right(deadlines, held_from)
        if classes:
            ticks = min(due[classes - 1], emptied[classes - 1] - terms.clock(held_from))
            left[position % (terms.interval * terms.steps)] += max(0, ticks)
        position += 1
    held = (terms.resident_bytes[at % terms.steps] + late_bytes(ticks, 0) for at, ticks in left.items())
    return max((terms.training_peak_bytes, *held))


def ideal_bound(terms: Terms) -> int:
    """The same with an anchor between any two operators."""
    return fluid_bound(replace(terms, anchors=None))


def _sent(windows: Sequence[tuple[int, int, int]]) -> list[int]:
    """Ticks at which an idle link has sent all that is due by each deadline, from rows (tick of release, deadline,
    bytes) in order of release.

    The largest, over the releases a, of clock(a) + what is released from a on. Rows are put one by one into a tree, of
    which each node has that of its rows alone, and how many ticks these take: of two nodes the earlier has to wait for
    what the later one takes.
    """
    leaves, total = 1 << len(windows).bit_length(), sum(size_bytes for _, _, size_bytes in windows) * TICKS_PER_BYTE
    never = min((opened for opened, _, _ in windows), default=0) - total  # not even with all the rest is it the largest
    ends, ticks = [never] * (2 * leaves), [0] * (2 * leaves)
    sent: dict[int, int] = {}
    for number in sorted(range(len(windows)), key=lambda number: windows[number][1]):
        opened, deadline, size_bytes = windows[number]
        node = leaves + number
        ticks[node] = size_bytes * TICKS_PER_BYTE
        ends[node] = opened + ticks[node]
        while node := node // 2:
            earlier, later = 2 * node, 2 * node + 1
            ticks[node] = ticks[earlier] + ticks[later]
            ends[node] = max(ends[earlier] + ticks[later], ends[later])
        sent[deadline] = ends[1]
    return list(sent.values())


def paper_bound(terms: Terms, known_bytes: int) -> int:
    """The least peak for which the fluid relaxation of the paper's model fits, known to be at most known_bytes."""
    steps = terms.steps * terms.interval
    resident = terms.resident_bytes * terms.interval
    moved = [terms.bandwidth_bytes_per_s * time_ns // TICKS_PER_BYTE for time_ns in terms.time_ns]
    due = [0] * (steps + 1)  # by step, from 1: bytes of which it holds what has not left
    for saved in terms.state:
        due[max(saved.first_write - 1, 1)] += saved.size_bytes
    due = list(accumulate(due))

    def fits(peak_bytes: int) -> bool:
        left = 0  # what has left before the step
        for step in range(1, steps + 1):
            headroom = peak_bytes - resident[step - 1]
            if due[step] - left > headroom:
                return False
            if step > 1:
                left += min(moved[(step - 1) % terms.steps], peak_bytes - resident[step - 2], headroom)
        return left >= sum(saved.size_bytes for saved in terms.state)

    least = terms.training_peak_bytes
    return bisect_left(range(least, known_bytes), True, key=fits) + least
