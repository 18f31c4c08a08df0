"""A report as a JSON file, and back; several runs' reports as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from .results import Report

_REPORT = TypeAdapter(Report)
Row = TypeVar("Row")


def write_report(path: Path, report: Report) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_REPORT.dump_json(report, indent=1) + b"\n")


def read_report(path: Path) -> Report:
    """Raises pydantic.ValidationError where the file is none."""
    return _REPORT.validate_json(path.read_bytes())


def joined(reports: Sequence[Report]) -> Report:
    """Runs of one machine, oldest first, as one: each row from the newest run that measured it."""
    return replace(
        reports[-1],
        command="; ".join(report.command for report in reports),
        seconds=sum(report.seconds for report in reports),
        load=max(report.load for report in reports),
        tools=tuple({tool.name: tool for report in reports for tool in report.tools}.values()),
        workloads={name: what for report in reports for name, what in report.workloads.items()},
        skipped={name: why for report in reports for name, why in report.skipped.items()},
        overheads=_newest(
            (row for report in reports for row in report.overheads),
            lambda row: (row.workload, row.contender, row.tier, row.interval),
        ),
        saves=_newest(
            (row for report in reports for row in report.saves), lambda row: (row.workload, row.contender, row.tier)
        ),
        restores=_newest(
            (row for report in reports for row in report.restores), lambda row: (row.workload, row.contender, row.case)
        ),
        kills=_newest(
            (row for report in reports for row in report.kills), lambda row: (row.workload, row.contender, row.tier)
        ),
        faults=_newest((row for report in reports for row in report.faults), lambda row: (row.contender, row.fault)),
    )


def _newest(rows: Iterable[Row], key: Callable[[Row], tuple[object, ...]]) -> list[Row]:
    return list({key(row): row for row in rows}.values())
