"""Tables on narrow terminals: nothing in them is cut."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from checkflow.report import trials
from checkflow.report.columns import Column, Columns, show_pairs
from checkflow.simulation.costs import costs_at
from checkflow.simulation.failures import run
from checkflow.simulation.incidents import exponential


def shown(what: object, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [30, 40, 80, 200])
def test_each_cell_is_there_in_whole_and_each_table_names_its_lines(width: int) -> None:
    left = [Column("name", (Text("first"), Text("second")))]
    others = [Column(f"figure {n}", (Text(f"{n}.25"), Text(f"{n}00.75")), right=True) for n in range(1, 9)]
    text = shown(Columns(left, others), width)
    assert all(f"{n}.25" in text and f"{n}00.75" in text and f"figure {n}" in text for n in range(1, 9))
    assert all(len(line) <= width for line in text.splitlines())
    tables = text.strip("\n").split("\n\n")
    assert all(table.startswith("name") and "\nsecond" in table for table in tables)
    assert len(tables) == {30: 4, 40: 3, 80: 2, 200: 1}[width]


def test_simulated_failures_at_80_columns() -> None:
    costs = costs_at("every 1", 10**9, 1, 10**9, 2 * 10**9, 2 * 10**9)
    outcomes = tuple(run(costs, exponential(3600 * 10**9, 0.5, seed), 10**14) for seed in range(2))
    text = shown(trials.table_of([trials.Trials(costs, 16384, 3600 * 10**9, outcomes)]), 80)
    assert "…" not in text
    for word in ("effective", "16384", "redone by a kill", "to disk a day"):
        assert word in text


def test_pairs_are_padded_only_where_one_is_folded() -> None:
    """In a pipe each line is as long as it is, whatever the longest says."""
    for width, longest in ((10_000, 313), (40, 40)):
        console = Console(file=io.StringIO(), width=width)
        show_pairs(console, [("short", Text("7 B")), ("longer name", Text("x" * 300))])
        assert isinstance(console.file, io.StringIO)
        lines = console.file.getvalue().splitlines()
        assert max(map(len, lines)) == longest and console.file.getvalue().count("x") == 300
        assert lines[0].startswith("short        7 B") and (width == 40 or lines[0] == "short        7 B")
