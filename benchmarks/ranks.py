"""Sharded Llamas of many ranks, compiled in this one process: time, memory, and the links that are enough.

    python benchmarks/ranks.py [--device h100] [--only llama_8b:8]

FSDP2 with activations computed again, AdamW, sequences of 8192 tokens, one on each rank. "whole command" is
`checkflow compile MODEL --world-size N`, "resident" what it holds at most. "needed" is the least link that carries a
checkpoint of each iteration, "no byte added" the least at which that takes no memory that training does not need. "over
0.6 of it" is `--policy rolling` over a link of 0.6 of what is needed, which has a checkpoint of each iteration all the
same: in how many lanes, the bytes that an iteration moves of the state's, and the bytes added.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.graph import Graph
from checkflow.graphfile import read_graph
from checkflow.units import format_bytes, format_ns, format_rate

ROWS = (("llama_8b", 8), ("llama_8b", 64), ("llama_70b", 256))
SETTINGS = ("--set", "sharded=true", "--set", "optimizer=adamw", "--set", "sequence_length=8192")
SEARCHED_TO = 1.01  # the rates at which no byte is added are found to 1%
SLOW = 0.6  # of the link that is needed


@dataclass(frozen=True, slots=True)
class Run:
    """A command of checkflow's: what it printed, and what it took."""

    figures: dict[str, int]
    wall_s: float
    resident_bytes: int


def checkflow(*arguments: str) -> Run:
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", "from checkflow.cli import main; main()", *arguments, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as running:
        assert running.stdout is not None
        printed = running.stdout.read()
        _, status, used = os.wait4(running.pid, 0)
        running.returncode = status
    assert status == 0, arguments
    return Run(json.loads(printed), time.perf_counter() - began, used.ru_maxrss * 1024)


def needed_bytes_per_s(graph: Graph) -> int:
    """As the compiler says it, of a link that is far too slow."""
    refused = compile_graph(graph, Options(1, interval=1))
    assert not isinstance(refused, Compiled) and refused.answer.needed_bandwidth_bytes_per_s
    return refused.answer.needed_bandwidth_bytes_per_s


def without_bytes(graph: Graph, least: int) -> int:
    """The least rate at which a checkpoint of each iteration adds none, from one that carries it on."""

    def adds(rate: int) -> bool:
        result = compile_graph(graph, Options(rate, interval=1))
        assert isinstance(result, Compiled)
        certificate = result.schedule.certificate
        return certificate.peak_bytes > certificate.training_peak_bytes

    if not adds(least):
        return least
    low, high = least, 2 * least
    while adds(high):
        low, high = high, 2 * high
    while high > SEARCHED_TO * low:
        middle = (low + high) // 2
        low, high = (middle, high) if adds(middle) else (low, middle)
    return high


def rolling(graph: Graph, needed: int) -> str:
    """What the policy does over a link that is too slow for the state."""
    result = compile_graph(graph, Options(round(SLOW * needed), interval=1, policy="rolling"))
    assert isinstance(result, Compiled)
    schedule = result.schedule
    moved_bytes = sum(row.bytes for row in schedule.actions) // schedule.period
    share = moved_bytes / sum(row.bytes for row in schedule.state)
    added_bytes = schedule.certificate.peak_bytes - schedule.certificate.training_peak_bytes
    return f"{schedule.lanes} lanes, {share:.0%}, {format_bytes(added_bytes)}"


def cells(model: str, ranks: int, device: str, folder: Path) -> list[str]:
    given = (model, *SETTINGS, "--world-size", str(ranks), "--device", device)
    run = checkflow("compile", *given, "-o", str(folder / "schedule.json"))
    checkflow("trace", *given, "-o", str(folder / "graph.json"))
    graph = read_graph(folder / "graph.json")
    needed = needed_bytes_per_s(graph)
    figures = run.figures
    return [
        f"{model}, {ranks}",
        f"{figures['steps']}",
        f"{format_bytes(figures['state_bytes'])}",
        format_ns(figures["iteration_time_ns"]),
        format_bytes(figures["training_peak_bytes"]),
        format_bytes(figures["peak_bytes"] - figures["training_peak_bytes"]),
        format_rate(needed),
        format_rate(without_bytes(graph, needed)),
        rolling(graph, needed),
        f"{run.wall_s:.0f} s",
        format_bytes(run.resident_bytes),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="h100")
    parser.add_argument("--only", metavar="MODEL:RANKS")
    chosen = parser.parse_args()
    table = Table(
        "model, ranks", "operators", "state of a rank", "iteration", "training peak", "added bytes", "link needed",
        "no byte added", "over 0.6 of it", "whole command", "resident",
    )  # fmt: skip
    for model, ranks in ROWS:
        if chosen.only in (None, f"{model}:{ranks}"):
            with tempfile.TemporaryDirectory() as folder:
                table.add_row(*cells(model, ranks, chosen.device, Path(folder)))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
