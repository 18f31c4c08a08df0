"""GoCkpt: its best intervals, the stalls of its schemes, and where its formulas slip."""

from __future__ import annotations

import math

from checkflow.simulation.costs import Costs
from checkflow.simulation.expected import expected
from evaluation.table import Table

STEP_S, MTBF_S = 0.4455, 600.0  # T_step, by which the six intervals come out; a crash each 600 s
TABLE_1 = {  # the longest T_ckpt in s, N_best, tokens a second
    "Deepspeed": (36.79, 472, 411.9),
    "DCP-Async": (12.226, 272, 697.8),
    "Async": (1.313, 89, 758.0),
    "Async-O": (0.988, 77, 776.3),
    "GoCkpt": (0.435, 51, 786.4),
    "GoCkpt-O": (0.175, 32, 794.1),
}
FIG_6 = (0.577, 0.701)  # by how much GoCkpt stalls less than Async-O


def best_interval(save_s: float) -> float:
    """N* = sqrt(2 T_ckpt / (p T_step²)), in iterations."""
    return math.sqrt(2 * save_s * MTBF_S) / STEP_S


def effective(save_s: float, interval: int) -> float:
    """The share of time that training gets ahead, by exact renewal theory, with restores that take no time."""
    costs = Costs("scheme", round(STEP_S * 1e9), interval, stall_ns=round(save_s * 1e9))
    return 1 - expected(costs, MTBF_S * 1e9, 1.0).wasted


def table_1() -> Table:
    """Throughput is relative to GoCkpt-O's."""
    save_s, interval, best = TABLE_1["GoCkpt-O"]
    ours = effective(save_s, interval)
    rows = []
    for scheme, (save_s, interval, tokens) in TABLE_1.items():
        rows.append(
            (scheme, f"{save_s}", f"{interval}", f"{best_interval(save_s):.1f}", f"{tokens / best:.1%}",
             f"{effective(save_s, interval) / ours:.1%}")
        )  # fmt: skip
    headings = ("scheme", "T_ckpt, s", "N_best", "N*", "tokens/s of GoCkpt-O's", "by renewal theory")
    return Table(headings, tuple(rows))


def stalls(steps: int) -> tuple[float, float]:
    """Async-O's and GoCkpt's for a checkpoint that takes so many steps, in steps."""
    return steps - 1.0, steps * (steps - 1) / 14


def table_of_stalls(most: int = 9) -> Table:
    rows = []
    for steps in range(2, most + 1):
        single, parts = stalls(steps)
        rows.append((str(steps), f"{single:.0f}", f"{parts:.2f}", f"{single - parts:.2f}", f"{1 - parts / single:.1%}"))
    return Table(("steps", "Async-O, T", "GoCkpt, T", "saved, T", "less by"), tuple(rows))
