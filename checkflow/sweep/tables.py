"""A sweep in the terminal: a row for each model, a column for each bandwidth, figures, and reasons below."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from checkflow.report.columns import Column, Columns
from checkflow.sweep.cells import Answer, Axis, Cell, Edge, Row, cell_of, question_of
from checkflow.sweep.wording import (
    FIGURES,
    LEGEND,
    axes_of,
    below,
    figures,
    remedies,
    summary,
    value_in_words,
    varying,
    verdict,
)
from checkflow.units import format_rate

NOT_MONOTONE = (
    "a larger batch need not be feasible where a smaller one is: the least found is by doubling and bisection, and the "
    "next smaller one that was tried is not"
)


def show(console: Console, answers: Sequence[Answer], *, reused: int, wall_s: float, jobs: int) -> None:
    """Print a sweep's answers, all Rows or all Edges."""
    rows = [answer for answer in answers if isinstance(answer, Row)]
    edges = [answer for answer in answers if isinstance(answer, Edge)]
    searched = edges[0].search.axis if edges else None
    fixed = _fixed([cell_of(question_of(answer)) for answer in answers], without=searched)
    if fixed:
        console.print(Text(fixed, style="dim"), soft_wrap=True)
        console.print()
    if rows:
        _show_rows(console, rows)
    if edges:
        _show_edges(console, edges)
    console.print(Text(LEGEND, style="dim"))
    console.print()
    console.print(Text(summary(answers, reused=reused, wall_s=wall_s, jobs=jobs)))


def _fixed(cells: Sequence[Cell], without: str | None) -> str:
    """What all cells share, so that it needs no column."""
    axes, shown = axes_of(cells[0]), [*varying(cells), without]
    return ", ".join(f"{name} {value}" for name, value in axes.items() if name not in shown and value not in ("", "0"))


def _show_rows(console: Console, rows: Sequence[Row]) -> None:
    """The pivot: cells that differ in bandwidth alone are one line."""
    lines: dict[Cell, dict[int | None, Row]] = {}
    for row in rows:
        without = row.cell.model_copy(update={"bandwidth_bytes_per_s": None})
        lines.setdefault(without, {})[row.cell.bandwidth_bytes_per_s] = row
    left = _axis_columns(list(lines))
    columns = [
        Column(
            "link" if bandwidth is None else format_rate(bandwidth),
            tuple(Text(*verdict(line[bandwidth])) if bandwidth in line else Text() for line in lines.values()),
        )
        for bandwidth in dict.fromkeys(row.cell.bandwidth_bytes_per_s for row in rows)
    ]
    columns += _figure_columns([[row for row in line.values() if not row.failed] for line in lines.values()])
    _print(console, left, columns)
    names = varying(list(lines))
    notes = [
        f"{_named(cell, names)}: {line}" for cell, group in lines.items() for line in remedies(list(group.values()))
    ]
    _print_notes(console, notes)


def _show_edges(console: Console, edges: Sequence[Edge]) -> None:
    """A line for each search, with the figures at its edge."""
    cells = [edge.search.cell for edge in edges]
    axis = edges[0].search.axis
    bandwidths = dict.fromkeys(cell.bandwidth_bytes_per_s for cell in cells)
    left = _axis_columns(cells)
    if len(bandwidths) > 1:
        left.append(Column("link", tuple(Text(format_rate(cell.bandwidth_bytes_per_s or 0)) for cell in cells)))
    columns = [
        Column(
            f"least {axis.replace('_', ' ')}",
            tuple(
                Text(value_in_words(edge.found, axis) + ("*" if edge.found.exceeds_memory else ""), "green")
                if edge.found
                else Text("failed" if edge.failed else "none", "red")
                for edge in edges
            ),
            right=True,
        ),
        Column("next smaller tried", tuple(Text(below(edge), "red") for edge in edges)),
    ]
    columns += _figure_columns([[edge.found] if edge.found else [] for edge in edges])
    _print(console, left, columns)
    names = varying(cells)
    notes = []
    for edge in edges:
        told = [edge.message] if edge.message else []
        told += [edge.fails.message] if edge.fails is not None and edge.fails.message not in told else []
        notes += [f"{_named(edge.search.cell, names)}: {'; '.join(told)}"] if told else []
    _print_notes(console, notes)
    if axis is Axis.BATCH_SIZE:
        console.print(Text(NOT_MONOTONE, "dim"))


def _named(cell: Cell, names: Sequence[str]) -> str:
    axes = axes_of(cell)
    return " ".join(axes[name] if name == "model" else f"{name}={axes.get(name, '')}" for name in names)


def _axis_columns(cells: Sequence[Cell]) -> list[Column]:
    axes = [axes_of(cell) for cell in cells]
    return [Column(name, tuple(Text(each.get(name, "")) for each in axes)) for name in varying(cells)]


def _figure_columns(groups: Sequence[Sequence[Row]]) -> list[Column]:
    found = [figures([row for row in group if row.feasible] or group) for group in groups]
    columns = [Column(name, tuple(Text(each[name]) for each in found), right=True) for name in FIGURES]
    return [column for column in columns if any(column.texts)]


def _print(console: Console, left: Sequence[Column], columns: Sequence[Column]) -> None:
    console.print(Columns(left, columns))
    console.print()


def _print_notes(console: Console, notes: Sequence[str]) -> None:
    for note in notes:
        console.print(Text(note, "red"))
    if notes:
        console.print()
