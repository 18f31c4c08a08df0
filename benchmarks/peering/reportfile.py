"""A report as a JSON file, and back; several runs' reports as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from .results import Report

_REPORT = TypeAdapter(Report)


def write_report(path: Path, report: Report) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_REPORT.dump_json(report, indent=1) + b"\n")


def read_report(path: Path) -> Report:
    """Raises pydantic.ValidationError where the file is none."""
    return _REPORT.validate_json(path.read_bytes())


def joined(reports: Sequence[Report]) -> Report:
    """Runs of one machine, oldest first, as one: of each part the rows of the newest run that measured it."""
    newest = reports[::-1]
    return replace(
        reports[-1],
        command="; ".join(report.command for report in reports),
        seconds=sum(report.seconds for report in reports),
        load=max(report.load for report in reports),
        tools=tuple({tool.name: tool for report in reports for tool in report.tools}.values()),
        workloads={name: what for report in reports for name, what in report.workloads.items()},
        skipped={name: why for report in reports for name, why in report.skipped.items()},
        overheads=next((report.overheads for report in newest if report.overheads), []),
        saves=next((report.saves for report in newest if report.saves), []),
        restores=next((report.restores for report in newest if report.restores), []),
        kills=next((report.kills for report in newest if report.kills), []),
        faults=next((report.faults for report in newest if report.faults), []),
    )
