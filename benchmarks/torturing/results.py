"""What came of each run, as tables and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter
from rich.console import Console
from rich.markup import escape
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one thing that was done to a training or a store.

    `identical`: whether what was restored or finished has the oracle's bytes; None where nothing was. `lost`: completed
    iterations that were not restored. `wrong`: the promise that was broken. `rough`: nothing broke, but somebody saw an
    exception that is no CheckflowError. `note`: what else to know.
    """

    what: str
    identical: bool | None = None
    setting: str = ""
    died: str = ""  # who; for losses by setting
    promised: int | None = None
    lost: int | None = None
    wrong: str = ""
    rough: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """`number` with the seed and the kind is what it takes to run it again."""

    kind: str
    number: int
    seconds: float
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class Report:
    machine: str
    date: str
    command: str
    seed: int
    seconds: float
    skipped: dict[str, str]  # kinds that could not run, and why
    runs: tuple[Run, ...]

    @property
    def wrong(self) -> list[tuple[Run, Outcome]]:
        return [(run, outcome) for run in self.runs for outcome in run.outcomes if outcome.wrong]


_REPORT = TypeAdapter(Report)


def write(path: Path, report: Report) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_REPORT.dump_json(report, indent=1) + b"\n")


def show(report: Report, console: Console) -> None:
    table = Table("kind", "runs", "done to them", "compared", "bit-identical", "lost most", "mean", "rough", "wrong")
    for kind in dict.fromkeys(run.kind for run in report.runs):
        runs = [run for run in report.runs if run.kind == kind]
        table.add_row(kind, str(len(runs)), *_cells([outcome for run in runs for outcome in run.outcomes]))
    table.add_section()
    every = [outcome for run in report.runs for outcome in run.outcomes]
    table.add_row("all", str(len(report.runs)), *_cells(every))
    console.print(table)
    losses(every, console)
    for name in ("rough", "wrong"):
        for run in report.runs:
            for outcome in run.outcomes:
                said = getattr(outcome, name)
                if said:
                    text = f"{name}: {run.kind} run {run.number}: {outcome.what} {outcome.setting}: {said}"
                    console.print(escape(text), soft_wrap=True)
    for kind, why in report.skipped.items():
        console.print(escape(f"not run: {kind} ({why})"), soft_wrap=True)


def losses(outcomes: Iterable[Outcome], console: Console) -> None:
    """Lost iterations by setting and by who died."""
    found: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.lost is not None and outcome.setting:
            found.setdefault((outcome.setting, outcome.died), []).append(outcome)
    if not found:
        return
    table = Table("setting", "killed", "times", "lost most", "mean", "promised at most")
    for (setting, died), some in sorted(found.items()):
        lost = [outcome.lost for outcome in some if outcome.lost is not None]
        promised = "" if some[0].promised is None else str(some[0].promised)
        table.add_row(setting, died, str(len(lost)), str(max(lost)), f"{statistics.mean(lost):.2f}", promised)
    console.print(table)


def _cells(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    compared = [outcome.identical for outcome in outcomes if outcome.identical is not None]
    lost = [outcome.lost for outcome in outcomes if outcome.lost is not None]
    return (
        str(len(outcomes)), str(len(compared)), str(sum(compared)), str(max(lost)) if lost else "",
        f"{statistics.mean(lost):.2f}" if lost else "", str(sum(bool(outcome.rough) for outcome in outcomes)),
        str(sum(bool(outcome.wrong) for outcome in outcomes)),
    )  # fmt: skip
