"""Random planning problems small enough to try every plan. At 1e9 bytes a second the link moves a byte each ns."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from checkflow.plan import Chunk, Problem, StateTensor

BYTE_PER_NS = 1_000_000_000
WHOLE = st.just(BYTE_PER_NS)
ONCE = st.just(1)


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    max_steps: int = 5,
    max_tensors: int = 3,
    max_bytes: int = 4,
    bandwidths: st.SearchStrategy[int] = WHOLE,
    intervals: st.SearchStrategy[int] = ONCE,
    earliest_write: int = 1,
) -> Problem:
    """A problem with sizes, times and resident bytes of a few units each, and no limit on memory."""
    steps = draw(st.integers(max(2, earliest_write), max_steps))
    sizes = draw(st.lists(st.integers(1, max_bytes), min_size=1, max_size=max_tensors))
    state = []
    for index, size in enumerate(sizes):
        first = draw(st.integers(earliest_write, steps))
        last = draw(st.integers(first, steps))
        state.append(StateTensor(index, f"model/p{index}", size, first, last))
    times = draw(st.lists(st.integers(0, 5), min_size=steps, max_size=steps).filter(any))
    resident = draw(st.lists(st.integers(0, 9), min_size=steps, max_size=steps))
    return Problem(
        time_ns=tuple(times),
        resident_bytes=tuple(resident),
        state=tuple(state),
        bandwidth_bytes_per_s=draw(bandwidths),
        interval=draw(intervals),
        granule_bytes=1,
    )


@st.composite
def on_some_anchors(draw: st.DrawFn, found: st.SearchStrategy[Problem]) -> Problem:
    """Such a problem with an anchor at its end, and at some other positions or at all."""
    problem = draw(found)
    some = draw(st.sets(st.integers(1, problem.steps - 1)) | st.none())
    return problem if some is None else replace(problem, anchors=(*sorted(some), problem.steps))


@st.composite
def chunkings(draw: st.DrawFn, problem: Problem, *, most: int = 5) -> tuple[Chunk, ...]:
    """Some way of cutting a problem's tensors, into at most `most` chunks unless there are more tensors."""
    spare = max(0, most - len(problem.state))
    chunks: list[Chunk] = []
    for index, tensor in enumerate(problem.state):
        cuts = draw(st.sets(st.integers(1, tensor.size_bytes), max_size=spare)) - {tensor.size_bytes}
        spare -= len(cuts)
        edges = [0, *sorted(cuts), tensor.size_bytes]
        chunks += [Chunk(index, low, high - low) for low, high in pairwise(edges)]
    return tuple(chunks)


def unit_chunks(problem: Problem) -> tuple[Chunk, ...]:
    """One chunk for each byte."""
    return tuple(
        Chunk(index, offset, 1) for index, tensor in enumerate(problem.state) for offset in range(tensor.size_bytes)
    )
