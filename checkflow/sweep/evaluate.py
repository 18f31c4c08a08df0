"""One cell on a graph: its Row."""

from __future__ import annotations

from checkflow import hardware
from checkflow.compiler import Compiled, Options, Refused, compile_graph, explain
from checkflow.errors import CheckflowError
from checkflow.graph import Graph
from checkflow.missing import not_installed
from checkflow.plan import Formulation, Infeasible, Problem, Transfers
from checkflow.policies import checkfreq
from checkflow.sweep.cells import Cell, Outcome, Row
from checkflow.text import brief


def evaluate(cell: Cell, graph: Graph, profile: hardware.Profile | None) -> Row:
    """Plan a cell.

    Args:
        graph: with the times that the cell asks for.
        profile: of the device; None where only the graph's times are known, and then the cell has a bandwidth.

    Raises what compile_graph and the policies raise.
    """
    bandwidth = cell.bandwidth_bytes_per_s
    if bandwidth is None:
        assert profile is not None, "check() asks for one of them"
        bandwidth = hardware.link_bytes_per_s(profile, graph.world_size)
    row = Row(
        cell=cell,
        outcome=Outcome.INFEASIBLE,
        device=graph.device,
        device_memory_bytes=profile.memory_bytes if profile else None,
        bandwidth_bytes_per_s=bandwidth,
        steps=graph.steps,
        iteration_time_ns=graph.iteration_time_ns,
        training_peak_bytes=graph.training_peak_bytes,
        state_bytes=sum(graph.tensors[index].size_bytes for index in graph.written_state),
    )
    return _compiled(row, graph, profile)


def failure(cell: Cell, message: str) -> Row:
    """The row of a cell without an answer."""
    return Row(cell=cell, outcome=Outcome.FAILED, message=message)


def complaint(error: BaseException) -> str:
    """An exception in one line, as a row's message."""
    if isinstance(error, CheckflowError):
        return " ".join(str(error).split())
    return not_installed(error) or f"internal error: {brief(error)}"


def _compiled(row: Row, graph: Graph, profile: hardware.Profile | None) -> Row:
    """A schedule that is verified, and the peak of its execution."""
    cell, formulation = row.cell, row.cell.formulation or Formulation.DIRECT
    assert row.bandwidth_bytes_per_s is not None
    direct = formulation is Formulation.DIRECT
    options = Options(
        bandwidth_bytes_per_s=row.bandwidth_bytes_per_s,
        interval=cell.interval,
        chunk_bytes=cell.chunk_bytes,
        slack_ppm=cell.slack_ppm,
        policy=cell.policy,
        formulation=formulation,
        transfers=Transfers.STREAMING if direct else Transfers.PACKED,
    )
    result = compile_graph(graph, options)
    if isinstance(result, Refused):
        return _infeasible(row, result.problem.interval, result.answer, explain(result), result.plan_s)
    assert isinstance(result, Compiled)
    certificate = result.schedule.certificate
    return _feasible(
        row.model_copy(
            update={
                "peak_bytes": certificate.peak_bytes,
                "packed_peak_bytes": None if direct else result.plan.peak_bytes,
                "lower_bound_bytes": certificate.lower_bound_bytes if direct else result.plan.lower_bound_bytes,
                "plan_s": result.plan_s,
            }
        ),
        result.problem,
        profile,
        pause_ns=certificate.pause_ns,
        snapshot_bytes=result.schedule.copied_bytes(),
        lanes=result.schedule.lanes,
    )


def _infeasible(row: Row, interval: int, answer: Infeasible, message: str, plan_s: float) -> Row:
    return row.model_copy(
        update={
            "interval": interval,
            "reason": answer.reason,
            "message": message,
            "needed_bandwidth_bytes_per_s": answer.needed_bandwidth_bytes_per_s,
            "smallest_interval": answer.smallest_interval,
            "plan_s": plan_s,
        }
    )


def _feasible(
    row: Row, problem: Problem, profile: hardware.Profile | None, *, pause_ns: int, snapshot_bytes: int, lanes: int
) -> Row:
    """The row of a plan, with what it costs."""
    assert row.iteration_time_ns and row.state_bytes is not None
    period_ns = problem.interval * row.iteration_time_ns
    copy_ns = None if profile is None else hardware.copy_ns(snapshot_bytes, profile)
    checkfreq_bytes = checkfreq.at_best(problem).peak_bytes
    largest = row.largest_bytes
    assert largest is not None
    return row.model_copy(
        update={
            "outcome": Outcome.FEASIBLE,
            "interval": problem.interval,
            "snapshot_bytes": snapshot_bytes,
            "pause_ns": pause_ns,
            "copy_ns": copy_ns,
            "overhead": None if copy_ns is None else (pause_ns + copy_ns / lanes) / period_ns,
            "checkfreq_peak_bytes": checkfreq_bytes,
            "saving": 1 - largest / checkfreq_bytes,
            "disk_bytes_per_s": -(-row.state_bytes * 10**9 // period_ns),
        }
    )
