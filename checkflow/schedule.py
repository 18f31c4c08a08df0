"""The schedule: what compilation hands to the runtime. Strict, versioned JSON, described in schedules/FORMAT.md.

A place in `actions` is (iteration, anchor), the anchor-th of `anchors`, counted from 1; steps and positions are those
of docs/model.md. Files of version 1 are read, too: what they do not say of their actions is None.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter

from checkflow.counts import Count, Positive, PositiveAmount, Total, Whole
from checkflow.errors import FormatError
from checkflow.jsonfile import digest_of, parse_json, render, validate, write_text
from checkflow.version1 import of_version_1

FORMAT: Literal["checkflow-schedule"] = "checkflow-schedule"
VERSION: Literal[2] = 2

Place = tuple[Whole, Positive]  # (iteration, anchor from 1); the checkpoint is taken at the end of iteration 0
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]


def _one_of(*words: str) -> StringConstraints:
    return StringConstraints(pattern=f"^({'|'.join(words)})$")


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class ViewRow(_Model):
    """One name under which user code knows (part of) a state storage."""

    name: str
    dtype: str
    shape: tuple[Count, ...]


class StateRow(_Model):
    """One state storage. `id` is its index in the graph's tensors; what is not `written` is copied once."""

    id: Count
    bytes: Count
    written: bool
    views: Annotated[tuple[ViewRow, ...], Field(min_length=1)]


class GradientRow(_Model):
    """The gradient of one parameter, as its optimizer consumes it. `id` is its index in the graph's tensors.

    With `until` training writes the next gradient in its place: at that anchor it has left, or is copied.

    Of a parameter of shape (a, b) the gradient may leave as its factors, one after the other: of shapes
    (factor_rows, a), which is transposed, and (factor_rows, b).
    """

    id: Count
    bytes: Positive  # of what leaves
    factor_rows: Count = 0  # 0: the gradient itself leaves
    until: Positive | None = None  # an anchor, from 1, of the iteration whose update consumes it
    parameter: ViewRow


class AnchorRow(_Model):
    """One place in an iteration where a hook runs, with the position (0..T) at which it fires."""

    kind: Annotated[
        str, _one_of("forward_pre", "forward", "gradient", "optimizer_pre", "update", "optimizer", "iteration_end")
    ]
    subject: str
    occurrence: Positive
    position: Count


class ActionRow(_Model):
    """One transfer: the anchors that create its snapshot, issue its offload and release the snapshot.

    A gradient's snapshot is the gradient itself, which is held though training lets go of it.
    """

    tensor: Count
    offset: Count
    bytes: Positive  # of a state tensor or gradient from `offset` on; without `snapshot` the live tensor is read
    back: Count = 0  # iterations before the checkpoint's whose value is read; of a gradient, whose update consumes it
    snapshot: Place | None = None
    offload: Place
    release: Place | None = None


class UnlistedRow(_Model):
    """What the iteration hands on to the next though it is no state, so that a checkpoint lacks it."""

    name: str = ""
    bytes: Count
    where: str = ""
    scaler: bool = False


class Certificate(_Model):
    """What the actions need, and why none at these anchors need less than the bound. `verify` recomputes it."""

    training_peak_bytes: Total
    peak_bytes: Total
    lower_bound_bytes: Total | None  # of every schedule with these anchors
    ideal_peak_bytes: Total | None  # the same with an anchor between any two operators
    gap: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None  # (peak - bound) / bound; 0.0 is proven optimal
    snapshot_bytes: Total
    solver: str
    solver_why: str
    pause_ns: Total = 0  # training stands still for so long for each checkpoint, with slack taken off
    replay_ns: Total = 0  # a restore makes updates again for so long


class Schedule(_Model):
    """The actions that carry out a proven plan, or a policy's rule. `sealed` gives it its digest."""

    format: Literal["checkflow-schedule"] = FORMAT
    version: Literal[2] = VERSION
    digest: Digest | Literal[""] = ""
    graph_fingerprint: Digest
    state_fingerprint: Digest
    model: str
    arguments: tuple[tuple[str, str], ...]
    device: str
    traced_on: str
    formulation: Annotated[str, _one_of("paper", "compact", "direct")]
    transfers: Annotated[str, _one_of("packed", "streaming")]
    interval: PositiveAmount
    bandwidth_bytes_per_s: PositiveAmount  # of the link, before slack is taken off
    slack_ppm: Annotated[int, Field(ge=0, lt=1_000_000)]
    chunk_bytes: PositiveAmount | None
    granule_bytes: Positive
    memory_limit_bytes: PositiveAmount | None
    steps: Positive  # T, operators in an iteration
    iteration_time_ns: Total  # of the graph, before slack
    state_bytes: Total  # state that the iteration writes
    static_state_bytes: Total  # state that it does not write, copied once
    certificate: Certificate
    state: tuple[StateRow, ...]
    anchors: tuple[AnchorRow, ...]
    actions: tuple[ActionRow, ...]  # in the order in which offloads are issued
    unlisted: tuple[UnlistedRow, ...] = ()
    policy: Annotated[str, StringConstraints(pattern="^[a-z][a-z0-9_]*$")] = "checkflow"
    pause: Place | None = None  # where training stands still until all of the checkpoint has arrived
    lanes: Positive = 1  # iterations of which each checkpoint has a part; after so many the actions begin anew
    replica: bool = False  # written state without actions is kept on the host, by the updates of its gradients
    gradients: tuple[GradientRow, ...] = ()  # that rebuild state which is saved as it was some iterations before

    @property
    def period(self) -> int:
        """Iterations after which the actions begin anew."""
        return self.interval * self.lanes

    def lane_of(self, back: int) -> int:
        """The lane of the iteration so many before one of lane 0. Iteration i is of lane i modulo their number."""
        return -back % self.lanes

    @property
    def slot_lanes(self) -> int:
        """Kinds of slots: one for each lane; or one for the replica, and one for what brings it an iteration on."""
        return 2 if self.replica else self.lanes

    def rebuilt(self) -> dict[int, int]:
        """Of written state that gradients rebuild, in which kind of slots it is. All else is in each."""
        gradients = {row.id for row in self.gradients}
        if self.replica:
            sent = {row.tensor for row in self.actions}
            return {row.id: 0 for row in self.state if row.written and row.bytes and row.id not in sent}
        backs: dict[int, set[int]] = {}
        for row in self.actions if self.lanes > 1 else ():
            if row.tensor not in gradients:
                backs.setdefault(row.tensor, set()).add(row.back)
        return {tensor: self.lane_of(min(its)) for tensor, its in backs.items() if len(its) == 1}

    def names(self) -> dict[int, str]:
        """For a person, by the ids that actions have: state by its first name, gradients by their parameter's."""
        gradients = {row.id: f"gradient of {row.parameter.name}" for row in self.gradients}
        return {row.id: row.views[0].name for row in self.state} | gradients

    def held_bytes(self) -> int:
        """Of the certificate's snapshots: gradients, which are kept and not copied."""
        gradients = {row.id for row in self.gradients if row.until is None}
        return sum(row.bytes for row in self.actions if row.snapshot is not None and row.tensor in gradients)

    def copied_bytes(self) -> int:
        """Of the certificate's snapshots: what is copied within the device, until the actions begin anew."""
        return self.certificate.snapshot_bytes - self.held_bytes()

    def sent_bytes(self) -> int:
        """What an iteration fills of slots, on average."""
        return (sum(row.bytes for row in self.actions) + self.static_state_bytes) // self.period

    def position(self, place: Place) -> int:
        """The unrolled position of a place in `actions`."""
        iteration, anchor = place
        return (iteration - 1) * self.steps + self.anchors[anchor - 1].position


_READER = TypeAdapter(Schedule)
_DEFAULTS = Schedule.model_fields


def schedule_document(schedule: Schedule) -> dict[str, object]:
    """The schedule as the JSON object that is written. Rows leave out what they do not have (snapshot, release).

    So does the whole, of what came with the policies: what has no pause has the digest that it had before them.
    """
    tables = {"state", "anchors", "actions", "unlisted", "gradients"}
    left_out = {
        name for name in ("policy", "pause", "lanes", "replica") if getattr(schedule, name) == _DEFAULTS[name].default
    }
    document: dict[str, object] = schedule.model_dump(mode="json", exclude=tables | left_out | {"certificate"})
    quiet = {name for name in ("pause_ns", "replay_ns") if not getattr(schedule.certificate, name)}
    document["certificate"] = schedule.certificate.model_dump(mode="json", exclude=quiet)
    for name, rows in (
        ("state", schedule.state),
        ("anchors", schedule.anchors),
        ("actions", schedule.actions),
    ):
        document[name] = [_filled(row) for row in rows]
    if schedule.gradients:
        document["gradients"] = [_filled(row) for row in schedule.gradients]
    if schedule.unlisted:
        document["unlisted"] = [row.model_dump(mode="json", exclude_defaults=True) for row in schedule.unlisted]
    return document


def _filled(row: StateRow | AnchorRow | ActionRow | GradientRow) -> dict[str, object]:
    """A row without what it does not have."""
    absent = {name for name in ("back", "factor_rows") if getattr(row, name, None) == 0}
    return row.model_dump(mode="json", exclude_none=True, exclude=absent)


def schedule_digest(schedule: Schedule) -> str:
    """Digest of everything in the schedule but its own field `digest`."""
    document = schedule_document(schedule)
    del document["digest"]
    return digest_of(document)


def sealed(schedule: Schedule) -> Schedule:
    """The same schedule with the digest of its content."""
    return schedule.model_copy(update={"digest": schedule_digest(schedule)})


def write_schedule(path: Path, schedule: Schedule) -> None:
    """Write the sealed schedule, whole or not at all. Raises InputError where it cannot be written."""
    write_text(path, render(schedule_document(sealed(schedule))))


def read_schedule(path: Path) -> Schedule:
    """The schedule in a file. Raises FormatError, one line, where it is not one or its digest is of other content.

    Whoever reads it may follow its rows to its state and its anchors, and they move all of that state; whether the plan
    is sound is for `verify` to say.
    """
    document = parse_json(path, FORMAT, 1, VERSION)
    old = document["version"] != VERSION
    if old:
        _check_digest(path, document.get("digest"), digest_of({k: v for k, v in document.items() if k != "digest"}))
        document = of_version_1(document, str(path))
    schedule = validate(_READER, document, str(path))
    if not old:
        _check_digest(path, schedule.digest, schedule_digest(schedule))
    for complaint in complaints(schedule):
        raise FormatError(f"{path}: {complaint}; compile it again")
    return sealed(schedule) if old else schedule


def _check_digest(path: Path, claimed: object, found: str) -> None:
    if claimed != found:
        raise FormatError(
            f"{path}: field digest: is not the digest of this content, the file was changed or damaged; "
            "compile it again"
        )


def complaints(schedule: Schedule) -> Iterator[str]:
    """What keeps it from being followed: rows that refer to nothing, or bytes that no checkpoint would have."""
    found = list(_dangling(schedule))
    yield from found or _uncovered(schedule)


def _uncovered(schedule: Schedule) -> Iterator[str]:
    """Of written state, and of the gradients that rebuild it, bytes that no row moves, or two do."""
    names = schedule.names()
    written = {row.id: row for row in schedule.state if row.written and row.bytes}
    size_of = {id_: row.bytes for id_, row in written.items()} | {row.id: row.bytes for row in schedule.gradients}
    moved: dict[int, dict[int, list[ActionRow]]] = {id_: {} for id_ in size_of}
    for action in schedule.actions:
        moved[action.tensor].setdefault(action.back, []).append(action)
    for tensor, size_bytes in size_of.items():
        for rows in moved[tensor].values():
            spans = sorted((row.offset, row.offset + row.bytes) for row in rows)
            for (_, end), (start, _) in pairwise([(0, 0), *spans, (size_bytes, 0)]):
                if start != end:
                    how, (first, last) = "by no row" if end < start else "twice", sorted((start, end))
                    yield f"field actions: bytes {first}..{last} of {names[tensor]} are moved {how}"
    lanes = set(range(schedule.lanes))
    rebuilt: dict[str, set[int]] = {}  # by name: the iterations whose gradients rebuild it
    for tensor, row in written.items():
        backs = set(moved[tensor])
        if not backs and not schedule.replica:
            yield f"field actions: bytes 0..{row.bytes} of {names[tensor]} are moved by no row"
        elif len(backs) > 1 and backs != lanes:
            yield f"field actions: {names[tensor]} is of {sorted(backs)} iterations before, and has to be of one"
        elif len(backs) < 2:
            needed = lanes - backs if schedule.lanes > 1 or schedule.replica else set(range(*backs))
            rebuilt |= {view.name: needed for view in row.views}
    size_by_name = {view.name: row.bytes for row in written.values() for view in row.views}
    for gradient in schedule.gradients:
        name, shape, rows_of = gradient.parameter.name, gradient.parameter.shape, set(moved[gradient.id])
        if rows_of != rebuilt.get(name):
            found, those = sorted(rows_of), sorted(rebuilt.get(name, ()))
            yield f"field actions: {names[gradient.id]} is of {found} iterations before; those of {those} go along"
            continue
        size_bytes = size_by_name[name] * (gradient.factor_rows * sum(shape) or prod(shape)) // max(1, prod(shape))
        if gradient.bytes != size_bytes:
            yield f"field gradients: {names[gradient.id]} has {gradient.bytes} bytes, and {size_bytes} leave"


def _dangling(schedule: Schedule) -> Iterator[str]:
    """Rows that refer to what the schedule does not have."""
    positions = [anchor.position for anchor in schedule.anchors]
    if positions != sorted(positions) or positions[-1:] != [schedule.steps]:
        yield f"field anchors: positions have to ascend to the iteration's end, {schedule.steps}"
    size_of = {row.id: row.bytes for row in schedule.state if row.written}
    gradients = {row.id: row.bytes for row in schedule.gradients}
    if not size_of.keys().isdisjoint(gradients):
        yield "field gradients: has the id of state"
    for table, ids in (("state", [r.id for r in schedule.state]), ("gradients", [r.id for r in schedule.gradients])):
        if len(set(ids)) < len(ids):
            yield f"field {table}: has an id twice"
    size_of |= gradients
    for number, action in enumerate(schedule.actions):
        if action.tensor not in size_of:
            yield f"field actions.{number}.tensor: {action.tensor} is not the id of written state or a gradient"
        elif action.back >= schedule.period:
            yield f"field actions.{number}.back: {action.back} is not one of the {schedule.period} iterations of a plan"
        elif action.offset + action.bytes > size_of[action.tensor]:
            yield f"field actions.{number}: ends at byte {action.offset + action.bytes} of {size_of[action.tensor]}"
        if (action.snapshot is None) != (action.release is None):
            yield f"field actions.{number}: snapshot and release stand together or not at all"
        for place in (action.snapshot, action.offload, action.release):
            if place is not None and place[1] > len(positions):
                yield f"field actions.{number}: anchor {place[1]} is not one of the {len(positions)}"
            if place is not None and place[0] <= -schedule.period:
                yield f"field actions.{number}: iteration {place[0]} is before those of a checkpoint"
    for number, row in enumerate(schedule.gradients):
        if row.until is not None and row.until > len(positions):
            yield f"field gradients.{number}.until: anchor {row.until} is not one of the {len(positions)}"
    if schedule.lanes > 1 and (schedule.interval > 1 or schedule.pause is not None):
        yield f"field lanes: {schedule.lanes} go with an interval of 1 and no pause"
    if schedule.replica and (schedule.period > 1 or schedule.pause is not None or not schedule.gradients):
        yield "field replica: goes with gradients, an interval of 1, one lane and no pause"
    if schedule.pause is not None and schedule.pause[1] > len(positions):
        yield f"field pause: anchor {schedule.pause[1]} is not one of the {len(positions)}"


def json_schema() -> dict[str, object]:
    """The JSON Schema of a schedule file, as schedules/schedule.schema.json holds it."""
    schema = _READER.json_schema()
    required = ["format", "version", "digest", *schema.pop("required")]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema | {"required": required}
