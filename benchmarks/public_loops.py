"""Five public training loops, each as its users know it and attached with at most five changed lines.

    python benchmarks/public_loops.py --json benchmarks/reports/public-loops.json
    python benchmarks/public_loops.py --loops nanogpt --turns 0
    python benchmarks/public_loops.py --diff

Each attached loop is killed (SIGKILL) at random moments, goes on from its store in a new process, and is compared with
the plain one that nobody interrupted: weights, optimizer, scheduler, history, what each iteration was trained on,
random generators. Then both run in turns, to be timed. The exit code is 1 where one differs or comes to no end.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from looping import data, results
from looping.changes import changed_lines, diff
from looping.kills import LoopError, killed
from looping.loops import LOOPS, ROUND, Loop
from looping.turns import measured
from peering.machine import describe
from rich.console import Console

DISTRIBUTIONS = ("torch", "transformers", "accelerate", "diffusers", "lightning", "torchdata")


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [loop.name for loop in LOOPS]
    parser.add_argument("--loops", default=",".join(names), help="names; all of them unless given")
    parser.add_argument("--iterations", type=int, default=60, help=f"in which it is killed, a multiple of {ROUND}")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--turns", type=int, default=12, help=f"of {ROUND} iterations that are timed; 0: none")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--directory", type=Path, help="for stores and data; a temporary one unless given")
    parser.add_argument("--json", type=Path, help="write the report here, too")
    parser.add_argument("--diff", action="store_true", help="show what is changed, and do nothing else")
    given = parser.parse_args()
    for name in given.loops.split(","):
        if name not in names:
            parser.error(f"{name!r} is not known; choose from {', '.join(names)}")
    if given.iterations < ROUND or given.iterations % ROUND:
        parser.error(f"--iterations: {given.iterations} is no multiple of {ROUND}")
    if not 0 <= given.kills <= given.iterations - 2:
        parser.error(f"--kills: {given.kills} do not fit into {given.iterations} iterations")
    if given.turns < 0 or given.turns == 1:
        parser.error(f"--turns: {given.turns} have no median; give at least 2, or 0")
    return given


def row_of(loop: Loop, given: argparse.Namespace, folder: Path) -> results.Row:
    row = results.Row(loop.name, changed_lines(loop.plain, loop.attached), given.iterations, loop.missing)
    if row.missing:
        return row
    try:
        files = folder / "data"
        row = replace(row, outcome=killed(loop, files, folder / loop.name, given.iterations, given.kills, given.seed))
        if given.turns:
            row = replace(row, times=measured(loop, files, folder / loop.name, given.turns))
    except LoopError as error:
        row = replace(row, wrong=str(error))
    return row


def versions() -> dict[str, str]:
    found = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    return {name: found.get(name, "none") for name in DISTRIBUTIONS}


def main() -> None:
    given = asked()
    loops = [loop for loop in LOOPS if loop.name in given.loops.split(",")]
    if given.diff:
        print("\n\n".join(diff(loop.plain, loop.attached) for loop in loops))
        return
    began, load, rows = time.monotonic(), os.getloadavg()[0], list[results.Row]()
    progress = Console(stderr=True, width=200)
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        (Path(folder) / "data").mkdir()
        data.write(Path(folder) / "data")
        for loop in loops:
            rows.append(row_of(loop, given, Path(folder)))
            progress.log(results.line(rows[-1]), markup=False)
    report = results.Report(
        describe(), time.strftime("%Y-%m-%d"), load, given.seed, time.monotonic() - began, versions(), tuple(rows)
    )
    results.show(report, Console(width=180))
    if given.json is not None:
        results.write(given.json, report)
    sys.exit(1 if any(row.failed for row in rows) else 0)


if __name__ == "__main__":
    main()
