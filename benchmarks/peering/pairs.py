"""Iterations with a contender against iterations without, in neighbouring turns.

This machine's and any shared machine's speed drifts within seconds, so each turn of a contender lies between two turns
of `none`, and every figure is a ratio to the median iteration of those two. Whoever has not the turn is frozen. What
another program takes at one moment shows at one iteration of one turn; what a save costs, at the same one of each turn:
so the median over turns of each iteration's ratio is taken first, and the throughput lost is that of their mean. What
stalls at another iteration each time falls out of that, so the loss by plain mean over all iterations stands beside it.

Two processes that do the same differ by a few percent, by where their memory came to lie, for as long as they live: a
short workload is measured in several.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from contenders import Job

from .orders import Attach, Detach, Done, Saved, SaveOne, Train, Turn
from .processes import Process, ToolError
from .results import Overhead, Save

LONGEST_TURN_S = 600.0
WARM_SAVES = 3  # every buffer is touched for the first time, every helper started


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to measure."""

    turn: int  # iterations that are compared, a multiple of the interval
    piece: int  # at most so many of them between two turns of none
    baseline: int  # iterations in a turn of none
    pairs: int
    warm: int  # iterations before


@dataclass(frozen=True, slots=True)
class Held:
    """Memory, at the highest seen."""

    host_bytes: int
    gpu_bytes: int


def folder_bytes(job: Job) -> int:
    """What a memory tier made of files holds."""
    total = 0
    for folder, _, names in os.walk(job.folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                total += Path(folder, name).stat().st_blocks * 512
    return total


@dataclass(slots=True)
class Samples:
    """Of one process of a contender. Times over the median iteration of the two turns of `none` beside them."""

    losses: list[float] = field(default_factory=list)  # of throughput, a turn each
    medians: list[float] = field(default_factory=list)  # median iteration, a piece each
    curves: list[list[float]] = field(default_factory=list)  # each iteration of a turn
    mine_s: list[float] = field(default_factory=list)
    theirs_s: list[float] = field(default_factory=list)
    blocked_s: list[float] = field(default_factory=list)
    held: Held = Held(0, 0)
    written_bytes: int = 0


def measure(none: Process, tool: Process, job: Job, plan: Plan, save_in_memory: bool) -> Samples:
    """`tool` is not attached yet and stays so, frozen; `none` is attached and frozen before and after.

    `save_in_memory`: the job's folder is in memory, so its files count as the host's memory. Raises ToolError.
    """
    tool.thaw()
    tool.ask(Attach(job), Done)
    tool.ask(Train(plan.warm), Turn)
    tool.freeze()
    before = _baseline(none, plan)
    found = Samples(theirs_s=list(before.times_s))
    held = found.held
    for _ in range(plan.pairs):
        curve: list[float] = []
        for size in _pieces(plan.turn, plan.piece):
            tool.thaw()
            started = tool.written_bytes()
            tool.tell(Train(size))
            held = _watch(tool, job, held, save_in_memory)
            turn = tool.hear(Turn)
            tool.freeze()
            found.written_bytes += tool.written_bytes() - started
            after = _baseline(none, plan)
            unsaved_s = statistics.median(before.times_s + after.times_s)
            found.medians.append(statistics.median(turn.times_s) / unsaved_s)
            curve += [time_s / unsaved_s for time_s in turn.times_s]
            found.mine_s += turn.times_s
            found.blocked_s += turn.blocked_s
            found.theirs_s += after.times_s
            held = Held(held.host_bytes, max(held.gpu_bytes, turn.gpu_peak_bytes - before.gpu_peak_bytes))
            before = after
        found.losses.append(1 - 1 / statistics.mean(curve))
        found.curves.append(curve)
    found.held = Held(held.host_bytes - none.memory_bytes(), held.gpu_bytes)
    return found


def overhead(job: Job, contender: str, plan: Plan, processes: list[Samples]) -> Overhead:
    """One row of what all processes of a contender measured."""
    curves = [curve for each in processes for curve in each.curves]
    typical = tuple(statistics.median(column) for column in zip(*curves, strict=True))
    losses = [loss for each in processes for loss in each.losses]
    mine, theirs, blocked = (
        [time_s for each in processes for time_s in getattr(each, name)] for name in ("mine_s", "theirs_s", "blocked_s")
    )
    saves = len(curves) * max(1, plan.turn // job.interval)
    return Overhead(
        workload=job.workload,
        contender=contender,
        tier=job.tier,
        interval=job.interval,
        turn=plan.turn,
        pairs=len(curves),
        none_ms=statistics.median(theirs) * 1e3,
        loss=1 - 1 / statistics.mean(typical),
        mean_loss=1 - 1 / statistics.mean(ratio for curve in curves for ratio in curve),
        low=min(losses),
        high=max(losses),
        median_ratio=statistics.median(ratio for each in processes for ratio in each.medians),
        p99_ratio=_p99(mine) / _p99(theirs),
        blocked_ms=statistics.mean(blocked) * 1e3,
        blocked_save_ms=sum(blocked) / saves * 1e3,
        extra_host_bytes=max(each.held.host_bytes for each in processes),
        extra_gpu_bytes=max(each.held.gpu_bytes for each in processes),
        written_bytes=sum(each.written_bytes for each in processes) / saves,
        curve=typical,
    )


def spread(measured: Overhead, interval: int) -> Overhead:
    """The same saves at a longer interval: each save's cost is what it was, over more iterations."""
    factor = measured.interval / interval

    def thinned(loss: float) -> float:
        slowdown = (1 / (1 - loss) - 1) * factor
        return 1 - 1 / (1 + slowdown)

    return replace(
        measured,
        interval=interval,
        loss=thinned(measured.loss),
        mean_loss=thinned(measured.mean_loss),
        low=thinned(measured.low),
        high=thinned(measured.high),
        median_ratio=1.0,
        blocked_ms=measured.blocked_ms * factor,
        spread=True,
    )


def save_alone(tool: Process, job: Job, contender: str, rounds: int) -> Save:
    """Saves that are waited for, one after the other; `tool` is attached with interval 1."""
    tool.thaw()
    tool.ask(Attach(job), Done)
    for _ in range(WARM_SAVES):
        tool.ask(SaveOne(), Saved)
    saved = [tool.ask(SaveOne(), Saved) for _ in range(rounds)]
    complete_s = statistics.median(each.complete_s for each in saved)
    state = tool.ask(Detach(), Done).state_bytes  # now that the optimizer has its own
    return Save(
        workload=job.workload,
        contender=contender,
        tier=job.tier,
        state_bytes=state,
        blocked_ms=statistics.median(each.blocked_s for each in saved) * 1e3,
        complete_ms=complete_s * 1e3,
        bytes_per_s=state / complete_s,
    )


def _baseline(none: Process, plan: Plan) -> Turn:
    none.thaw()
    turn = none.ask(Train(plan.baseline), Turn)
    none.freeze()
    return turn


def _pieces(total: int, most: int) -> list[int]:
    return [min(most, total - done) for done in range(0, total, most)]


def _watch(tool: Process, job: Job, held: Held, save_in_memory: bool) -> Held:
    """Look at the memory now and then until there is an answer."""
    most = held.host_bytes
    deadline = time.monotonic() + LONGEST_TURN_S
    while time.monotonic() < deadline:
        most = max(most, tool.memory_bytes() + (folder_bytes(job) if save_in_memory else 0))
        if tool.answered(0.1):
            return Held(most, held.gpu_bytes)
    raise ToolError(f"no answer in {LONGEST_TURN_S:g} s")


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]
