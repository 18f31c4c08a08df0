"""Attach a training to its schedule and its store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from checkflow.about import Run
from checkflow.checkpointing import arguments, voices
from checkflow.checkpointing.adapting import Adapting
from checkflow.checkpointing.attached_twice import refusing
from checkflow.checkpointing.behind import bucket_behind
from checkflow.checkpointing.behind_one import BehindOne
from checkflow.checkpointing.behind_ranks import BehindRanks
from checkflow.checkpointing.checkpointer import Checkpointer
from checkflow.checkpointing.engine import Engine
from checkflow.checkpointing.fitting import Fitting, fit, kept_still
from checkflow.checkpointing.listing import carried, missing, unplanned, untaken
from checkflow.checkpointing.pacing import Pacing
from checkflow.checkpointing.together import Together, kind_of
from checkflow.collector import paused_collector
from checkflow.distributed.group import DEADLINE_S, Group, not_met
from checkflow.errors import AuditError, CorruptStoreError, StoreError
from checkflow.events import Event
from checkflow.extra import Stateful
from checkflow.interrupts import held_back
from checkflow.learning.kept import FOLDER
from checkflow.learning.learner import Learner
from checkflow.learning.messages import IN_PARTS
from checkflow.runtime.lifecycle import Inside
from checkflow.runtime.settings import Settings
from checkflow.schedule import Schedule, read_schedule
from checkflow.state.host.objects import HostObjects
from checkflow.state.live import live_state
from checkflow.state.refused import check_supported
from checkflow.state.shards import give_back_gathered
from checkflow.store.both.retry import RETRY_S
from checkflow.store.format.reader import Checkpoint, checkpoint_names, newest
from checkflow.store.format.retention import Retention
from checkflow.store.memory.trainer_slots import WhenFull
from checkflow.store.trainer.delivery import OnError
from checkflow.store.trainer.handle import StoreHandle
from checkflow.store.trainer.keep import keep
from checkflow.store.trainer.persist_every import PersistEvery
from checkflow.streams import open_closed
from checkflow.training import Training
from checkflow.units import format_bytes
from checkflow.unlisted import Unlisted

SIGTERM_DEADLINE_S = 20.0
CLOSE_S = 5.0  # after attaching failed: nothing is to be written


@paused_collector()
def attach(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    store: str | Path,
    bucket: str | None = None,
    schedule: Schedule | str | Path | None = None,
    scheduler: Stateful | Sequence[Stateful] | None = None,
    scaler: Stateful | Sequence[Stateful] | None = None,
    loader: Stateful | Sequence[Stateful] | None = None,
    generators: Mapping[str, torch.Generator] | None = None,
    extra: Mapping[str, object] | None = None,
    metadata: Mapping[str, object] | None = None,
    policy: str | None = None,
    approximate: bool = False,
    interval: int | None = None,
    overhead: float | None = None,
    slots: int = 3,
    when_full: WhenFull = "skip",
    persist_every: PersistEvery = PersistEvery(),  # noqa: B008 (frozen)
    retention: Retention = Retention(),  # noqa: B008 (frozen)
    on_error: OnError = "raise",
    retry_s: float = RETRY_S,
    start_over: bool = False,
    sigterm_deadline_s: float | None = SIGTERM_DEADLINE_S,
    audit: bool = False,
    notify: Callable[[str], None] = voices.warn,
    tell: Callable[[str], None] = voices.to_stderr,
    on_event: Callable[[Event], object] | None = None,
    config: object = None,
    dataset: str | None = None,
    peers_deadline_s: float = DEADLINE_S,
    replicate: int = 0,
) -> Checkpointer:
    """Checkpoint a training: by a schedule that it learns, or by one that was compiled.

        with checkflow.attach(model, optimizer, store="checkpoints") as ckpt:
            for i in range(ckpt.restore(), n):
                ...
                ckpt.step()

    Args:
        model: one, or all of them, in the order in which they were traced; uncompiled or compiled.
        optimizer: one, or all of them.
        store: directory of the checkpoints; made if it does not exist. One trainer writes to it at a time. A path that
            begins with ~ is refused, here and by the command: only a shell puts the home directory there.
        bucket: URL of objects behind the store, "s3://bucket/prefix": the newest checkpoint on disk is uploaded to it
            beside training, and restore() takes the newest from there where the disk has none, or an older one. Of
            several processes each uploads its part. Needs `checkflow[bucket]`; credentials come from the environment.
        schedule: compiled for this training, or the path of its file. Without one it is learned: an iteration is
            recorded and planned in another process, and until then all of the state is read when an iteration ends.
            What was learned is kept in the store for the next start, and learned anew where training changes.
        scheduler: one LR scheduler or a sequence of them; likewise `scaler` (GradScaler) and `loader`, which has to
            know its position: checkflow.ResumableLoader or torchdata's StatefulDataLoader.
        generators: the user's own random generators, by name.
        extra: what else the training carries from one iteration to the next, by name: {"ema": ema, "batch": held}.
            A module or a tensor, which is to be changed in place; a dict, whose tensors may be others each time, so
            that a loop keeps there what it replaces; checkflow.Variables of a script; or any object with state_dict and
            load_state_dict. Of any size.
        metadata: the user's own JSON; read anew for each checkpoint. `Checkpointer.metadata` is what was restored.
        policy: by which a schedule is learned: "checkflow", the default; "rolling" or "lowdiff", which have a
            checkpoint after each iteration also where the link cannot carry the state in one; "checkfreq", which copies
            it on the device first, all that compiled updates and CUDA graphs then wait for; others of `compile`'s.
        approximate: with "lowdiff_plus", whether what the host's updates make may differ from the training's state in
            the last bits, as it does from a GPU's. How far is measured, told, and in each checkpoint.
        interval: iterations from one checkpoint to the next; the schedule's unless given, or the fewest that the link
            allows where it is learned. A schedule that pauses where the next checkpoint begins is for its own alone.
        overhead: share of the time without checkpoints for which training may wait for them, 0.05 for 5%. Where it
            waits for longer the interval grows until that is kept to, and shrinks back when they cost less again.
        slots: checkpoints that host memory holds: 3 to fill, keep and persist at once, or 2. With 1 each is on disk,
            whatever `persist_every` says, before the next is begun: least memory, and least lost with the machine.
        when_full: where no slot is free, "skip" this checkpoint or "wait" until one is.
        persist_every: how often a staged checkpoint is written to disk.
        retention: which checkpoints stay on disk.
        on_error: "raise" at a step() within a second what went wrong in the background and breaks a promise, or "warn"
            and train on.
        retry_s: how long a checkpoint that the disk refuses is tried again before that breaks one; `notify` is told
            when this begins and ends. So long does a saver try, too, whose trainer was killed.
        start_over: begin anew in a store that holds checkpoints. `restore()` then returns 0, and the newest of those
            that verifies is retained for good. Without it the first step() is refused until something was restored.
        sigterm_deadline_s: time from SIGTERM to what it would have done otherwise, which ends the process by default.
            Before that the last completed iteration is made durable; where none of its checkpoints was due, the next
            step() is waited for. None: leave SIGTERM.
        audit: look for writes that no guard sees, by samples; costs a synchronization for each iteration. What the
            traced iteration carries and nothing lists is an error then.
        notify: told, in one line, what a person should see to; a warning by default.
        tell: told, in one line, what is done, was restored or is waited for; on stderr by default.
        on_event: called with each checkflow.Event, on this thread, before step(), restore(), save() and close() return.
            What it raises is raised there once, costs no checkpoint, and ends its calls.
        config: what the run was configured with, any JSON value; each checkpoint has it, and its digest. A resume with
            another one is told in the log.
        dataset: identifier of the data, likewise.
        peers_deadline_s: how long the other processes of a training in several (torchrun) are waited for, at attach and
            in restore().
        replicate: 1: of a training in several processes each rank's checkpoints also go to the memory of another
            machine, over the network, and count once they are there: it may be lost as a process may be killed.

    Raises:
        InputError: the training is not what the schedule was compiled for, or cannot be checkpointed; the first
            difference is named.
        StoreError: the store is in use or cannot be used, or memory does not suffice.
        AuditError: with `audit`, the iteration carries what no checkpoint would have.
        DeviceError: CUDA refuses to pin the slots.
        PeerError: another process of the training was not there by the deadline, attached otherwise, or has failed.
    """

    open_closed()  # before all that it opens, sockets to other ranks too
    group = Group.here(arguments.deadline_of(peers_deadline_s))  # first: what one rank is refused the others hear
    with contextlib.nullcontext() if group is None else group.telling(for_good=True), refusing(model, store):
        arguments.check_given(locals())
        root = arguments.first(store, peers_deadline_s)
        objects_behind = bucket_behind(root, bucket)
        warn, told = voices.Voice(notify), voices.Voice(tell)  # each rank says for itself what it waits for
        together = Together.of(group, root, voices.to_stderr, voices.Hearers(warn, told), objects_behind)
        store = Path(store) if together is None else together.store
        place = store.absolute()  # whoever changes the working directory later does not move it
        tell = told if together is None or together.is_first else _untold

        def say(line: str) -> None:
            tell(f"{store}: {line}")

        def say_warning(line: str) -> None:
            warn(f"{store}: {line}")

        training = Training(model, optimizer, _no_iteration, {} if extra is None else extra)
        check_supported(training)
        interval, slots = arguments.counts(interval, slots)
        retry_s, sigterm_deadline_s = arguments.times(retry_s, sigterm_deadline_s)
        if schedule is not None and not isinstance(schedule, Schedule):
            schedule = read_schedule(Path(schedule))
        arguments.check_arguments(
            schedule,
            together,
            training,
            policy=policy,
            interval=interval,
            overhead=overhead,
            slots=slots,
            on_event=on_event,
            replicate=replicate,
            approximate=approximate,
        )
        if together is not None:
            settled: dict[str, object] = {
                "schedule": None if schedule is None else kind_of(schedule, training),
                "policy": policy,
                "interval": interval or (None if schedule is None else schedule.interval),
                "slots": slots,
                "when_full": when_full,
                "persist_every": str(persist_every),
                "start_over": start_over,
                "replicate": replicate,
                "bucket": bucket,
            }
            together.group.same("attach()", settled)
            interval = interval or 1 if schedule is None else interval  # a learner finds one by itself, each its own
            training = together.divide(training, schedule, warn, in_parts=policy in IN_PARTS)
        give_back_gathered(training.models)
        live_state(training)  # what has no shape is refused here, before anything asks for that

        lacking = set[str]()  # what was told

        def lacks(found: Iterable[Unlisted], schedule: Schedule | None = None) -> None:
            for line in missing(found, training.listed, lacking, scaler=scaler is not None, schedule=schedule):
                if audit:
                    raise AuditError(f"audit: {line}")
                warn(line)

        objects = HostObjects.of(
            scheduler=scheduler,
            scaler=scaler,
            loader=loader,
            generators=generators,
            metadata=metadata,
            extra=training.listed,
            run=Run(config, dataset),
            member=None if together is None else together.member,
        )

        def open_store(fitting: Fitting, *, after: StoreHandle | None = None) -> StoreHandle:
            return StoreHandle.open(
                place,
                fitting.layouts,
                after=after,
                slots=slots,
                when_full=when_full,
                record_room_bytes=fitting.host.room_bytes(),
                persist_every=persist_every,
                retention=retention,
                on_error=on_error,
                retry_s=retry_s,
                notify=warn,
                tell=told,
                peers=None if together is None else together.agreement,
                replica=fitting.schedule.replica,
            )

        inside, learner = Inside(), None
        settings = Settings(
            interval, wait_when_full=when_full == "wait", approximate=approximate, audit=audit, learns=schedule is None
        )
        with contextlib.ExitStack() as undo:
            if together is not None:
                undo.callback(together.close)
            with held_back(sigterm=False):
                if schedule is None:
                    by, why = arguments.learned_by(policy, training)
                    if why:
                        say(why)
                    learner = Learner(training, place, interval, by, lambda: inside.depth > 0, say, say_warning, lacks)
                    undo.callback(learner.close)
                    planned = kept_still(learner, training, objects, slots)
                    if planned and planned.schedule.policy != by:
                        say(
                            f"policy {by!r} could not be followed in an earlier run, so it is "
                            f"{planned.schedule.policy}'s; remove {FOLDER} from the store to try again"
                        )
                    fitting = planned or fit(learner.provisional(), training, objects)
                else:
                    fitting = planned = fit(schedule, training, objects)
                    if what := unplanned(schedule, training.listed):
                        warn(
                            f"{what}, so read when each iteration ends, which training waits for; to have it planned, "
                            "list it in Training(extra={...}) and compile again"
                        )
                lacks(carried(fitting.schedule), fitting.schedule)
                for beside in (*untaken(training, objects.objects), *not_met()):
                    warn(beside)
                handle = open_store(fitting)
                undo.callback(_close, handle)
                behind: BehindOne | BehindRanks | None = None
                if objects_behind is not None:
                    hearers = voices.Hearers(warn, tell)
                    if together is None:
                        behind = BehindOne(objects_behind, handle.path, hearers, start_over=start_over)
                        behind.start(handle, retention, retry_s)
                    else:
                        behind = together.put_behind(objects_behind, handle.path, hearers, start_over=start_over)
                        behind.start(handle, slots, retention, retry_s)
                    undo.callback(behind.close, 0.0)
                engine = Engine(training, objects, fitting, handle, open_store, settings, store, inside, warn)
                undo.callback(engine.close)
                advises = policy is None and interval is None and overhead is None and together is None and slots > 1
                checkpointer = Checkpointer(
                    engine,
                    training,
                    objects,
                    store,
                    None if learner is None else Adapting(engine, learner, training, objects, say, advises=advises),
                    None if overhead is None else Pacing(engine, overhead),
                    together,
                    behind,
                    start_over=start_over,
                    sigterm_deadline_s=sigterm_deadline_s,
                    notify=warn,
                    tell=tell,
                    said=(warn, told),
                    on_event=on_event,
                )
                undo.push(checkpointer.__exit__)
            marks = () if together is None else together.begin()
            if replicate and together is not None:
                together.mirror(handle)
            if start_over:
                earlier = (
                    (lambda: newest(handle.path).checkpoint) if together is None else (lambda: together.part_of(marks))
                )
                _keep_earlier(handle.path, earlier, warn, tell)
                if together is not None:
                    together.keep_stored()
            size_bytes = sum(layout.size_bytes for layout in planned.layouts) if planned else None
            tell(f"{store}: {_plan(engine.interval, size_bytes, slots, persist_every)}")
            warn.attached()
            told.attached()
            undo.pop_all()
        return checkpointer


def _close(handle: StoreHandle) -> None:
    with contextlib.suppress(StoreError):  # the error to raise is the one that there is
        handle.close(CLOSE_S)


def _keep_earlier(
    store: Path,
    earlier: Callable[[], Checkpoint | None],
    notify: Callable[[str], None],
    tell: Callable[[str], None],
) -> None:
    """The newest checkpoint of the run that is not resumed, before this one has any that could take its place."""
    if not checkpoint_names(store):
        return
    try:
        kept = earlier()
    except CorruptStoreError as error:
        notify(f"{store}: starts over; nothing of what it holds is kept ({error})")
        return
    if kept is None:
        notify(f"{store}: starts over; nothing of what it holds is kept (no checkpoint is one that every rank has)")
        return
    keep(kept)
    tell(f"{store}: starts over; {kept.path.name} is retained for good")


def _plan(interval: int, size_bytes: int | None, slots: int, every: PersistEvery) -> str:
    """ "a checkpoint every iteration, 1.40 GiB, durable each 30 s"; of no size where the schedule is to be learned."""
    often = "every iteration" if interval == 1 else f"every {interval} iterations"
    durable = f"durable {'at once' if slots == 1 else every.in_words()}"
    if size_bytes is None:
        return f"a checkpoint {often}, {durable}; learns its schedule as training goes"
    return f"a checkpoint {often}, {format_bytes(size_bytes)}, {durable}"


def _untold(_line: str) -> None:
    """What is the same on every rank is told by the first."""


def _no_iteration() -> None:
    """Attached trainings are run by the user."""
