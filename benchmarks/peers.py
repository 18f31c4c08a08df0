"""Side by side with what people use today: the same training from the same seed under each tool, in turns.

    python benchmarks/peers.py -o peers.json --figure benchmarks/figures/peers.png
    python benchmarks/peers.py --quick
    python benchmarks/peers.py --contenders checkflow,torch_save --workloads conv --parts overhead,kills
    python benchmarks/peers.py --report peers.json --markdown peers.md      # what was measured once, shown again

Each tool trains in a process of its own, frozen while others have their turn; each turn lies between two turns without
checkpoints, and every figure is relative to those. On CPU all of them run with an allocator that keeps its memory
(glibc's MALLOC_MMAP_MAX_=0): else page faults, not checkpoints, decide. What cannot run is listed with its reason.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import contenders
from contenders import Tier
from peering import tables
from peering.drive import Driver, Sizes
from peering.machine import describe
from peering.markdown import markdown
from peering.reportfile import joined, read_report, write_report
from peering.results import Report
from peering.workloads import WORKLOADS
from rich.console import Console

PARTS = ("overhead", "save", "restore", "kills", "faults")
QUICK_PARTS = ("overhead", "kills", "faults")
KILLED = ("tiny", "conv")  # their lives are short; the first always
CPU, CUDA = ("conv", "gpt2"), ("gpt2-cuda", "llama-1b-cuda")

DEFAULT = {
    "conv": Sizes(
        measured={1: (10, 6), 10: (10, 6), 100: (100, 2)}, baseline=5, warm=101, reported=(1, 10, 100), processes=2
    ),
    "gpt2": Sizes(measured={1: (3, 4), 5: (5, 3)}, baseline=2, warm=11, reported=(1, 10, 100), durable_only=True),
    "gpt2-cuda": Sizes(measured={1: (20, 6), 10: (40, 4), 100: (100, 2)}, baseline=20, warm=300, reported=(1, 10, 100)),
    "llama-1b-cuda": Sizes(
        measured={1: (10, 4), 10: (20, 3), 100: (100, 1)}, baseline=10, warm=30, reported=(1, 10, 100)
    ),
}
THOROUGH = {
    "conv": Sizes(
        measured={1: (10, 8), 10: (10, 8), 100: (100, 3)},
        baseline=10,
        warm=101,
        reported=(1, 10, 100),
        processes=5,
        repeats=7,
    ),
    "gpt2": Sizes(
        measured={1: (4, 6), 10: (10, 3)}, baseline=3, warm=30, reported=(1, 10, 100), durable_only=True, repeats=7
    ),
}
QUICK = {
    "tiny": Sizes(measured={1: (5, 2), 10: (10, 1)}, baseline=5, warm=11, reported=(1, 10, 100), repeats=1),
    "conv-cuda": Sizes(measured={1: (20, 6), 10: (20, 4)}, baseline=20, warm=60, reported=(1, 10, 100), repeats=1),
}


@dataclass(frozen=True, slots=True)
class Chosen:
    contenders: tuple[str, ...]
    workloads: tuple[str, ...]
    parts: tuple[str, ...]
    tiers: tuple[Tier, ...]
    sizes: dict[str, Sizes]
    kills: int
    directory: Path
    output: Path | None
    figure: Path | None
    markdown: Path | None
    reports: tuple[Path, ...]
    command: str


def chosen() -> Chosen:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", help=f"of {','.join(contenders.NAMES)}")
    parser.add_argument("--workloads", help=f"of {','.join(WORKLOADS)}")
    parser.add_argument("--parts", help=f"of {','.join(PARTS)}")
    parser.add_argument("--tiers", help="of disk,memory")
    parser.add_argument("--kills", type=int, default=20, help="of each contender in each tier")
    parser.add_argument("--quick", action="store_true", help="everything once on a tiny model: shows that it works")
    parser.add_argument("--thorough", action="store_true", help="more turns: hours")
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("-o", "--output", type=Path, help="JSON of all figures")
    parser.add_argument("--figure", type=Path, help="PNG")
    parser.add_argument("--markdown", type=Path, help="the tables as text")
    parser.add_argument(
        "--report", type=Path, nargs="+", default=(), help="show former runs' JSON, oldest first, and measure nothing"
    )
    given = parser.parse_args()
    sizes = QUICK if given.quick else DEFAULT | THOROUGH if given.thorough else DEFAULT
    quick = given.quick
    names = _listed(parser, given.contenders, contenders.NAMES, contenders.NAMES)
    workloads = _listed(parser, given.workloads, tuple(sizes), ("tiny",) if quick else CPU + CUDA)
    parts = _listed(parser, given.parts, PARTS, QUICK_PARTS if quick else PARTS)
    tiers = _listed(parser, given.tiers, tuple(Tier), (Tier.DISK,) if quick else tuple(Tier))
    return Chosen(
        names, workloads, parts, tuple(Tier(tier) for tier in tiers),
        {name: QUICK[name] for name in workloads} if quick else sizes,
        min(given.kills, 3) if quick else given.kills, given.directory, given.output, given.figure,
        given.markdown, tuple(given.report), _command(given),
    )  # fmt: skip


def _command(given: argparse.Namespace) -> str:
    """What is measured; where that goes says nothing about it."""
    words = ["peers.py"]
    for name in ("contenders", "workloads", "parts", "tiers", "kills", "quick", "thorough"):
        value = getattr(given, name)
        if value:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return " ".join(words)


def _listed(
    parser: argparse.ArgumentParser, given: str | None, allowed: Sequence[str], default: Sequence[str]
) -> tuple[str, ...]:
    values = tuple(default) if given is None else tuple(given.split(","))
    for value in values:
        if value not in allowed:
            parser.error(f"{value!r} is not known; choose from {', '.join(allowed)}")
    return values


def measure(driver: Driver, asked: Chosen) -> None:
    for workload in asked.workloads:
        reason = WORKLOADS[workload].missing()
        if reason:
            driver.skipped[workload] = reason
            continue
        if "overhead" in asked.parts:
            driver.overheads(workload, asked.tiers)
        if "save" in asked.parts:
            driver.saves(workload, asked.tiers)
        if "restore" in asked.parts:
            driver.restores(workload)
    if "kills" in asked.parts:
        for workload in KILLED:
            if workload in (KILLED[0], *asked.workloads):
                driver.kills(workload, asked.tiers, asked.kills)
    if "faults" in asked.parts:
        driver.faults()


def run(asked: Chosen) -> Report:
    """Measure; where that is interrupted, the report is of what there is."""
    progress = Console(stderr=True)
    with Driver(asked.contenders, asked.directory, asked.sizes, progress.log) as driver:
        try:
            measure(driver, asked)
        except (KeyboardInterrupt, SystemExit):
            progress.log("interrupted: what was measured so far")
        return driver.report(describe(), asked.command)


def main() -> None:
    asked = chosen()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was measured is shown, its folders are removed
    report = joined([read_report(path) for path in asked.reports]) if asked.reports else run(asked)
    if asked.output is not None:
        write_report(asked.output, report)
    tables.show(report, Console(width=200))
    if asked.markdown is not None:
        asked.markdown.write_text(markdown(report))
    if asked.figure is not None:
        from peering.figure import draw

        draw(report, asked.figure)


if __name__ == "__main__":
    main()
