"""Other people's models and optimizers under checkflow: compiled, trained, killed, resumed, compared bit by bit.

    pip install -e '.[third-party]'
    python benchmarks/third_party.py --json third_party.json
    python benchmarks/third_party.py --modules hf_transformers,optimizers --cases gpt2,lion
    python benchmarks/third_party.py --learned

Each compilation is a process with a limit of time and memory, so that one that ends badly ends alone. "Refused" is one
line that says why; a traceback, a hang, or a resume that differs in one byte is wrong, and the exit code then 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

from peering.machine import describe
from rich.console import Console
from rich.markup import escape
from third_parties import case as cases
from third_parties import results
from third_parties.judge import Limits, judge

DISTRIBUTIONS = (
    "torch", "transformers", "timm", "torchvision", "segmentation-models-pytorch", "efficientnet-pytorch",
    "torch-geometric", "diffusers", "monai", "pytorch-optimizer", "lion-pytorch", "schedulefree", "x-transformers",
    "vit-pytorch", "peft", "gpytorch", "torchdiffeq", "snntorch", "kornia",
)  # fmt: skip


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", help=f"of {','.join(cases.modules())}")
    parser.add_argument("--cases", help="names; all of the modules' unless given")
    parser.add_argument("--no-kills", action="store_true", help="compile only")
    parser.add_argument("--learned", action="store_true", help="attach without a schedule: nothing is compiled")
    parser.add_argument("--seed", type=int, default=0, help="of the moments at which trainings are killed")
    parser.add_argument("--seconds", type=float, default=300.0, help="that one compilation may take")
    parser.add_argument("--memory-gib", type=float, default=12.0, help="of addresses that one compilation may take")
    parser.add_argument("--directory", type=Path, help="for stores and schedules; a temporary one unless given")
    parser.add_argument("--json", type=Path, help="write the report here, too")
    given = parser.parse_args()
    for name in (given.modules or "").split(","):
        if name and name not in cases.modules():
            parser.error(f"{name!r} is not known; choose from {', '.join(cases.modules())}")
    return given


def rows_of(module: str, given: argparse.Namespace, folder: Path) -> Iterator[results.Row | str]:
    """Rows from a process of its own, which imports the packages; or why it cannot, as text."""
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_module, args=(module, given, folder, theirs.send))
    process.start()
    theirs.close()
    while True:
        try:
            yield ours.recv()
        except EOFError:
            process.join()
            return


def _module(module: str, given: argparse.Namespace, folder: Path, tell: Callable[[results.Row | str], None]) -> None:
    warnings.simplefilter("ignore")
    try:
        found = cases.cases_of(module)
    except ImportError as error:
        tell(str(error))
        return
    limits = Limits(given.seconds, int(given.memory_gib * 2**30))
    for each in found:
        if given.cases is None or each.name in given.cases.split(","):
            place, kill = folder / module / each.name, not given.no_kills
            tell(judge(module, each, place, limits, given.seed, kill=kill, learned=given.learned))


def versions() -> dict[str, str]:
    installed = {}
    for name in DISTRIBUTIONS:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = "none"
    return installed


def main() -> None:
    given = asked()
    progress, began = Console(stderr=True, width=200), time.monotonic()
    rows: list[results.Row] = []
    missing: dict[str, str] = {}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        for module in given.modules.split(",") if given.modules else cases.modules():
            for row in rows_of(module, given, Path(folder)):
                if isinstance(row, str):
                    missing[module] = row
                else:
                    rows.append(row)
                    progress.log(escape(results.line(row)))
    report = results.Report(
        describe(), time.strftime("%Y-%m-%d"), given.seed, time.monotonic() - began, versions(), missing, tuple(rows)
    )
    results.show(report, Console(width=160))
    if given.json is not None:
        results.write(given.json, report)
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
