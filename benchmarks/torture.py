"""Kill, corrupt, refuse, delay, interrupt: trainings that were tortured at random against one that was not.

    python benchmarks/torture.py --json torture.json
    python benchmarks/torture.py --short --seed 0
    python benchmarks/torture.py --kinds losses
    python benchmarks/torture.py --kinds kills --seed 7 --only 12       # that run again

Each run is drawn from the seed, the kind and its number. Wherever something was restored or finished, its bytes are
compared with the uninterrupted run's: weights, buffers, optimizer, scheduler, loader and random generators. Wrong is
what differs, hangs, is left behind or breaks a promise of README.md; the exit code then is 1.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import torch._dynamo  # noqa: F401 (a forked life would import it at its first update)
from forked import Forked
from peering.machine import describe
from rich.console import Console
from rich.markup import escape
from torturing.bench import Bench, adopt_orphans, orphans
from torturing.oracle import Oracle
from torturing.results import Outcome, Report, Run, show, write
from torturing.schedules import compile_schedules

KINDS = tuple(sorted(path.stem for path in (Path(__file__).parent / "torturing" / "kinds").glob("[a-z]*.py")))


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", help=f"of {','.join(KINDS)}")
    parser.add_argument("--seed", type=int, help="drawn, and said, unless given")
    parser.add_argument("--short", action="store_true", help="one to four minutes; default: twenty to forty")
    parser.add_argument("--runs", type=int, help="of each kind, rather than what it has by default")
    parser.add_argument("--only", type=int, metavar="N", help="run number N alone")
    parser.add_argument("--directory", type=Path, help="for the stores; a temporary one unless given")
    parser.add_argument("--keep", action="store_true", help="leave the folders of runs that went wrong")
    parser.add_argument("--json", type=Path, help="write the report here, too")
    given = parser.parse_args()
    given.kinds = given.kinds.split(",") if given.kinds else KINDS
    for name in given.kinds:
        if name not in KINDS:
            parser.error(f"{name!r} is not known; choose from {', '.join(KINDS)}")
    given.seed = random.randrange(10**6) if given.seed is None else given.seed
    return given


class Torturer:
    """Runs one kind after the other, and says how far it is."""

    def __init__(self, given: argparse.Namespace, folder: Path, progress: Console) -> None:
        self._given = given
        self._folder = folder
        self._progress = progress
        self.runs: list[Run] = []
        self.skipped: dict[str, str] = {}
        adopt_orphans()
        self._schedule = folder / "schedule.json"
        compiling = Forked(lambda: compile_schedules(self._schedule), folder / "compiling")
        if compiling.wait(120.0) != 0:
            raise SystemExit(f"the schedule cannot be compiled: {compiling.complaint()}")
        self._oracle = Oracle()

    def torture(self) -> None:
        for kind in self._given.kinds:
            module = importlib.import_module(f"torturing.kinds.{kind}")
            missing = module.MISSING() if hasattr(module, "MISSING") else None
            if missing:
                self.skipped[kind] = missing
                continue
            short, default = module.RUNS
            runs = self._given.runs or (short if self._given.short else default)
            for number in range(runs) if self._given.only is None else (self._given.only,):
                self._run(kind, number, module.run)

    def _run(self, kind: str, number: int, run: Callable[[Bench, Random, int], Iterator[Outcome]]) -> None:
        folder, began = self._folder / f"{kind}-{number}", time.monotonic()
        bench = Bench(folder, self._schedule, self._oracle, short=self._given.short)
        folder.mkdir()
        outcomes: list[Outcome] = []
        try:
            outcomes += run(bench, Random(f"{self._given.seed} {kind} {number}"), number)
        except Exception:  # noqa: BLE001 (one run's failure is its result)
            outcomes.append(Outcome("torture itself failed", wrong=traceback.format_exc()))
        for pid in orphans(self._oracle.pid):
            os.kill(pid, signal.SIGKILL)
        self.runs.append(Run(kind, number, time.monotonic() - began, tuple(outcomes)))
        wrong = [outcome.wrong for outcome in outcomes if outcome.wrong]
        if not (wrong and self._given.keep):
            shutil.rmtree(folder, ignore_errors=True)
        done = "; ".join(wrong) or f"{len(outcomes)} done, nothing wrong"
        self._progress.log(escape(f"{kind} {number}: {time.monotonic() - began:.1f} s: {done}"))

    def close(self) -> None:
        self._oracle.close()


def _command(given: argparse.Namespace) -> str:
    """What was done; where its report goes says nothing about it."""
    words = ["torture.py", "--kinds", ",".join(given.kinds), "--seed", str(given.seed)]
    words += ["--short"] * given.short
    for name in ("runs", "only"):
        words += [f"--{name}", str(getattr(given, name))] if getattr(given, name) is not None else []
    return " ".join(words)


def main() -> None:
    given, began = asked(), time.monotonic()
    progress = Console(stderr=True, width=200)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was done so far is shown, and its folders removed
    progress.log(f"seed {given.seed}")
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir=given.directory))
    torturer = Torturer(given, folder, progress)
    try:
        torturer.torture()
    except (KeyboardInterrupt, SystemExit):
        progress.log("interrupted: what was done so far")
    finally:
        torturer.close()
    report = Report(
        describe(), time.strftime("%Y-%m-%d"), _command(given), given.seed,
        time.monotonic() - began, torturer.skipped, tuple(torturer.runs),
    )  # fmt: skip
    show(report, Console(width=160))
    if given.json is not None:
        write(given.json, report)
    if not (report.wrong and given.keep):
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
