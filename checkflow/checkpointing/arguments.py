"""What attach is given and cannot be done: refused before anything is opened."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import get_args

from checkflow.checkpointing.together import Together
from checkflow.distributed.group import DEADLINE_S
from checkflow.errors import InputError, shown
from checkflow.given import FLAG, PATH, Kind, check_kinds, check_path, check_word
from checkflow.learning.messages import DEFAULT_POLICY, IN_LANES, IN_PARTS, POLICIES, REPLICATED
from checkflow.schedule import Schedule, complaints
from checkflow.store.format.retention import Retention
from checkflow.store.memory.trainer_slots import WhenFull
from checkflow.store.trainer.delivery import OnError
from checkflow.store.trainer.persist_every import PersistEvery
from checkflow.training import Training
from checkflow.units import real_number, seconds_to_wait, whole_number
from checkflow.workdir import absolute
from checkflow.wrapped import is_torchs_own, is_zero

_KINDS = {
    "store": PATH,
    "bucket": Kind((str,), 'a URL, "s3://bucket/prefix"', may_be_none=True),
    "schedule": Kind((Schedule, str, os.PathLike), "a schedule, or the path of its file", may_be_none=True),
    "generators": Kind((Mapping,), "a dict of generators by name", may_be_none=True),
    "metadata": Kind((Mapping,), "a dict", may_be_none=True),
    "policy": Kind((str,), "its name", may_be_none=True),
    "interval": Kind((Integral,), "a whole number", may_be_none=True),
    "overhead": Kind((Real,), "a number", may_be_none=True),
    "slots": Kind((Integral,), "a whole number"),
    "persist_every": Kind((PersistEvery,), "checkflow.PersistEvery(seconds=...) or (iterations=...)"),
    "retention": Kind((Retention,), "checkflow.Retention(last=...)"),
    "retry_s": Kind((Real,), "a number of seconds"),
    "sigterm_deadline_s": Kind((Real,), "a number of seconds", may_be_none=True),
    "peers_deadline_s": Kind((Real,), "a number of seconds"),
    "replicate": Kind((Integral, bool), "0 or 1"),
    "approximate": FLAG,
    "start_over": FLAG,
    "audit": FLAG,
    "notify": Kind((Callable,), "a function of one line"),  # type: ignore[arg-type]
    "tell": Kind((Callable,), "a function of one line, lambda line: None for silence"),  # type: ignore[arg-type]
}
_WORDS = {"when_full": get_args(WhenFull), "on_error": get_args(OnError)}


def check_given(given: Mapping[str, object]) -> None:
    """Raises InputError for the first of attach's arguments, by name, that is nothing that it can be."""
    check_kinds(_KINDS, given)
    for name, words in _WORDS.items():
        check_word(name, given[name], words)
    if isinstance(given["schedule"], (str, os.PathLike)):
        check_path("schedule", given["schedule"])


def deadline_of(peers_deadline_s: object) -> float:
    """For how long others are waited for: as given, or as if nothing was where that is refused once they are met."""
    try:
        return _time_for_peers(peers_deadline_s)
    except InputError:
        return DEADLINE_S


def first(store: str | Path, peers_deadline_s: float) -> Path:
    """Where the store is, and what other ranks need not be asked for. Raises InputError for no time, and where `store`
    is no path."""
    _time_for_peers(peers_deadline_s)
    check_store(store)
    return absolute(Path(store), "store")


def counts(interval: int | None, slots: int) -> tuple[int | None, int]:
    """As Python's own: NumPy's are not written as JSON. Raises InputError for what is more than any."""
    interval = None if interval is None else whole_number(interval, "interval", "use 1 or more")
    return interval, whole_number(slots, "slots", "use 2 or 3")


def times(retry_s: float, sigterm_deadline_s: float | None) -> tuple[float, float | None]:
    """Likewise. Raises InputError for no time."""
    retry_s = _not_negative(real_number(retry_s, "retry_s", "use 0 or more"), "retry_s")
    if sigterm_deadline_s is not None:
        name = "sigterm_deadline_s"
        sigterm_deadline_s = _not_negative(seconds_to_wait(sigterm_deadline_s, name, "use 0 or more"), name)
    return retry_s, sigterm_deadline_s


def _not_negative(seconds: float, what: str) -> float:
    if seconds < 0:
        raise InputError(f"{what}: {seconds} is negative; use 0 or more")
    return seconds


def _time_for_peers(peers_deadline_s: object) -> float:
    seconds = seconds_to_wait(peers_deadline_s, "peers_deadline_s", "use a number of seconds")
    if not seconds > 0:
        raise InputError(f"peers_deadline_s: {peers_deadline_s} is not positive; use a number of seconds")
    return seconds


def check_store(store: str | Path) -> None:
    """Raises InputError for no path, before it is made one: Path("") is the working directory."""
    text = check_path("store", store, "a directory")
    scheme, colon, _ = text.partition(":/")
    if colon and scheme.isalnum() and len(scheme) > 1:
        raise InputError(
            f"store: {text} is no directory; give one of this machine, and the bucket behind it: "
            'attach(..., store="checkpoints", bucket="s3://bucket/prefix")'
        )


def check_arguments(
    schedule: Schedule | None,
    together: Together | None,
    training: Training,
    *,
    policy: str | None,
    interval: int | None,
    overhead: float | None,
    slots: int,
    on_event: object,
    replicate: int,
    approximate: bool,
) -> None:
    """Raises InputError for the first that is no value, or does not go with the others; see attach."""
    if interval is not None and interval < 1:
        raise InputError(f"interval: {interval} is not positive; use a whole number of at least 1")
    if overhead is not None and not 0 < overhead < 1:
        raise InputError(f"overhead: {shown(overhead)} is not in (0, 1); 0.05 is 5%")
    _check_policy(policy, schedule, together, overhead, slots)
    if any(map(is_zero, training.optimizers)):
        _check_takes_zero(policy, schedule)
    if schedule is not None:
        _check_takes(schedule, interval, overhead, slots)
    if together is not None:
        _check_takes_together(schedule, overhead, slots)
    _check_replicate(replicate, together)
    if approximate and not (policy == REPLICATED if schedule is None else schedule.replica):
        raise InputError(f"approximate: is for updates that the host makes, of policy {REPLICATED!r}; leave it out")
    if on_event is not None and not callable(on_event):
        raise InputError(f"on_event: a {type(on_event).__name__} cannot be called; give a function of one event")


def learned_by(policy: str | None, training: Training) -> tuple[str, str]:
    """The policy by which a schedule is learned, and why not by the one that was asked for; "" where it is."""
    others = [each for each in training.optimizers if not is_torchs_own(each)]
    if policy not in IN_PARTS or not others:
        return policy or DEFAULT_POLICY, ""
    name = type(others[0]).__name__
    why = f"updates of {name} are none of torch's own, and could not be made again to the bit for sure"
    return DEFAULT_POLICY, f"learns by policy {DEFAULT_POLICY!r}, not {policy!r}: {why}"


def _check_policy(
    policy: str | None, schedule: Schedule | None, together: Together | None, overhead: float | None, slots: int
) -> None:
    """Raises InputError for one that there is not, or that what else is given does not go with."""
    if policy is None:
        return
    if policy not in POLICIES:
        raise InputError(f"policy: {policy!r} is none by which a schedule is learned; use {', '.join(POLICIES)}")
    if schedule is not None:
        raise InputError(
            f"policy: {policy!r} is for a schedule that is learned, and one is given ({schedule.policy}); leave it out"
        )
    if policy == REPLICATED and together is not None:
        raise InputError(f"policy: {policy!r} is for one process; use 'rolling' or 'lowdiff'")
    if policy in IN_PARTS:
        _check_takes_parts(f"policy {policy!r}", overhead, slots, lanes=policy in IN_LANES, other="leave out policy=")


def _check_takes_zero(policy: str | None, schedule: Schedule | None) -> None:
    """Raises InputError for updates that would have to be made again, of which this process makes a part."""
    if policy in IN_PARTS or (schedule is not None and (schedule.lanes > 1 or schedule.gradients)):
        which = "schedule" if policy is None else "policy"
        raise InputError(
            f"{which}: takes gradients, which no ZeroRedundancyOptimizer goes with; use policy 'checkflow'"
        )


def _check_takes_parts(which: str, overhead: float | None, slots: int, *, lanes: bool, other: str) -> None:
    """Raises InputError for what checkpoints in parts do not go with. `other`: what the user can do instead."""
    if lanes and slots == 1:
        raise InputError(
            f"slots: 1 has no room for the next checkpoint beside the newest, which {which} needs; use 2 or 3"
        )
    if overhead is not None:
        raise InputError(
            f"overhead: {which} takes its checkpoints in parts, over iterations that are as many as they were planned "
            f"for; leave it out, or {other}"
        )


def _check_takes(schedule: Schedule, interval: int | None, overhead: float | None, slots: int) -> None:
    """Raises InputError for what a schedule cannot be followed with."""
    for complaint in complaints(schedule):  # no file, which was asked when it was read
        raise InputError(f"schedule: {complaint}; compile it again")
    lanes = schedule.slot_lanes > 1
    if lanes or any(action.back for action in schedule.actions):
        other = "compile with --policy checkflow"
        _check_takes_parts("this schedule", overhead, slots, lanes=lanes, other=other)
    if interval is None or interval == schedule.interval:
        return
    if schedule.slot_lanes > 1:
        parts = "of its gradients" if schedule.replica else f"a part of it in each of {schedule.lanes}"
        raise InputError(
            f"interval: {interval}, but this schedule has a checkpoint each iteration, {parts}; leave it out, or "
            f"compile with --interval {interval}"
        )
    if _pauses_between(schedule):
        raise InputError(
            f"interval: {interval} is not the {schedule.interval} that the schedule was compiled for, after which it "
            f"pauses until a checkpoint has arrived; compile it with --interval {interval}"
        )
    if interval <= max((a.back for a in schedule.actions), default=0):
        raise InputError(
            f"interval: {interval} is less than the {schedule.interval} iterations that a checkpoint of this schedule "
            f"is taken in; compile it with --interval {interval}"
        )


def _check_takes_together(schedule: Schedule | None, overhead: float | None, slots: int) -> None:
    """Raises InputError for what a training in several processes cannot be followed with."""
    if slots == 1:
        raise InputError("slots: 1 has no room for the next checkpoint before every rank has this one; use 2 or 3")
    if overhead is not None:
        raise InputError("overhead: is not supported for several processes; give interval=, the same on each")
    if schedule is not None and schedule.replica:
        raise InputError(f"schedule: is of {REPLICATED}, which is for one process; compile with --policy rolling")
    if schedule is not None and any(row.factor_rows for row in schedule.gradients):
        raise InputError(
            "schedule: has gradients leave as their factors, and processes update by sums of them; compile with "
            "--world-size"
        )


def _check_replicate(replicate: int, together: Together | None) -> None:
    """Raises InputError for more copies than one, and where there is nobody to hold it."""
    if replicate not in (0, 1):
        raise InputError(f"replicate: {shown(replicate)} is not supported; use 0, or 1 for a copy on another machine")
    if replicate and (together is None or together.group.size == 1):
        raise InputError("replicate: 1, but this training has one process, and no other machine; leave it out")


def _pauses_between(schedule: Schedule) -> bool:
    """Whether training stands still where the next checkpoint begins, which another interval moves."""
    if schedule.pause is None or not schedule.actions:
        return False
    iteration, anchor = schedule.actions[0].offload
    return schedule.pause == (iteration + schedule.interval, anchor)
