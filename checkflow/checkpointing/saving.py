"""A checkpoint that is asked for, and the last one of a run: durable in the end, or it is said that it is not.

However a run ends, its last completed iteration is in a checkpoint, or it is said which iterations are in none. An
error saves none: whether the loader or a generator has moved since the last step() is not known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

from checkflow.checkpointing.behind import Behind
from checkflow.checkpointing.engine import Engine
from checkflow.checkpointing.terminating import told
from checkflow.checkpointing.together import Together
from checkflow.distributed.group import Group
from checkflow.errors import InputError, StoreError
from checkflow.given import FLAG
from checkflow.interrupts import sleep
from checkflow.runtime.executor import Executor
from checkflow.store.trainer.handle import StoreHandle

DURABLE_DEADLINE_S = 600.0
CLOSE_RETRY_S = 30.0  # how long the last checkpoint is tried again, where the store does not do that by itself


def make_durable(handle: StoreHandle, what: str) -> None:
    """The newest staged checkpoint. Raises StoreError where it is not; of what nothing else was raised, `what` says."""
    if not handle.drain(DURABLE_DEADLINE_S):
        raise StoreError(f"{what}; what was told before says why")


def save(engine: Engine, group: Group | None, *, keep: bool) -> None:
    """The iteration that just ended, or was restored. Of several ranks each calls this; it ends once all have theirs.

    Raises InputError where the next one has begun, or ranks ask for different ones; StoreError where it is not durable;
    PeerError that names who has not come to it, or what another rank has failed with.
    """
    FLAG.check("save: keep", keep)
    if group is None:
        save_here(engine, keep=keep, ranks=False)
        return
    with group.telling():
        _check_alike(group.gather("save()", [engine.executor.completed, keep]))
        save_here(engine, keep=keep, ranks=True)
        patient = replace(group, deadline_s=group.deadline_s + DURABLE_DEADLINE_S)  # others may have a slower disk
        patient.gather("save()", None)


def _check_alike(said: Sequence[object]) -> None:
    """Raises InputError where ranks ask for different things; `said`: of each, the iteration and whether to keep it."""
    for rank, other in enumerate(said):
        if other != said[0]:
            raise InputError(
                f"save: is of {_asked(said[0])} on rank 0, but of {_asked(other)} on rank {rank}; call it on every "
                "rank after the same step(), with the same arguments"
            )


def _asked(said: object) -> str:
    if not isinstance(said, list) or len(said) != 2:
        return "another call"
    return f"iteration {said[0]} (keep={said[1]})"


def save_here(engine: Engine, *, keep: bool, ranks: bool) -> None:
    """This process's part of it; `ranks`: there are others. Raises as `save` does, of itself."""
    executor, handle = engine.executor, engine.handle
    if not executor.save():  # every slot is full: one is free once the newest staged one is durable
        handle.drain(DURABLE_DEADLINE_S)
        if not executor.save():
            if ranks:
                raise StoreError("save: no slot is free; call step() on every rank")
            raise StoreError("save: no slot is free; see what the saver reported, or use slots=3")
    if handle.persist_now(keep=keep) is None and keep:
        raise StoreError("save: the next checkpoint has the only slot; call it right after step()")
    make_durable(handle, f"save: iteration {executor.completed} is not durable")


def save_last(engine: Engine, notify: Callable[[str], None], store: Path, *, ranks: bool) -> None:
    """No later checkpoint makes up for the last one: what fails is told and tried again; the store raises it then.

    The first error may be of an earlier checkpoint, and just not have been told.
    """
    pause_s, until, once = 0.0, time.monotonic() + CLOSE_RETRY_S, cache(notify)
    while True:
        with told(StoreError, once, store):
            engine.executor.drain()  # what is in flight may not be what it should, and is then in no checkpoint
            if engine.executor.unsaved:
                save_here(engine, keep=False, ranks=ranks)
            if engine.handle.drain(DURABLE_DEADLINE_S):
                if ranks and (rulings := engine.handle.rulings) is not None:
                    rulings.await_mirror(DURABLE_DEADLINE_S)  # which is to have it when this rank's machine has gone
                return
        if engine.handle.saver_pid is None or time.monotonic() + pause_s > until:
            return
        once(f"{store}: close() tries the last checkpoint again, for up to {CLOSE_RETRY_S:g} s")
        sleep(pause_s)
        pause_s = 2 * pause_s or 0.5


@contextmanager
def telling_lost(executor: Executor, notify: Callable[[str], None], store: Path, how: str) -> Iterator[None]:
    """Inside, the training is let go; `how`. Iterations that are in no checkpoint then are told.

    Not where a restore was to replace them, or step() has raised just now why there is no checkpoint.
    """
    is_replaced = executor.lifecycle.refusal is not None
    try:
        yield
    finally:
        newest, completed = executor.newest, executor.completed
        if newest < completed != executor.raised_for and not is_replaced:
            several = f"iterations {newest + 1} to {completed} are"
            what = f"iteration {completed} is" if newest + 1 == completed else several
            before = f"the one before is of iteration {newest}" if newest else "there is none before"
            notify(
                f"{store}: {how}: {what} in no checkpoint, {before}; call save() or close() right after the step() "
                "that is the last"
            )


def end(
    engine: Engine,
    together: Together | None,
    behind: Behind | None,
    notify: Callable[[str], None],
    store: Path,
    left_by: str | None,
) -> None:
    """The training ends: its last iteration becomes durable, unless `left_by` says what it was left by; all is let go.

    All of it is done, whatever goes wrong in one of the steps, and whichever of their waits is interrupted.
    """
    completed = engine.executor.completed
    with ExitStack() as last:
        if behind is not None:  # last: ranks need not wait for each other's uploads
            last.callback(behind.close, 0.0 if left_by else DURABLE_DEADLINE_S)
        if together is not None:  # which is complete only where nothing went wrong
            last.push(lambda kind, *_: together.close(completed, kind.__name__ if kind else left_by))
        last.callback(lambda: engine.handle.close(DURABLE_DEADLINE_S))
        last.enter_context(telling_lost(engine.executor, notify, store, left_by or "close"))
        last.callback(engine.close)
        if left_by is None:
            save_last(engine, notify, store, ranks=together is not None)
