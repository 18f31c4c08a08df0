"""The cells whose state is more than the link carries in one iteration: who checkpoints how often, and what it adds.

Beside each other: the whole state at the least interval, GoCkpt's parts at theirs, and `rolling`, which has a
checkpoint after each iteration; so has `lowdiff`, by a base and gradients, and `lowdiff_plus`, by gradients and a
replica on the host. "adds" is the certified peak above training's; "MiB/it" is what the link carries in an iteration;
"replay" is how long a restore makes updates again, in iterations.

    python benchmarks/every_iteration.py [--networks alexnet,bert] [--batches 1,32] [--optimizers sgd,adamw]
"""

from __future__ import annotations

from cells import BANDWIDTH, Cell, arguments, cells, mib
from rich.console import Console
from rich.table import Table

from checkflow.compiler import Compiled, Options, Refused, compile_graph

COLUMNS = (
    "cell", "state MiB", "whole: each", "adds MiB", "gockpt: each", "adds MiB", "rolling: each", "parts", "adds MiB",
    "MiB/it", "link", "replay", "plan s", "lowdiff: parts", "adds MiB", "replay", "lowdiff_plus: adds MiB",
    "MiB/it",
)  # fmt: skip


def main() -> None:
    table, every, asked = Table(*COLUMNS, box=None), 0, 0
    for cell in cells(arguments(__doc__ or "").parse_args()):
        if isinstance(compile_graph(cell.graph, Options(BANDWIDTH)), Refused):
            asked += 1
            row, rolls = row_of(cell)
            every += rolls
            table.add_row(*row)
    console = Console(width=220)
    console.print(table)
    console.print(f"{asked} cells are refused at interval 1; rolling has a checkpoint after each iteration in {every}")


def row_of(cell: Cell) -> tuple[list[str], bool]:
    """The cells of a row, and whether each iteration has a checkpoint."""
    found = [str(cell)]
    for policy in ("checkflow", "gockpt"):
        compiled = compile_graph(cell.graph, Options(BANDWIDTH, interval=None, policy=policy))
        assert isinstance(compiled, Compiled)
        if policy == "checkflow":
            found.append(mib(compiled.schedule.state_bytes))
        found += [str(compiled.schedule.interval), added(compiled)]
    compiled = compile_graph(cell.graph, Options(BANDWIDTH, policy="rolling"))
    if isinstance(compiled, Refused):
        return [*found, "none", "", "", "", "", "", f"{compiled.plan_s:.2f}", *papers(cell)], False
    schedule = compiled.schedule
    moved = sum(action.bytes for action in schedule.actions)
    carried = BANDWIDTH * schedule.iteration_time_ns * schedule.lanes // 10**9
    replay = schedule.certificate.replay_ns / schedule.iteration_time_ns
    found += ["1", str(schedule.lanes), added(compiled), mib(moved // schedule.lanes)]
    return [*found, f"{moved / carried:.0%}", f"{replay:.2f}", f"{compiled.plan_s:.2f}", *papers(cell)], True


def base_of(cell: Cell) -> list[str]:
    """The same by LowDiff: the whole state in one of so many iterations."""
    compiled = compile_graph(cell.graph, Options(BANDWIDTH, policy="lowdiff"))
    if isinstance(compiled, Refused):
        return ["none", "", ""]
    schedule = compiled.schedule
    replay = schedule.certificate.replay_ns / schedule.iteration_time_ns
    return [str(schedule.lanes), added(compiled), f"{replay:.2f}"]


def papers(cell: Cell) -> list[str]:
    """What LowDiff and LowDiff+ do."""
    return [*base_of(cell), *gradients_of(cell)]


def gradients_of(cell: Cell) -> list[str]:
    """By LowDiff+: gradients alone."""
    compiled = compile_graph(cell.graph, Options(BANDWIDTH, policy="lowdiff_plus"))
    if isinstance(compiled, Refused):
        return ["none", ""]
    return [added(compiled), mib(sum(action.bytes for action in compiled.schedule.actions))]


def added(compiled: Compiled) -> str:
    certificate = compiled.schedule.certificate
    return mib(certificate.peak_bytes - certificate.training_peak_bytes)


if __name__ == "__main__":
    main()
