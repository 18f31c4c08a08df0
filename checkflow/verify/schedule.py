"""A schedule against its graph: digest, header, plan, certificate and actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from checkflow.graph import Graph
from checkflow.graphfile import graph_fingerprint, state_fingerprint
from checkflow.schedule import ActionRow, AnchorRow, PlanRow, Schedule, StateRow, ViewRow, schedule_digest
from checkflow.verify.executed import executed_holds
from checkflow.verify.failure import fail
from checkflow.verify.memory import peak_of
from checkflow.verify.plan import VerifiedPlan, check_plan
from checkflow.verify.rows import Claims, Move, Part
from checkflow.verify.terms import Terms, is_state, terms_of_schedule


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
    terms = terms_of_schedule(schedule, graph)
    _check_header(schedule, graph, {saved.tensor for saved in terms.state})
    parts = _parts(terms, schedule.plan, "plan")
    moves = [Move(part, row.snapshot, row.start, row.finish) for part, row in zip(parts, schedule.plan, strict=True)]
    plan = check_plan(_claims(schedule), moves, terms)
    holds = executed_holds(schedule, _parts(terms, schedule.actions, "actions"), terms)
    verified = Verified(
        plan.training_peak_bytes,
        plan.peak_bytes,
        plan.snapshot_bytes,
        plan.lower_bound_bytes,
        peak_of(terms, holds),
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
    limit = terms.memory_limit_bytes
    if limit is not None and verified.executed_peak_bytes > limit:
        fail(f"certificate.executed_peak_bytes: {verified.executed_peak_bytes} is over the memory limit, {limit}")
    return verified


def _check_header(schedule: Schedule, graph: Graph, written: set[int]) -> None:
    state = [
        StateRow(
            id=index,
            bytes=tensor.size_bytes,
            written=index in written,
            views=tuple(ViewRow(name=view.name, dtype=view.dtype, shape=view.shape) for view in tensor.views),
        )
        for index, tensor in enumerate(graph.tensors)
        if is_state(tensor)
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


def _claims(schedule: Schedule) -> Claims:
    certificate = schedule.certificate
    return Claims(
        formulation=schedule.formulation,
        transfers=schedule.transfers,
        peak_bytes=certificate.peak_bytes,
        lower_bound_bytes=certificate.lower_bound_bytes,
        proven_by=certificate.proven_by,
        constructive_peak_bytes=certificate.constructive_peak_bytes,
    )


def _parts(terms: Terms, rows: Sequence[PlanRow | ActionRow], table: str) -> list[Part]:
    index_of = {saved.tensor: index for index, saved in enumerate(terms.state)}
    for number, row in enumerate(rows):
        if row.tensor not in index_of:
            fail(f"{table} row {number}: tensor {row.tensor} is not state that the iteration writes")
    return [Part(index_of[row.tensor], row.offset, row.bytes) for row in rows]
