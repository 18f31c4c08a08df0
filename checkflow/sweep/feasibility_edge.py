"""The feasibility edge along one axis: the least value that is feasible, shown by the next smaller one that is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from checkflow.plan.infeasible import MOST_INTERVAL
from checkflow.sweep.cells import BATCH_SIZE, Axis, Cell, Edge, Row, Search
from checkflow.units import format_rate

MOST_BYTES_PER_S = 10**15  # no link is a thousand times faster than today's fastest
LEAST_BYTES_PER_S = 1_000
RESOLUTION_BYTES_PER_S = 10**8  # where bisection alone finds the edge

Evaluate = Callable[[Cell], Row]


@dataclass(frozen=True)
class _Line:
    """The values of one axis: where to begin, how far to go, and when to stop."""

    start: int
    least: int
    most: int
    hint: Callable[[Row], int | None]  # what an infeasible row says would do
    resolution: Callable[[int], int]
    text: Callable[[int], str]


def edge_of(search: Search, link_bytes_per_s: int | None, evaluate: Evaluate) -> Edge:
    """Bracket by doubling or halving, take what an infeasible row says would do and check it, and bisect.

    Every value that the answer speaks of was planned. A value that fails counts as one that is not feasible.
    `link_bytes_per_s` is where a search for the bandwidth begins.
    """
    line = _line(search, link_bytes_per_s)
    rows: dict[int, Row] = {}

    def probe(value: int) -> Row:
        if value not in rows:
            rows[value] = evaluate(cell_at(search, value))
        return rows[value]

    def good(value: int) -> bool:
        return probe(value).feasible

    bracket = _bracket(line, good)
    if bracket is None:
        message = f"no {search.axis} up to {line.text(line.most)} is feasible"
        return Edge(search=search, found=None, fails=probe(max(rows)), tried=len(rows), message=message)
    low, high = bracket
    if low is None:
        message = f"feasible at {line.text(high)}, the least there is to try"
        return Edge(search=search, found=probe(high), fails=None, tried=len(rows), message=message)
    hinted = line.hint(probe(low))
    if hinted is not None and low < hinted <= high and good(hinted):
        high = hinted
        if low < hinted - 1:
            low, high = (low, hinted - 1) if good(hinted - 1) else (hinted - 1, high)
    while high - low > line.resolution(high):
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return Edge(search=search, found=probe(high), fails=probe(low), tried=len(rows))


def cell_at(search: Search, value: int) -> Cell:
    """The search's cell with a value on its axis."""
    match search.axis:
        case Axis.BANDWIDTH:
            return search.cell.model_copy(update={"bandwidth_bytes_per_s": value})
        case Axis.INTERVAL:
            return search.cell.model_copy(update={"interval": value})
        case Axis.BATCH_SIZE:
            settings = tuple(sorted((*search.cell.settings, (BATCH_SIZE, str(value)))))
            return search.cell.model_copy(update={"settings": settings})


def value_of(row: Row, axis: Axis) -> int:
    """Where on an axis a row of a search lies: bytes a second, iterations, or a batch size."""
    match axis:
        case Axis.BANDWIDTH:
            value = row.cell.bandwidth_bytes_per_s
        case Axis.INTERVAL:
            value = row.cell.interval
        case Axis.BATCH_SIZE:
            value = int(dict(row.cell.settings)[BATCH_SIZE])
    assert value is not None
    return value


def _bracket(line: _Line, good: Callable[[int], bool]) -> tuple[int | None, int] | None:
    """(one that is not feasible, or None where there is none below; one that is); None where none is feasible."""
    low, high = line.start, line.start
    if good(line.start):
        while high > line.least:
            low = max(line.least, high // 2)
            if not good(low):
                return low, high
            high = low
        return None, high
    while low < line.most:
        high = min(low * 2, line.most)
        if good(high):
            return low, high
        low = high
    return None


def _line(search: Search, link_bytes_per_s: int | None) -> _Line:
    match search.axis:
        case Axis.BANDWIDTH:
            return _Line(
                start=link_bytes_per_s or 10**10,
                least=LEAST_BYTES_PER_S,
                most=MOST_BYTES_PER_S,
                hint=lambda row: row.needed_bandwidth_bytes_per_s,
                resolution=lambda value: max(1, min(RESOLUTION_BYTES_PER_S, value // 1000)),
                text=format_rate,
            )
        case Axis.INTERVAL:
            return _Line(1, 1, MOST_INTERVAL, lambda row: row.smallest_interval, lambda _: 1, str)
        case Axis.BATCH_SIZE:
            return _Line(1, 1, search.up_to, lambda _: None, lambda _: 1, str)


def exact(edge: Edge) -> bool:
    """Whether nothing lies between the edge and its neighbour."""
    if edge.found is None or edge.fails is None:
        return edge.fails is None
    return value_of(edge.found, edge.search.axis) - value_of(edge.fails, edge.search.axis) == 1
