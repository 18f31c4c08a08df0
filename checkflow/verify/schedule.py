"""A schedule against its graph: digest, header, actions and certificate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from checkflow.graph import Graph
from checkflow.graphfile import graph_fingerprint, state_fingerprint
from checkflow.schedule import ActionRow, AnchorRow, Schedule, StateRow, UnlistedRow, ViewRow, schedule_digest
from checkflow.verify.bound import fluid_bound, ideal_bound
from checkflow.verify.executed import executed
from checkflow.verify.failure import fail
from checkflow.verify.memory import peak_of
from checkflow.verify.policy import check_policy
from checkflow.verify.rebuilt import replay_ns, with_gradients
from checkflow.verify.rows import Part
from checkflow.verify.terms import Terms, is_state, terms_of_schedule

_Row = StateRow | AnchorRow | UnlistedRow


@dataclass(frozen=True, slots=True)
class VerifiedSchedule:
    """What the actions need, and what none can do without, recomputed."""

    training_peak_bytes: int
    peak_bytes: int
    lower_bound_bytes: int  # with these anchors
    ideal_peak_bytes: int  # the bound with an anchor between any two operators
    snapshot_bytes: int
    pause_ns: int  # for each checkpoint
    replay_ns: int  # of a restore


def verify(schedule: Schedule, graph: Graph) -> VerifiedSchedule:
    """Check the schedule against its graph. Raises VerificationError at the first promise that it breaks."""
    if schedule.digest != schedule_digest(schedule):
        fail("digest: is not the digest of this schedule; it was changed after it was compiled")
    if schedule.graph_fingerprint != graph_fingerprint(graph):
        differing = (f"; {field}: {claimed} there, {found} here" for field, claimed, found in _named(schedule, graph))
        known = next(differing, "")  # whoever reads it can do nothing about a digest
        fail(f"graph_fingerprint: the schedule was made for another graph than this one of {graph.model!r}{known}")
    terms = terms_of_schedule(schedule, graph)
    _check_header(schedule, graph, {saved.tensor for saved in terms.state})
    if schedule.replica or schedule.lanes > 1 or schedule.gradients or any(row.back for row in schedule.actions):
        terms = replace(terms, state=with_gradients(schedule, graph, terms.state))
    check_policy(schedule)  # after what says of which tensor it is
    _check_formulation(schedule)
    holds, pause_ns, paused_bytes = executed(schedule, _parts(terms, schedule.actions), terms)
    pauses = schedule.pause is not None  # who may stand still needs no byte (docs/model.md)
    verified = VerifiedSchedule(
        training_peak_bytes=terms.training_peak_bytes,
        peak_bytes=max(peak_of(terms, holds), paused_bytes),
        lower_bound_bytes=terms.training_peak_bytes if pauses else fluid_bound(terms),
        ideal_peak_bytes=terms.training_peak_bytes if pauses else ideal_bound(terms),
        snapshot_bytes=sum(hold.size_bytes for hold in holds),
        pause_ns=pause_ns,
        replay_ns=replay_ns(schedule, graph),
    )
    claims, above = schedule.certificate, verified.peak_bytes - verified.lower_bound_bytes
    for field, claimed, found in (
        ("training_peak_bytes", claims.training_peak_bytes, verified.training_peak_bytes),
        ("peak_bytes", claims.peak_bytes, verified.peak_bytes),
        ("lower_bound_bytes", claims.lower_bound_bytes, verified.lower_bound_bytes),
        ("ideal_peak_bytes", claims.ideal_peak_bytes, verified.ideal_peak_bytes),
        ("gap", claims.gap, above / verified.lower_bound_bytes if above else 0.0),
        ("snapshot_bytes", claims.snapshot_bytes, verified.snapshot_bytes),
        ("pause_ns", claims.pause_ns, verified.pause_ns),
        ("replay_ns", claims.replay_ns, verified.replay_ns),
    ):
        if claimed is not None and claimed != found:  # version 1 did not say
            fail(f"certificate.{field}: {claimed} is claimed, {found} is found")
    limit = terms.memory_limit_bytes
    if limit is not None and verified.peak_bytes > limit:
        fail(f"certificate.peak_bytes: {verified.peak_bytes} is over the memory limit, {limit}")
    return verified


def _check_formulation(schedule: Schedule) -> None:
    """The paper's model moves a chunk within one step, and reads none from the live tensor."""
    if schedule.formulation == "direct":
        return
    if schedule.transfers != "packed":
        fail(f"transfers: formulation {schedule.formulation} is always packed, not {schedule.transfers}")
    for number, action in enumerate(schedule.actions):
        if action.snapshot is None:
            fail(f"actions row {number}: has no snapshot, which formulation {schedule.formulation} requires (Eq 2)")


def _named(schedule: Schedule, graph: Graph) -> list[tuple[str, object, object]]:
    """What the header says of the graph that is otherwise: field, said, found."""
    arguments, ours = (", ".join(map("=".join, each)) or "none" for each in (schedule.arguments, graph.arguments))
    said = (
        ("model", schedule.model, graph.model),
        ("arguments", arguments, ours),
        ("device", schedule.device, graph.device),
        ("traced_on", schedule.traced_on, graph.traced_on),
        ("steps", schedule.steps, len(graph.ops)),
        ("iteration_time_ns", schedule.iteration_time_ns, sum(op.time_ns for op in graph.ops)),
    )
    return [each for each in said if each[1] != each[2]]


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
    unlisted = [
        UnlistedRow(name=one.name, bytes=one.size_bytes, where=one.where, scaler=one.scaler) for one in graph.unlisted
    ]
    for field, claimed, found in (
        ("state_fingerprint", schedule.state_fingerprint, state_fingerprint(graph)),
        *_named(schedule, graph),
        ("state_bytes", schedule.state_bytes, sum(row.bytes for row in state if row.written)),
        ("static_state_bytes", schedule.static_state_bytes, sum(row.bytes for row in state if not row.written)),
        ("state", len(schedule.state), len(state)),
        ("anchors", len(schedule.anchors), len(anchors)),
        ("unlisted", len(schedule.unlisted), len(unlisted)),
    ):
        if claimed != found:
            fail(f"{field}: the schedule has {claimed!r}, its graph {found!r}")
    _check_rows("state", schedule.state, state)
    _check_rows("anchors", schedule.anchors, anchors)
    _check_rows("unlisted", schedule.unlisted, unlisted)


def _check_rows(table: str, claimed: Sequence[_Row], found: Sequence[_Row]) -> None:
    for number, (row, other) in enumerate(zip(claimed, found, strict=True)):
        for field in type(row).model_fields:
            said, is_so = getattr(row, field), getattr(other, field)
            if said != is_so:
                where = f"{table} row {number}: {_name(row)}: {field}"
                fail(f"{where}: the schedule has {_in_words(said)}, its graph {_in_words(is_so)}")


def _name(row: _Row) -> str:
    if isinstance(row, AnchorRow):
        return f"{row.kind} {row.subject}".rstrip()
    return row.name if isinstance(row, UnlistedRow) else next((view.name for view in row.views), "no name")


def _in_words(value: object) -> str:
    """Views as a person writes them: model/fc.weight float32 [768, 768]."""
    if isinstance(value, tuple):
        views = [f"{view.name} {view.dtype} {list(view.shape)}" for view in value if isinstance(view, ViewRow)]
        return ", ".join(views) or "none"
    return repr(value) if value == "" else str(value)


def _parts(terms: Terms, rows: Sequence[ActionRow]) -> list[Part]:
    index_of = {(saved.tensor, saved.back): index for index, saved in enumerate(terms.state)}
    for number, row in enumerate(rows):
        if (row.tensor, row.back) not in index_of:
            fail(
                f"actions row {number}: tensor {row.tensor} is not state that the iteration writes, or what rebuilds it"
            )
    return [Part(index_of[row.tensor, row.back], row.offset, row.bytes) for row in rows]
