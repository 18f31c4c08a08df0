"""What each part of formulation `direct` buys: the paper's optimum, and then one part more at a time."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from checkflow import hardware
from checkflow.errors import InputError
from checkflow.graph import Graph
from checkflow.lower import lower
from checkflow.plan import TICKS_PER_BYTE, Formulation, Infeasible, Plan, Problem, Transfers, on_anchors, problem_of
from checkflow.plan.solve import solve
from checkflow.sweep.traces import Settings, trace
from checkflow.verify import verify, verify_plan
from evaluation.ablation.freelink import FreeLink, free_link
from evaluation.ablation.windows import read_after_iteration


@dataclass(frozen=True, slots=True)
class Part:
    """A model to plan in, named by what it adds to the one before."""

    name: str
    formulation: Formulation
    transfers: Transfers
    cyclic: bool  # whether a tensor may leave from its last write on; if not, from the iteration's end on


PARTS = (
    Part("the paper's optimum", Formulation.COMPACT, Transfers.PACKED, cyclic=False),
    Part("+ direct offload", Formulation.DIRECT, Transfers.PACKED, cyclic=False),
    Part("+ cyclic windows", Formulation.DIRECT, Transfers.PACKED, cyclic=True),
    Part("+ streaming", Formulation.DIRECT, Transfers.STREAMING, cyclic=True),
)
NOT_CYCLIC = Part("all but cyclic windows", Formulation.DIRECT, Transfers.STREAMING, cyclic=False)


@dataclass(frozen=True, slots=True)
class Ablated:
    """One cell planned with the parts up to one of them."""

    cell: str
    part: Part
    interval: int  # k, the smallest at which the link carries the state
    state_bytes: int
    added_bytes: int  # to the training peak, as planned
    executed_added_bytes: int | None  # of the plan moved to anchors; None of packed plans
    snapshot_bytes: int
    transfers: int
    gap: float
    plan_s: float


@dataclass(frozen=True)
class Study:
    """One cell: its graph, and what each part buys in it."""

    cell: str
    graph: Graph
    rows: tuple[Ablated, ...]  # of PARTS and NOT_CYCLIC
    free: FreeLink

    def row(self, part: Part) -> Ablated:
        return next(row for row in self.rows if row.part == part)


def study(
    cells: Iterable[tuple[str, Settings]], *, device: str, bandwidth_bytes_per_s: int, time_limit_s: float = 0.5
) -> tuple[Study, ...]:
    """Trace each (model, settings) and plan it with each set of parts, in a process for each core.

    `time_limit_s` is the solver's, in seconds for each plan; a plan that it ends tells its gap. Raises what
    sources.load, trace_training and solve raise.
    """
    one = partial(_study, device=device, bandwidth_bytes_per_s=bandwidth_bytes_per_s, time_limit_s=time_limit_s)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
        return tuple(pool.map(one, cells))


def _study(cell: tuple[str, Settings], device: str, bandwidth_bytes_per_s: int, time_limit_s: float) -> Study:
    model, settings = cell
    graph = hardware.retime(trace(model, settings).graph, hardware.load_profile(device))
    values = dict(settings)
    name = " ".join([f"{graph.model}/{values.pop('batch_size', '')}".rstrip("/"), *values.values()])
    rows = tuple(ablate(graph, part, bandwidth_bytes_per_s, time_limit_s, name) for part in (*PARTS, NOT_CYCLIC))
    return Study(name, graph, rows, free_link(graph, name))


def ablate(graph: Graph, part: Part, bandwidth_bytes_per_s: int, time_limit_s: float, cell: str = "") -> Ablated:
    """Plan a graph with some of the parts, verify the plan, and, of a streaming one, the schedule too."""
    whole = problem_of(graph, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    interval = -(-whole.state_bytes * TICKS_PER_BYTE // whole.clock(whole.steps))
    problem = _problem(replace(whole, interval=interval), part)
    began = time.perf_counter()
    plan = solve(problem, part.formulation, part.transfers, time_limit_s=time_limit_s)
    plan_s = time.perf_counter() - began
    if isinstance(plan, Infeasible):
        raise InputError(f"{cell}: {part.name}: infeasible at interval {interval} ({plan.reason}); leave this cell out")
    verify_plan(plan, problem)
    executed_peak_bytes = None
    if part.transfers is Transfers.STREAMING:
        executed = solve(on_anchors(problem, graph), part.formulation, part.transfers)
        assert isinstance(executed, Plan), "the link carries it"
        schedule = lower(executed, problem, graph, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
        executed_peak_bytes = schedule.certificate.peak_bytes
        if part.cyclic:  # narrower windows are not in the graph, by which verify judges
            verify(schedule, graph)
    return Ablated(
        cell=cell,
        part=part,
        interval=interval,
        state_bytes=problem.state_bytes,
        added_bytes=plan.peak_bytes - problem.training_peak_bytes,
        executed_added_bytes=executed_peak_bytes and executed_peak_bytes - problem.training_peak_bytes,
        snapshot_bytes=plan.snapshot_bytes,
        transfers=len(plan.transfers),
        gap=plan.gap,
        plan_s=plan_s,
    )


def _problem(problem: Problem, part: Part) -> Problem:
    """The paper's model has no cyclic windows to close."""
    closed = not part.cyclic and part.formulation is Formulation.DIRECT
    return read_after_iteration(problem) if closed else problem


def cells_of(
    models: Sequence[str], batch_sizes: Sequence[int], optimizers: Sequence[str]
) -> tuple[tuple[str, Settings], ...]:
    """Each model with each batch size and optimizer."""
    return tuple(
        (model, (("batch_size", str(batch)), ("optimizer", optimizer)))
        for model in models
        for batch in batch_sizes
        for optimizer in optimizers
    )
