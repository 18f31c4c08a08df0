"""A schedule's actions as the executor follows them: one list of events in the order of the anchors that cause them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from checkflow.schedule import ActionRow, Place, Schedule
from checkflow.state.names import StateName, gradient_name


class ActionKind(IntEnum):
    """In this order at one anchor: memory is returned before more is taken."""

    RELEASE = 0
    SNAPSHOT = 1
    OFFLOAD = 2
    VACATE = 3  # of a gradient in whose place the next one is written from here on: it has left, or is copied


@dataclass(frozen=True, slots=True)
class Move:
    """One action: bytes of a state storage, or of a gradient, on their way to the slot."""

    storage: int  # StateRow.id, or GradientRow.id
    offset_bytes: int
    size_bytes: int
    snapshot: bool
    release: int | None  # when the snapshot's memory is returned
    back: int = 0  # iterations before the checkpoint's whose value it is
    gradient: StateName | None = None  # of a gradient: its name in the slot


@dataclass(frozen=True)
class Timetable:
    """`time` orders places: all anchors of iteration 0, then those of iteration 1, and so on.

    A checkpoint of which parts leave in several iterations has places in iterations before 0, too.
    """

    moves: tuple[Move, ...]
    events: tuple[tuple[int, ActionKind, int], ...]  # (time, kind, index of its move), ascending
    moves_of: dict[int, tuple[int, ...]]  # storage -> its moves
    anchors: dict[tuple[str, str], dict[int, int]]  # (kind, subject) -> occurrence -> number of the anchor, from 1
    used: frozenset[int]  # anchors that some event or the pause needs
    hooked: frozenset[tuple[str, str]]  # (kind, subject) of these, and of a few more that look what has been copied
    anchor_count: int
    acts_in_updates: bool  # something is planned between an update's functions
    few_bytes: int = 0  # to copy them costs less than to do it apart
    pause: int | None = None  # when training stands still until all of a checkpoint has arrived
    parts: int = 1  # iterations in which a part of a checkpoint is as it will be saved
    lanes: int = 1  # kinds of slots, each with a timetable; of lanes they are followed in turn
    replica: bool = False  # the last is followed in each iteration, and the first is of what is read as a whole
    whole_every: int = 1  # iterations, where each checkpoint is read as a whole

    def time(self, iteration: int, anchor: int) -> int:
        return iteration * (self.anchor_count + 1) + anchor

    @property
    def first(self) -> int:
        """When the first event is due."""
        return self.events[0][0] if self.events else self.time(0, self.anchor_count)

    @property
    def last_iteration(self) -> int:
        """In which one, from the checkpoint's own on, the last event is due."""
        return max(0, self.events[-1][0] // (self.anchor_count + 1)) if self.events else 0


# Hooked though nothing may be planned there: parts of an iteration's anchors, each at most twice as late as the one
# before, so that what is copied by some anchor is staged by one not much more than twice as late.
LOOKS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)


def timetables_of(schedule: Schedule, few_bytes: int = 0) -> tuple[Timetable, ...]:
    """Of each kind of slots: with lanes, iteration i follows the one of lane i modulo their number. They hook the same
    anchors.
    """
    if schedule.slot_lanes == 1:
        return (timetable_of(schedule, few_bytes),)
    if schedule.replica:
        own = [timetable_of(_as_a_whole(schedule), few_bytes), timetable_of(schedule, few_bytes)]
    else:
        own = [timetable_of(_of_lane(schedule, lane), few_bytes) for lane in range(schedule.lanes)]
    used = frozenset[int]().union(*(each.used for each in own))
    hooked = frozenset[tuple[str, str]]().union(*(each.hooked for each in own))
    in_updates = any(each.acts_in_updates for each in own)
    return tuple(
        replace(
            each,
            used=used,
            hooked=hooked,
            acts_in_updates=in_updates,
            lanes=len(own),
            replica=schedule.replica,
            whole_every=_whole_every(schedule),
        )
        for each in own
    )


def _whole_every(schedule: Schedule) -> int:
    """Iterations from one checkpoint to the next where each is read at once."""
    if not schedule.replica:
        return schedule.lanes
    carried_bytes = schedule.bandwidth_bytes_per_s * schedule.iteration_time_ns // 10**9
    return -(-schedule.state_bytes // max(1, carried_bytes))


def _as_a_whole(schedule: Schedule) -> Schedule:
    """All written state leaves when the iteration ends, and no gradients."""
    end = (0, len(schedule.anchors))
    rows = (
        ActionRow(tensor=s.id, offset=0, bytes=s.bytes, offload=end) for s in schedule.state if s.written and s.bytes
    )
    return schedule.model_copy(update={"actions": tuple(rows)})


def _of_lane(schedule: Schedule, lane: int) -> Schedule:
    """What one iteration carries, as of that iteration."""
    rows = []
    for row in schedule.actions:
        if schedule.lane_of(row.back) == lane:
            places = {
                name: (place[0] + row.back, place[1])
                for name in ("snapshot", "offload", "release")
                if (place := getattr(row, name)) is not None
            }
            rows.append(row.model_copy(update={"back": 0, **places}))
    return schedule.model_copy(update={"actions": tuple(rows)})


def timetable_of(schedule: Schedule, few_bytes: int = 0) -> Timetable:
    """The timetable of a schedule that `read_schedule` or `lower` vouches for.

    A move without a snapshot holds no memory, so any place after the last write will do, as long as what is before it
    on the link stays before it. Those planned before the iteration's end leave at the end if together they are at most
    `few_bytes`, and all of them if no move has a snapshot; but not gradients in whose place the next ones are written.
    Those planned after it leave, where `few_bytes` is not 0, at the end or with the snapshot that is before them on the
    link: many together, and none later than planned. Neither is done where parts leave in several iterations.
    """
    count = len(schedule.anchors)

    def time(place: Place) -> int:
        return place[0] * (count + 1) + place[1]

    planned = [time(row.offload) for row in schedule.actions]
    offloads = list(planned)
    direct = [number for number, row in enumerate(schedule.actions) if row.snapshot is None]
    until = {row.id: row.until for row in schedule.gradients if row.until is not None}
    early = [n for n in direct if planned[n] < count and schedule.actions[n].tensor not in until]
    all_direct = few_bytes > 0 and len(direct) == len(planned)
    parts = 1 + max((row.back for row in schedule.actions), default=0)
    if parts == 1 and (all_direct or sum(schedule.actions[number].bytes for number in early) <= few_bytes):
        for number in early:
            offloads[number] = count
    if few_bytes and parts == 1:
        before = count
        for number in sorted(range(len(planned)), key=lambda number: (planned[number], number)):
            if planned[number] > count:
                offloads[number] = before = planned[number] if schedule.actions[number].snapshot is not None else before
    named = {row.id: row.parameter.name for row in schedule.gradients}
    events: list[tuple[int, ActionKind, int]] = []
    moves_of: dict[int, list[int]] = {}
    for index, row in enumerate(schedule.actions):
        moves_of.setdefault(row.tensor, []).append(index)
        events.append((offloads[index], ActionKind.OFFLOAD, index))
        if row.snapshot is not None and row.release is not None:
            events += [(time(row.snapshot), ActionKind.SNAPSHOT, index), (time(row.release), ActionKind.RELEASE, index)]
        if (last := until.get(row.tensor)) is not None:
            events.append((time((-row.back, last)), ActionKind.VACATE, index))
    anchors: dict[tuple[str, str], dict[int, int]] = {}
    for number, anchor in enumerate(schedule.anchors, start=1):
        anchors.setdefault((anchor.kind, anchor.subject), {})[anchor.occurrence] = number
    pause = None if schedule.pause is None else time(schedule.pause)
    used = frozenset(at % (count + 1) for at in (*(at for at, _, _ in events), *(() if pause is None else (pause,))))
    hooked = used | {int(count * part) for part in LOOKS}
    return Timetable(
        moves=tuple(
            Move(
                row.tensor,
                row.offset,
                row.bytes,
                row.snapshot is not None,
                None if row.release is None else time(row.release),
                row.back,
                gradient_name(row.back, named[row.tensor]) if row.tensor in named else None,
            )
            for row in schedule.actions
        ),
        events=tuple(sorted(events, key=lambda event: (event[0], event[1], planned[event[2]], event[2]))),
        moves_of={storage: tuple(indices) for storage, indices in moves_of.items()},
        anchors=anchors,
        used=used,
        hooked=frozenset(key for key, numbers in anchors.items() if not hooked.isdisjoint(numbers.values())),
        anchor_count=count,
        acts_in_updates=any(schedule.anchors[number - 1].kind == "update" for number in used if number),
        few_bytes=few_bytes,
        pause=pause,
        parts=parts,
    )
