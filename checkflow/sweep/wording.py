"""A sweep in words: the name of a cell, its figures, what would make it feasible, and a summary of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from checkflow.sweep.cells import Answer, Axis, Cell, Edge, Row
from checkflow.sweep.feasibility_edge import value_of
from checkflow.units import format_bytes, format_ns, format_rate


def axes_of(cell: Cell) -> dict[str, str]:
    """Each axis of a cell but the bandwidth, by name, as a person reads it."""
    return {
        "model": cell.model,
        **dict(cell.settings),
        "device": cell.device or "",
        "policy": cell.policy,
        "formulation": cell.formulation or "",
        "chunk": "" if cell.chunk_bytes is None else format_bytes(cell.chunk_bytes),
        "slack": f"{cell.slack_ppm / 1e6:g}",
        "interval": "auto" if cell.interval is None else str(cell.interval),
    }


def varying(cells: Sequence[Cell]) -> list[str]:
    """The axes on which cells differ, and the model."""
    axes = [axes_of(cell) for cell in cells]
    names = dict.fromkeys(name for each in axes for name in each)
    return [name for name in names if name == "model" or len({each.get(name) for each in axes}) > 1]


def verdict(row: Row) -> tuple[str, str]:
    """A cell in one word, and its colour: yes, k=2, or why not. "*" is for a peak above the device's memory."""
    if row.failed:
        return "failed", "magenta"
    mark = "*" if row.exceeds_memory else ""
    if not row.feasible:
        return f"{row.reason}{mark}", "red"
    text = "yes" if row.cell.interval is not None else f"k={row.interval}"
    return text + mark, "yellow" if mark else "green"


FIGURES: dict[str, tuple[Callable[[Row], int | float | None], Callable[[float], str]]] = {
    "iteration": (lambda row: row.iteration_time_ns, lambda value: format_ns(int(value))),
    "state": (lambda row: row.state_bytes, lambda value: format_bytes(int(value))),
    "training": (lambda row: row.training_peak_bytes, lambda value: format_bytes(int(value))),
    "peak": (lambda row: row.peak_bytes, lambda value: format_bytes(int(value))),
    "packed": (lambda row: row.packed_peak_bytes, lambda value: format_bytes(int(value))),
    "overhead": (lambda row: row.overhead, lambda value: f"{value:.1%}"),
    "saving": (lambda row: row.saving, lambda value: f"{value:.1%}"),
    "disk": (lambda row: row.disk_bytes_per_s, lambda value: format_rate(int(value))),
}
LEGEND = (
    "training: its peak memory without checkpoints; packed: the peak of a packed plan itself; overhead: against "
    "training alone; saving: of the peak, against CheckFreq's; disk: to persist every checkpoint"
)


def figures(rows: Sequence[Row]) -> dict[str, str]:
    """The figures of one or several rows; of several, least..most."""
    found = {}
    for name, (value_of_row, text) in FIGURES.items():
        values = [value for row in rows if (value := value_of_row(row)) is not None]
        least, most = (text(min(values)), text(max(values))) if values else ("", "")
        found[name] = least if least == most else f"{_without_unit(least, most)}..{most}"
    return found


def _without_unit(text: str, other: str) -> str:
    number, _, unit = text.partition(" ")
    return number if other.endswith(f" {unit}") else text


def remedies(rows: Sequence[Row]) -> list[str]:
    """Why cells that differ in bandwidth alone are infeasible or failed, and what would do; a line for each reason."""
    lines = []
    for reason in dict.fromkeys(row.reason for row in rows if not row.feasible and not row.failed):
        those = [row for row in rows if row.reason is reason]
        needed = {row.needed_bandwidth_bytes_per_s for row in those}
        ways = [format_rate(value) for value in sorted(value for value in needed if value is not None)]
        ways += [
            f"k={row.smallest_interval} at {format_rate(row.bandwidth_bytes_per_s or 0)}"
            for row in those
            if row.smallest_interval is not None
        ]
        lines.append(f"{reason}; what would do: {', or '.join(ways) or 'nothing found'}")
    return lines + [f"failed: {message}" for message in dict.fromkeys(row.message for row in rows if row.failed)]


def value_in_words(row: Row, axis: Axis) -> str:
    """Where a row of a search lies on its axis."""
    value = value_of(row, axis)
    return format_rate(value) if axis is Axis.BANDWIDTH else str(value)


def below(edge: Edge) -> str:
    """The next smaller value that was tried, and why it is not feasible."""
    axis = edge.search.axis
    if edge.fails is None:
        return ""
    why = "failed" if edge.fails.failed else f"{edge.fails.reason}"
    if edge.found is not None and value_of(edge.found, axis) - value_of(edge.fails, axis) == 1:
        return f"{'1 B/s' if axis is Axis.BANDWIDTH else '1'} less: {why}"
    return f"{value_in_words(edge.fails, axis)}: {why}"


def summary(answers: Sequence[Answer], *, reused: int, wall_s: float, jobs: int) -> str:
    """A sweep in one paragraph."""
    rows = [row for row in (answer if isinstance(answer, Row) else answer.found for answer in answers) if row]
    feasible = [row for row in rows if row.feasible]
    searched = any(isinstance(answer, Edge) for answer in answers)
    parts = [f"{'edge found for' if searched else 'feasible:'} {len(feasible)} of {len(answers)}"]
    failed = sum(answer.failed for answer in answers)
    if failed:
        parts.append(f"{failed} failed")
    for name, values in (
        ("saving against CheckFreq", [row.saving for row in feasible]),
        ("overhead", [row.overhead for row in feasible]),
    ):
        known = [value for value in values if value is not None]
        if known:
            parts.append(f"median {name} {median(known):.1%}")
    same = sum(row.peak_bytes == row.training_peak_bytes for row in feasible)
    if feasible:
        parts.append(f"{same} without an added byte")
    above = sum(row.exceeds_memory for row in rows)
    if above:
        parts.append(f"{above} above the device's memory (*)")
    computed = len(answers) - reused
    taken = f"{reused} taken from the journal, " if reused else ""
    return f"{'; '.join(parts)}. {taken}{computed} computed in {wall_s:.1f} s (--jobs {jobs})."
