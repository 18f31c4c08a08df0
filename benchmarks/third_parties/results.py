"""What came of each case, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

Verdict = Literal["worked", "refused", "wrong", "no case"]


@dataclass(frozen=True, slots=True)
class Row:
    """`verdict`: worked (compiled; and resumed bit-identically where it was killed), refused in one line that says why,
    wrong (anything else), or no case: it does not run without checkflow either.
    """

    module: str
    case: str
    verdict: Verdict
    reason: str = ""
    compile_s: float = 0.0
    state_bytes: int = 0
    interval: int = 0
    killed: bool = False
    completed: int = 0  # iterations at the kill
    lost: int = 0
    learned_in: int = 0  # iteration from which on one of the lives followed a schedule that it had learned


@dataclass(frozen=True, slots=True)
class Report:
    machine: str
    date: str
    seed: int
    seconds: float
    versions: dict[str, str]
    missing: dict[str, str]  # packages that could not be imported, and why
    rows: tuple[Row, ...]

    @property
    def wrong(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.verdict == "wrong")


_REPORT = TypeAdapter(Report)


def write(path: Path, report: Report) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_REPORT.dump_json(report, indent=1) + b"\n")


def line(row: Row) -> str:
    """For progress."""
    resumed = f", killed after {row.completed}, {row.lost} lost" if row.killed else ""
    resumed += f", learned in {row.learned_in}" if row.learned_in else ""
    return f"{row.module}/{row.case}: {row.verdict} ({row.compile_s:.1f} s{resumed}) {row.reason[:300]}".rstrip()


def show(report: Report, console: Console) -> None:
    table = Table("package", "compiled", "resumed", "learned", "refused", "wrong", "median compile s", "state MB, most")
    for module in dict.fromkeys(row.module for row in report.rows):
        table.add_row(module, *_cells([row for row in report.rows if row.module == module]))
    table.add_section()
    table.add_row("all", *_cells(report.rows))
    console.print(table)
    for verdict in ("refused", "wrong", "no case"):
        rows = [row for row in report.rows if row.verdict == verdict]
        if rows:
            console.print(f"\n{verdict}:")
        for row in rows:
            console.print(escape(f"  {row.module}/{row.case}: {row.reason[:400]}"), soft_wrap=True)
    for module, why in report.missing.items():
        console.print(escape(f"\nnot installed: {module} ({why})"), soft_wrap=True)


def _cells(rows: Sequence[Row]) -> tuple[str, ...]:
    count = Counter(row.verdict for row in rows)
    times = sorted(row.compile_s for row in rows if row.state_bytes)
    return (
        str(sum(row.state_bytes > 0 for row in rows)),
        str(sum(row.killed and row.verdict == "worked" for row in rows)),
        str(sum(row.learned_in > 0 for row in rows)),
        str(count["refused"]),
        str(count["wrong"]),
        f"{times[len(times) // 2]:.1f}" if times else "",
        f"{max((row.state_bytes for row in rows), default=0) / 1e6:.1f}",
    )
