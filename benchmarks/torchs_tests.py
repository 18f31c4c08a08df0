"""torch's own tests of distributed checkpoints, as they are and with StoreReader and StoreWriter in the place of
FileSystemReader and FileSystemWriter.

    python benchmarks/torchs_tests.py ~/pytorch --json benchmarks/reports/torchs-tests.json
    python benchmarks/torchs_tests.py ~/pytorch --files test_planner,test_nested_dict

The checkout should be of the torch that is installed: test/distributed/checkpoint is all that is needed of it, and
`pip install expecttest`. Each file runs twice, in a process of its own. Tests that need GPUs skip themselves. With
--on-cpu they run, and what they move to a GPU stays: those that cannot do without fail with torch's own classes, too.
The exit code is 1 where one fails with ours that passes with torch's.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from peering.machine import describe
from pydantic import TypeAdapter
from rich.console import Console
from torching.outcomes import Outcomes, run

TESTS = Path("test/distributed/checkpoint")


@dataclass(frozen=True, slots=True)
class Row:
    """A file of tests."""

    file: str
    torchs: Outcomes
    ours: Outcomes

    @property
    def worse(self) -> dict[str, str]:
        """What passes with torch's classes and not with ours, and why."""
        passed = [name for name, became in self.torchs.tests.items() if became == "passed"]
        why = self.ours.wrong or "was not run"
        became = {name: self.ours.tests.get(name, why) for name in passed}
        return {name: found for name, found in became.items() if found != "passed"}


@dataclass(frozen=True, slots=True)
class Report:
    machine: str
    date: str
    on_cpu: bool
    torch: str
    source: str  # what the checkout says it is
    rows: tuple[Row, ...]


_REPORT = TypeAdapter(Report)


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pytorch", type=Path, help="a checkout of its source")
    parser.add_argument("--files", help="names without .py; all of test/distributed/checkpoint unless given")
    parser.add_argument("--on-cpu", action="store_true", help="run tests that ask for GPUs, and leave all on the CPU")
    parser.add_argument("--seconds", type=float, default=900.0, help="that one file may take")
    parser.add_argument("--json", type=Path, help="write the report here, too")
    given = parser.parse_args()
    found = {path.stem: path for path in sorted((given.pytorch / TESTS).rglob("test_*.py"))}
    if not found:
        parser.error(f"{given.pytorch}: has no tests in {TESTS}; give a checkout of pytorch's source")
    names = given.files.split(",") if given.files else list(found)
    for name in names:
        if name not in found:
            parser.error(f"{name!r} is not there; choose from {', '.join(found)}")
    given.paths = [found[name] for name in names]
    return given


def table(report: Report) -> str:
    """As the page has it."""
    lines = [
        "| file | run | skipped | passed with torch's | passed with ours | readers, writers of ours | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report.rows:
        became = list(row.torchs.tests.values())
        ours = row.ours.wrong or list(row.ours.tests.values()).count("passed")
        made = f"{row.ours.readers}, {row.ours.writers}" if row.ours.readers + row.ours.writers else ""
        lines.append(
            f"| {row.file} | {len(became) - became.count('skipped')} | {became.count('skipped')} "
            f"| {row.torchs.wrong or became.count('passed')} | {ours} | {made} | {row.ours.seconds:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    given = asked()
    progress = Console(stderr=True, width=200)
    version = given.pytorch / "version.txt"
    source = version.read_text().strip() if version.exists() else "unknown"
    report = Report(
        describe(), time.strftime("%Y-%m-%d"), given.on_cpu, importlib.metadata.version("torch"), source, ()
    )
    for path in given.paths:
        torchs, ours = (run(path, classes, given.seconds, on_cpu=given.on_cpu) for classes in ("torchs", "ours"))
        report = replace(report, rows=(*report.rows, Row(path.stem, torchs, ours)))
        progress.log(f"{path.stem}: {len(torchs.tests)} tests, {len(report.rows[-1].worse)} worse with ours")
        if given.json is not None:
            given.json.write_bytes(_REPORT.dump_json(report, indent=1) + b"\n")
    print(f"{report.machine}; {report.date}; torch {report.torch}, tests of {source}\n\n{table(report)}\n")
    for row in report.rows:
        for name, why in row.worse.items():
            print(f"* {row.file}, {name}: {why}")
        for name, why in row.torchs.tests.items():
            if why not in ("passed", "skipped"):
                print(f"* {row.file}, {name}: fails with torch's own classes, too: {why}")
    sys.exit(1 if any(row.worse for row in report.rows) else 0)


if __name__ == "__main__":
    main()
