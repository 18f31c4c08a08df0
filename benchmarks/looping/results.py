"""What came of each loop, as a table and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .kills import Outcome
from .turns import Times


@dataclass(frozen=True, slots=True)
class Row:
    """`missing`: packages without which it was skipped. `wrong`: what ended it, in a line."""

    loop: str
    lines: int  # changed to attach it
    iterations: int
    missing: tuple[str, ...] = ()
    wrong: str = ""
    outcome: Outcome | None = None
    times: Times | None = None

    @property
    def failed(self) -> bool:
        differs = [*(self.outcome.differs if self.outcome else ()), *(self.times.differs if self.times else ())]
        return bool(self.wrong or differs)


@dataclass(frozen=True, slots=True)
class Report:
    machine: str
    date: str
    load: float  # processes that ran on average in the minute before
    seed: int
    seconds: float
    versions: dict[str, str]
    rows: tuple[Row, ...]


_REPORT = TypeAdapter(Report)


def write(path: Path, report: Report) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_REPORT.dump_json(report, indent=1) + b"\n")


def line(row: Row) -> str:
    """For progress."""
    return f"{row.loop}: {row.wrong or ', '.join(_cells(row))}"


def show(report: Report, console: Console) -> None:
    columns = ("loop", "lines", "iterations", "kills", "lost", "bit-identical", "learned")
    table = Table(*columns, "plain ms", "attached ms", "overhead (quartiles)", "stall ms", box=None)
    for row in report.rows:
        table.add_row(row.loop, str(row.lines), *_cells(row))
    console.print(f"{report.machine}; {report.date}; load {report.load:.1f} when it began", soft_wrap=True)
    console.print(table)
    for row in report.rows:
        if row.missing:
            console.print(escape(f"{row.loop}: skipped, not installed: {', '.join(row.missing)}"), soft_wrap=True)
        if row.wrong:
            console.print(escape(f"{row.loop}: {row.wrong}"), soft_wrap=True)


def _cells(row: Row) -> list[str]:
    if row.missing:
        return [f"skipped: no {', '.join(row.missing)}"]
    outcome, times = row.outcome, row.times
    cells = [str(row.iterations)]
    if outcome is not None:
        same = f"no: {', '.join(outcome.differs)}" if outcome.differs else "yes"
        cells += [str(outcome.kills), str(outcome.lost), same, "yes" if outcome.learned else "no"]
    else:
        cells += [""] * 4
    if times is not None:
        spread = f"{times.overhead:+.1%} ({times.quartiles[0]:+.1%} to {times.quartiles[1]:+.1%})"
        cells += [f"{times.plain_ms:.1f}", f"{times.attached_ms:.1f}", spread, f"{times.stall_ms:.2f}"]
    return cells
