"""A schedule against its graph: digest, header, plan, certificate and actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from checkflow.errors import InputError
from checkflow.graph import Graph
from checkflow.graphfile import graph_fingerprint, state_fingerprint
from checkflow.plan import Chunk, Formulation, Plan, Problem, ProvenBy, SolverRun, Transfer, Transfers, problem_of
from checkflow.schedule import ActionRow, AnchorRow, PlanRow, Schedule, StateRow, ViewRow, schedule_digest
from checkflow.verify.executed import executed_holds
from checkflow.verify.failure import fail
from checkflow.verify.memory import peak_of
from checkflow.verify.plan import VerifiedPlan, verify_plan


@dataclass(frozen=True, slots=True)
class Verified(VerifiedPlan):
    """What the plan and its actions need, recomputed."""

    executed_peak_bytes: int
    executed_snapshot_bytes: int


def verify(schedule: Schedule, graph: Graph) -> Verified:
    """Check the schedule against its graph. Raises VerificationError at the first promise that it breaks."""
    if schedule.digest != schedule_digest(schedule):
        fail("digest: is not the digest of this schedule; it was changed after it was compiled")
    if schedule.graph_fingerprint != graph_fingerprint(graph):
        fail(f"graph_fingerprint: the schedule was made for another graph than this one of {graph.model!r}")
    problem = _problem(schedule, graph)
    _check_header(schedule, graph, {state.tensor for state in problem.state})
    plan = verify_plan(_plan(schedule, problem), problem)
    holds = executed_holds(schedule, _chunks(problem, schedule.actions, "actions"), problem)
    verified = Verified(
        plan.training_peak_bytes,
        plan.peak_bytes,
        plan.snapshot_bytes,
        plan.lower_bound_bytes,
        peak_of(problem, holds),
        sum(hold.size_bytes for hold in holds),
    )
    claims = schedule.certificate
    above = plan.peak_bytes - claims.lower_bound_bytes
    for field, claimed, found in (
        ("training_peak_bytes", claims.training_peak_bytes, verified.training_peak_bytes),
        ("snapshot_bytes", claims.snapshot_bytes, verified.snapshot_bytes),
        ("executed_peak_bytes", claims.executed_peak_bytes, verified.executed_peak_bytes),
        ("executed_snapshot_bytes", claims.executed_snapshot_bytes, verified.executed_snapshot_bytes),
        ("gap", claims.gap, above / claims.lower_bound_bytes if above else 0.0),
    ):
        if claimed != found:
            fail(f"certificate.{field}: {claimed} is claimed, {found} is found")
    limit = problem.memory_limit_bytes
    if limit is not None and verified.executed_peak_bytes > limit:
        fail(f"certificate.executed_peak_bytes: {verified.executed_peak_bytes} is over the memory limit, {limit}")
    return verified


def _problem(schedule: Schedule, graph: Graph) -> Problem:
    """The problem that the header states; what it takes from the graph is derived here a second time."""
    try:
        problem = problem_of(
            graph,
            bandwidth_bytes_per_s=schedule.bandwidth_bytes_per_s,
            interval=schedule.interval,
            chunk_bytes=schedule.chunk_bytes,
            granule_bytes=schedule.granule_bytes,
            memory_limit_bytes=schedule.memory_limit_bytes,
            slack_ppm=schedule.slack_ppm,
        )
    except InputError as error:
        fail(str(error))
    change = [0] * (graph.steps + 2)
    for tensor in graph.tensors:
        change[max(tensor.born, 1)] += tensor.size_bytes
        change[tensor.freed + 1] -= tensor.size_bytes
    if tuple(accumulate(change))[1:-1] != problem.resident_bytes:
        fail("graph: its resident bytes do not follow from its tensors' lifetimes")
    writes: dict[int, list[int]] = {}
    for step, op in enumerate(graph.ops, start=1):
        for index in op.writes:
            writes.setdefault(index, []).append(step)
    written = [
        (index, tensor.size_bytes, min(writes[index]), max(writes[index]))
        for index, tensor in enumerate(graph.tensors)
        if tensor.role.is_state and index in writes
    ]
    if written != [(state.tensor, state.size_bytes, state.first_write, state.last_write) for state in problem.state]:
        fail("graph: the state to be saved does not follow from its operators' writes")
    return problem


def _check_header(schedule: Schedule, graph: Graph, written: set[int]) -> None:
    state = [
        StateRow(
            id=index,
            bytes=tensor.size_bytes,
            written=index in written,
            views=tuple(ViewRow(name=view.name, dtype=view.dtype, shape=view.shape) for view in tensor.views),
        )
        for index, tensor in enumerate(graph.tensors)
        if tensor.role.is_state
    ]
    anchors = [
        AnchorRow(kind=a.kind.value, subject=a.subject, occurrence=a.occurrence, position=a.position)
        for a in graph.anchors
    ]
    for field, claimed, found in (
        ("state_fingerprint", schedule.state_fingerprint, state_fingerprint(graph)),
        ("model", schedule.model, graph.model),
        ("arguments", str(schedule.arguments), str(graph.arguments)),
        ("device", schedule.device, graph.device),
        ("traced_on", schedule.traced_on, graph.traced_on),
        ("steps", schedule.steps, len(graph.ops)),
        ("iteration_time_ns", schedule.iteration_time_ns, sum(op.time_ns for op in graph.ops)),
        ("state_bytes", schedule.state_bytes, sum(row.bytes for row in state if row.written)),
        ("static_state_bytes", schedule.static_state_bytes, sum(row.bytes for row in state if not row.written)),
        ("state", len(schedule.state), len(state)),
        ("anchors", len(schedule.anchors), len(anchors)),
    ):
        if claimed != found:
            fail(f"{field}: the schedule has {claimed!r}, its graph {found!r}")
    _check_rows("state", schedule.state, state)
    _check_rows("anchors", schedule.anchors, anchors)


def _check_rows(table: str, claimed: Sequence[StateRow | AnchorRow], found: Sequence[StateRow | AnchorRow]) -> None:
    for number, (row, other) in enumerate(zip(claimed, found, strict=True)):
        if row != other:
            fail(f"{table} row {number}: the schedule has {row!r}, its graph {other!r}")


def _plan(schedule: Schedule, problem: Problem) -> Plan:
    chunks = _chunks(problem, schedule.plan, "plan")
    claims = schedule.certificate
    return Plan(
        formulation=Formulation(schedule.formulation),
        transfers_kind=Transfers(schedule.transfers),
        transfers=tuple(
            Transfer(chunk, row.snapshot, row.start, row.finish)
            for chunk, row in zip(chunks, schedule.plan, strict=True)
        ),
        peak_bytes=claims.peak_bytes,
        lower_bound_bytes=claims.lower_bound_bytes,
        proven_by=ProvenBy(claims.proven_by),
        solver=SolverRun(claims.solver, claims.solver_why),
        constructive_peak_bytes=claims.constructive_peak_bytes,
    )


def _chunks(problem: Problem, rows: Sequence[PlanRow | ActionRow], table: str) -> list[Chunk]:
    index_of = {state.tensor: index for index, state in enumerate(problem.state)}
    for number, row in enumerate(rows):
        if row.tensor not in index_of:
            fail(f"{table} row {number}: tensor {row.tensor} is not state that the iteration writes")
    return [Chunk(index_of[row.tensor], row.offset, row.bytes) for row in rows]
