"""Every plan of a tiny instance, tried one by one: the reference that the other planners are compared with.

Written from docs/model.md alone. Nothing is inferred from dominance or symmetry, save that a chunk equal to the one
before it in size and tensor is not tried before it in the link's order. A choice is left early only where the chunks
placed so far already break a rule or reach a peak that some whole plan has.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from itertools import permutations, product

from checkflow.plan import (
    Chunk,
    Formulation,
    Infeasible,
    Plan,
    Problem,
    ProvenBy,
    Reason,
    SolverRun,
    Transfer,
    Transfers,
)

BYTE = 1_000_000_000  # ticks of the link clock


def exhaustive(
    problem: Problem, chunks: Sequence[Chunk], formulation: Formulation, transfers: Transfers
) -> Plan | Infeasible:
    """The best plan that moves exactly these chunks.

    Of an Infeasible only the reason is meant: the figures that would need another search are None.
    """
    began = time.monotonic()
    if transfers is Transfers.STREAMING:
        if formulation is not Formulation.DIRECT:
            raise ValueError("only `direct` has streaming transfers")
        best = _best_streaming(problem, chunks)
    else:
        best = _best_packed(problem, chunks, formulation)
    if best is None:
        return _infeasible(_why(problem, formulation, transfers), "every plan was tried and none keeps the rules")
    peak, plan = best
    if problem.memory_limit_bytes is not None and peak > problem.memory_limit_bytes:
        return _infeasible(Reason.MEMORY, f"every plan was tried; the least peak is {peak} bytes")
    run = SolverRun("exhaustive", "every plan was tried", time.monotonic() - began)
    return Plan(formulation, transfers, plan, peak, peak, ProvenBy.EXHAUSTIVE, run)


def _infeasible(reason: Reason, detail: str) -> Infeasible:
    return Infeasible(reason, detail, None, None, None)


def _why(problem: Problem, formulation: Formulation, transfers: Transfers) -> Reason:
    """The first reason that holds: a write at step 1, then the bytes against all the link can move, then chunks."""
    period = problem.interval * problem.steps
    if formulation is not Formulation.DIRECT and any(tensor.first_write == 1 for tensor in problem.state):
        return Reason.DEADLINE
    if transfers is Transfers.STREAMING:
        room = problem.clock(period) // BYTE
    else:
        first = 1 if formulation is Formulation.DIRECT else 2
        room = sum(_room(problem, step) for step in range(first, period + 1))
    return Reason.BANDWIDTH if problem.state_bytes > room else Reason.CHUNK


def _room(problem: Problem, step: int) -> int:
    """Whole bytes that the link moves during one step."""
    return (problem.clock(step) - problem.clock(step - 1)) // BYTE


# --- packed: each chunk picks a step and a creation -------------------------------------------------------------------


def _packed_choices(problem: Problem, chunk: Chunk, formulation: Formulation) -> Iterator[Transfer]:
    """All that the rules allow one chunk on its own."""
    tensor = problem.state[chunk.state]
    period = problem.interval * problem.steps
    if formulation is not Formulation.DIRECT:
        for created in range(1, tensor.first_write):
            for step in range(created + 1, period + 1):
                yield Transfer(chunk, created, step, step)
        return
    release, deadline = problem.window(tensor)
    for step in range(release + 1, release + period + 1):
        if step <= deadline:
            yield Transfer(chunk, None, step, step)
        for created in range(release, min(deadline, step - 1) + 1):
            yield Transfer(chunk, created, step, step)


def _best_packed(
    problem: Problem, chunks: Sequence[Chunk], formulation: Formulation
) -> tuple[int, tuple[Transfer, ...]] | None:
    period = problem.interval * problem.steps
    room = [_room(problem, step) for step in range(1, period + 1)]
    memory = list(problem.resident_bytes) * problem.interval
    chosen: list[Transfer] = []
    best: tuple[int, tuple[Transfer, ...]] | None = None

    def occupied(transfer: Transfer) -> range:
        if transfer.snapshot is None:
            return range(0)
        later = 1 if formulation is Formulation.DIRECT else 0  # a position is the instant after its step
        return range(transfer.snapshot + later, transfer.finish + 1)

    def place(index: int) -> None:
        nonlocal best
        peak = max(memory)
        if best is not None and peak >= best[0]:
            return
        if index == len(chunks):
            best = peak, tuple(sorted(chosen, key=lambda transfer: transfer.start))
            return
        size = chunks[index].size_bytes
        for transfer in _packed_choices(problem, chunks[index], formulation):
            at = (transfer.start - 1) % period
            if room[at] < size:
                continue
            room[at] -= size
            chosen.append(transfer)
            for step in occupied(transfer):
                memory[(step - 1) % period] += size
            place(index + 1)
            for step in occupied(transfer):
                memory[(step - 1) % period] -= size
            chosen.pop()
            room[at] += size

    place(0)
    return best


# --- streaming: an order of the chunks, and a creation for each -------------------------------------------------------


def _best_streaming(problem: Problem, chunks: Sequence[Chunk]) -> tuple[int, tuple[Transfer, ...]] | None:
    best: tuple[int, tuple[Transfer, ...]] | None = None
    for order in _orders(chunks):
        creations = [_creations(problem, chunk) for chunk in order]
        for snapshots in product(*creations):
            plan = _played(problem, order, snapshots)
            if plan is not None:
                peak = _streaming_peak(problem, plan)
                if best is None or peak < best[0]:
                    best = peak, plan
    return best


def _orders(chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, ...]]:
    """All orders in which equal chunks of one tensor keep theirs."""
    seen: set[tuple[tuple[int, int], ...]] = set()
    for order in permutations(chunks):
        look = tuple((chunk.state, chunk.size_bytes) for chunk in order)
        if look not in seen:
            seen.add(look)
            yield order


def _fires(problem: Problem, position: int) -> bool:
    """Whether something may be done at an unrolled position."""
    return problem.anchors is None or (position - 1) % problem.steps + 1 in problem.anchors


def _window(problem: Problem, chunk: Chunk) -> tuple[int, int]:
    release, deadline = problem.window(problem.state[chunk.state])
    while not _fires(problem, release):
        release += 1
    while not _fires(problem, deadline):
        deadline -= 1
    return release, deadline


def _creations(problem: Problem, chunk: Chunk) -> tuple[int | None, ...]:
    release, deadline = _window(problem, chunk)
    return (None, *(position for position in range(release, deadline + 1) if _fires(problem, position)))


def _played(
    problem: Problem, order: tuple[Chunk, ...], snapshots: tuple[int | None, ...]
) -> tuple[Transfer, ...] | None:
    """The queue in its steady state; None where it has none or a live tensor is read after its deadline."""
    windows = [_window(problem, chunk) for chunk in order]
    ready = [
        problem.clock(window[0] if created is None else created)
        for window, created in zip(windows, snapshots, strict=True)
    ]
    cycle = problem.clock(problem.interval * problem.steps)
    before: int | None = None  # when the previous checkpoint's last transfer ends
    for _ in range(len(order) + 3):
        spans: list[tuple[int, int]] = []
        end = before
        for chunk, at in zip(order, ready, strict=True):
            begin = at if end is None else max(end, at)
            end = begin + BYTE * chunk.size_bytes
            spans.append((begin, end))
        again = None if end is None else end - cycle
        if again == before:
            break
        before = again
    else:
        return None  # each checkpoint ends later than the one before: the link cannot keep up
    for (_, end), (_, deadline), created in zip(spans, windows, snapshots, strict=True):
        if created is None and end > problem.clock(deadline):
            return None
    return tuple(
        Transfer(chunk, created, _step_after(problem, begin), _step_until(problem, end))
        for chunk, created, (begin, end) in zip(order, snapshots, spans, strict=True)
    )


def _step_after(problem: Problem, begin: int) -> int:
    """The least step s with clock(s) > begin."""
    step = math.floor(begin / problem.clock(problem.steps) * problem.steps) - 2 * problem.steps
    while problem.clock(step) <= begin:
        step += 1
    return step


def _step_until(problem: Problem, end: int) -> int:
    """The least step s with clock(s) >= end."""
    step = math.floor(end / problem.clock(problem.steps) * problem.steps) - 2 * problem.steps
    while problem.clock(step) < end:
        step += 1
    return step


def _streaming_peak(problem: Problem, plan: tuple[Transfer, ...]) -> int:
    period = problem.interval * problem.steps
    memory = list(problem.resident_bytes) * problem.interval
    for transfer in plan:
        if transfer.snapshot is not None:
            released = transfer.finish
            while not _fires(problem, released):
                released += 1
            for step in range(transfer.snapshot + 1, released + 1):
                memory[(step - 1) % period] += transfer.chunk.size_bytes
    return max(memory)
