"""A report as a JSON file, and back."""

from __future__ import annotations

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
