"""A plan without a solver: the earliest deadline first, each step filled with the largest chunks that fit.

In the paper's model the plan keeps within a given peak, and the least peak for which it comes out is sought; where
that is the bound of `bounds.least_peak_bytes`, the plan is optimal and proven so. In `direct`, live transfers cost no
memory, so one pass with no peak in mind does.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, field

from checkflow.plan import Chunk, Formulation, Problem, Transfer
from checkflow.plan.packed.steps import (
    ChunkClass,
    allowed_steps,
    capacity_bytes,
    classes_of,
    peak_bytes,
    period,
    snapshot_of,
)

TRIES = 12  # bisection steps between the bound and what an unlimited greedy plan needs


@dataclass(frozen=True, slots=True)
class Constructed:
    """A plan's transfers in link order, and their exact peak."""

    transfers: tuple[Transfer, ...]
    peak_bytes: int


def construct(
    problem: Problem, chunks: tuple[Chunk, ...], formulation: Formulation, bound_bytes: int
) -> Constructed | None:
    """A good plan, often one that meets the bound; None where the greedy order finds none (others may)."""
    kinds = classes_of(problem, chunks, formulation)
    if formulation is Formulation.DIRECT:
        return _checked(problem, kinds, _cyclic(problem, kinds), formulation)
    best = construct_within(problem, kinds, bound_bytes)
    if best is not None:
        return best
    best = construct_within(problem, kinds, problem.training_peak_bytes + problem.state_bytes)
    low, high = bound_bytes, bound_bytes if best is None else best.peak_bytes
    for _ in range(TRIES):
        if best is None or high - low <= 1:
            break
        middle = (low + high) // 2
        found = construct_within(problem, kinds, middle)
        if found is None:
            low = middle
        else:
            best, high = found, found.peak_bytes
    return best


def construct_within(problem: Problem, kinds: tuple[ChunkClass, ...], most_bytes: int) -> Constructed | None:
    """A plan of the paper's model with at most this peak; None where the greedy order finds none."""
    headroom = [most_bytes - base for base in problem.resident_bytes] * problem.interval
    return _checked(problem, kinds, _within(kinds, capacity_bytes(problem).tolist(), headroom), Formulation.COMPACT)


Taken = list[tuple[int, int, int]]  # (class, step, number of chunks)


@dataclass(slots=True)
class _DeadlineGroup:
    """Pending chunks of one deadline. `sizes` ascend; the places hold (class, number left) at the same index."""

    first_write: int
    sizes: list[int] = field(default_factory=list)
    classes: list[list[int]] = field(default_factory=list)
    pending_bytes: int = 0

    def add(self, kind: int, size: int, number: int) -> None:
        at = bisect_right(self.sizes, size)
        self.sizes.insert(at, size)
        self.classes.insert(at, [kind, number])
        self.pending_bytes += size * number

    def take(self, room: int, step: int, taken: Taken) -> int:
        """Bytes of the largest chunks that fit the room, one size after the other; they are no longer pending."""
        before = self.pending_bytes
        at = bisect_right(self.sizes, room) - 1
        while at >= 0:
            size, (kind, left) = self.sizes[at], self.classes[at]
            number = min(left, room // size)
            taken.append((kind, step, number))
            room -= number * size
            self.pending_bytes -= number * size
            if number == left:
                del self.sizes[at], self.classes[at]
            else:
                self.classes[at][1] -= number
            at = min(at, bisect_right(self.sizes, room)) - 1
        return before - self.pending_bytes


def _within(kinds: tuple[ChunkClass, ...], capacity: list[int], headroom: list[int]) -> Taken | None:
    """The paper's model: one pass over the steps that never holds more than the headroom (index t - 1).

    Invariant, at the top of each step: groups[:due] are those that are overwritten at the next step or before, so
    what is pending of them, `held`, is in snapshots; `free_before` is the headroom that the step before has left. What
    leaves now was in a snapshot during that step: of a group written by now it is in `held` already; of any other it
    takes from `free_before`, and from this step's `free`, too, where the group is not due.
    """
    groups: list[_DeadlineGroup] = []
    for index, kind in enumerate(kinds):  # ordered by first write
        if not groups or groups[-1].first_write != kind.first_write:
            groups.append(_DeadlineGroup(kind.first_write))
        groups[-1].add(index, kind.size_bytes, len(kind.chunks))
    if groups and groups[0].first_write < 2:
        return None
    taken: Taken = []
    held = 0  # bytes of pending groups that are due: they are snapshot at this step
    due = 0  # groups[:due] are
    free_before = headroom[0]
    while due < len(groups) and groups[due].first_write <= 2:
        held += groups[due].pending_bytes
        due += 1
    free_before -= held
    if free_before < 0:
        return None
    for step in range(2, len(capacity) + 1):
        while due < len(groups) and groups[due].first_write <= step + 1:
            held += groups[due].pending_bytes
            due += 1
        free = headroom[step - 1] - held
        if free < 0:
            return None
        room = capacity[step - 1]
        for place, group in enumerate(groups):
            if room < group.sizes[0]:
                continue
            if group.first_write <= step:  # in memory since before step - 1: leaving costs nothing
                moved = group.take(room, step, taken)
                held -= moved
            elif place < due:  # snapshot during step - 1
                moved = group.take(min(room, free_before), step, taken)
                held -= moved
                free_before -= moved
            else:
                allowed = min(room, free_before, free)
                if allowed <= 0:
                    break
                moved = group.take(allowed, step, taken)
                free_before -= moved
                free -= moved
            room -= moved
            if room <= 0:
                break
        if any(not group.sizes for group in groups):
            due -= sum(not group.sizes for group in groups[:due])
            groups = [group for group in groups if group.sizes]
        free_before = free
    return None if groups else taken


def _cyclic(problem: Problem, kinds: tuple[ChunkClass, ...]) -> Taken | None:
    """`direct`: one pass over all windows, folded steps sharing what they can carry."""
    length = period(problem)
    room = capacity_bytes(problem).tolist()
    windows = [allowed_steps(problem, kind, Formulation.DIRECT) for kind in kinds]
    arrivals = sorted(range(len(kinds)), key=lambda index: windows[index].start)
    if not arrivals:
        return []
    taken: Taken = []
    groups: list[tuple[int, int, _DeadlineGroup]] = []  # (deadline, expiry, pending chunks), ascending
    upcoming = 0
    for step in range(windows[arrivals[0]].start, windows[arrivals[-1]].stop):
        while upcoming < len(arrivals) and windows[arrivals[upcoming]].start <= step:
            index = arrivals[upcoming]
            kind, window = kinds[index], windows[index]
            group = _DeadlineGroup(kind.first_write)
            group.add(index, kind.size_bytes, len(kind.chunks))
            insort(groups, (kind.first_write, window.stop, group), key=lambda entry: entry[:2])
            upcoming += 1
        at = (step - 1) % length
        emptied = False
        for _, expiry, group in groups:
            if expiry <= step:
                return None
            if room[at] >= group.sizes[0]:
                room[at] -= group.take(room[at], step, taken)
                emptied = emptied or not group.sizes
        if emptied:
            groups = [entry for entry in groups if entry[2].sizes]
    return None if groups else taken


def _checked(
    problem: Problem, kinds: tuple[ChunkClass, ...], taken: Taken | None, formulation: Formulation
) -> Constructed | None:
    """The transfers that the counts mean, with the peak recomputed from nothing but them."""
    if taken is None:
        return None
    used = [0] * len(kinds)
    transfers: list[Transfer] = []
    for index, step, number in taken:
        kind = kinds[index]
        created = snapshot_of(kind, step, formulation)
        chunks = kind.chunks[used[index] : used[index] + number]
        transfers += [Transfer(chunk, created, step, step) for chunk in chunks]
        used[index] += number
    transfers.sort(key=lambda transfer: transfer.start)
    peak = peak_bytes(problem, transfers, formulation)
    return None if peak is None else Constructed(tuple(transfers), peak)
