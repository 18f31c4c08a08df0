"""What a policy costs while all is well, and how soon its checkpoints survive what may fail."""

from __future__ import annotations

from dataclasses import dataclass, replace

from checkflow.errors import InputError
from checkflow.schedule import Schedule

NS_PER_S = 10**9
BUSY, LEAST_NS, MOST_NS = 10, 30 * NS_PER_S, 600 * NS_PER_S  # as often as costs nothing: store/trainer/persist_every.py


@dataclass(frozen=True, slots=True)
class Costs:
    """A policy on one device. Checkpoint m is that of iteration m * interval.

    With `base_every` above 1 only each such checkpoint is a base, and the others are deltas since the one before.
    """

    name: str
    iteration_ns: int  # without stalls
    interval: int  # iterations from one checkpoint to the next
    stall_ns: int = 0  # training waits so long for each base, right after its iteration
    staged_after_ns: int = 0  # from its iteration's end on it survives a killed trainer
    write_ns: int = 0  # from then on the disk needs so long, until it survives a lost machine
    persist_gap_ns: int = 0  # least time from one write's beginning to the next's
    restore_memory_ns: int = 0
    restore_disk_ns: int = 0
    restart_ns: int = 0  # of a killed trainer, until it restores
    replace_ns: int = 0  # of a lost machine, likewise
    link_bytes: int = 0  # of each base
    disk_bytes: int = 0
    remake_ns: int = 0  # of each restore, from either: updates that a checkpoint in parts needs made again
    base_every: int = 1  # checkpoints
    replay_ns: int = 0  # of each delta since the base
    delta_stall_ns: int = 0
    delta_write_ns: int = 0
    delta_link_bytes: int = 0
    delta_disk_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("iteration_ns", "interval", "base_every"):
            if getattr(self, name) < 1:
                raise InputError(f"{self.name}: {name} is {getattr(self, name)}; give at least 1")
        for name in self.__slots__:
            if name != "name" and getattr(self, name) < 0:
                raise InputError(f"{self.name}: {name} is {getattr(self, name)}; give at least 0")
        if self.base_every > 1 and (max(self.write_ns, self.delta_write_ns) > self.iteration_ns * self.interval):
            raise InputError(
                f"{self.name}: a write takes longer than an interval, so deltas pile up; give a longer one"
            )

    @property
    def period_ns(self) -> int:
        """From a base's iteration to that of the next checkpoint."""
        return self.interval * self.iteration_ns + self.stall_ns


def costs_of(
    schedule: Schedule,
    disk_bytes_per_s: int,
    *,
    persist_gap_ns: int | None = None,
    restart_ns: int = 0,
    replace_ns: int = 0,
) -> Costs:
    """What a schedule file says, with a disk of this rate. No gap: as often as costs nothing, as `attach` does.

    A schedule has no operators' times: they are taken as equally long, which moves the moment of being staged by less
    than an iteration.
    """
    moved_bytes = sum(action.bytes for action in schedule.actions)  # gradients too
    whole_bytes = schedule.state_bytes if schedule.replica else moved_bytes
    made = costs_at(
        schedule.policy,
        max(1, schedule.iteration_time_ns),
        schedule.interval,
        whole_bytes + schedule.lanes * schedule.static_state_bytes,
        schedule.bandwidth_bytes_per_s,
        disk_bytes_per_s,
        stall_ns=schedule.certificate.pause_ns,
        persist_gap_ns=persist_gap_ns,
        restart_ns=restart_ns,
        replace_ns=replace_ns,
    )
    return replace(
        made,
        staged_after_ns=_staged_after_ns(schedule),
        link_bytes=moved_bytes // schedule.lanes,
        remake_ns=schedule.certificate.replay_ns,
    )


def costs_at(
    name: str,
    iteration_ns: int,
    interval: int,
    size_bytes: int,
    bandwidth_bytes_per_s: int,
    disk_bytes_per_s: int,
    *,
    stall_ns: int = 0,
    persist_gap_ns: int | None = None,
    restart_ns: int = 0,
    replace_ns: int = 0,
) -> Costs:
    """The same of a checkpoint of this size, which begins to leave when its iteration has ended."""
    write_ns, load_ns = _over(size_bytes, disk_bytes_per_s), _over(size_bytes, bandwidth_bytes_per_s)
    return Costs(
        name=name,
        iteration_ns=iteration_ns,
        interval=interval,
        stall_ns=stall_ns,
        staged_after_ns=load_ns,
        write_ns=write_ns,
        persist_gap_ns=as_often_as_costs_nothing(write_ns) if persist_gap_ns is None else persist_gap_ns,
        restore_memory_ns=load_ns,
        restore_disk_ns=write_ns + load_ns,
        restart_ns=restart_ns,
        replace_ns=replace_ns,
        link_bytes=size_bytes,
        disk_bytes=size_bytes,
    )


def as_often_as_costs_nothing(write_ns: int) -> int:
    """The gap that `attach` leaves between writes where nothing is said."""
    return min(max(LEAST_NS, write_ns * BUSY), MOST_NS)


def _staged_after_ns(schedule: Schedule) -> int:
    """When the link, which carries one action after the other, has carried the last; some leave before the end."""
    free_ns: int | None = None
    for action in schedule.actions:
        issued_ns = schedule.position(action.offload) * schedule.iteration_time_ns // schedule.steps
        began_ns = issued_ns if free_ns is None else max(free_ns, issued_ns)
        free_ns = began_ns + _over(action.bytes, schedule.bandwidth_bytes_per_s)
    return max(0, free_ns or 0)


def _over(size_bytes: int, bytes_per_s: int) -> int:
    return -(-size_bytes * NS_PER_S // bytes_per_s)
