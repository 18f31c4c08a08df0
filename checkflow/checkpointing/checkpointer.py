"""What the user holds while a training is attached."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

import torch

from checkflow.checkpointing.adapting import Adapting
from checkflow.checkpointing.behind_one import BehindOne
from checkflow.checkpointing.behind_ranks import BehindRanks
from checkflow.checkpointing.engine import Engine
from checkflow.checkpointing.first_shapes import FirstShapes
from checkflow.checkpointing.narrator import Narrator
from checkflow.checkpointing.pacing import Pacing
from checkflow.checkpointing.restoring import Nothing, iterations_in, newest_in, newest_of, overrun
from checkflow.checkpointing.resumed import Switches, doubts, event_of, of_losses, remarks
from checkflow.checkpointing.saving import end, make_durable, save
from checkflow.checkpointing.step_order import StepOrder
from checkflow.checkpointing.terminating import on_terminate, told
from checkflow.checkpointing.together import Together
from checkflow.checkpointing.voices import Voice, raise_problems
from checkflow.collector import paused_collector
from checkflow.errors import InputError, PeerError, StoreError
from checkflow.events import Doubted, Event
from checkflow.interrupts import held_back
from checkflow.learning.forgotten import Forgotten
from checkflow.runtime.executor import Executor
from checkflow.runtime.lifecycle import Phase
from checkflow.runtime.stats import Meter, Stats
from checkflow.schedule import Schedule
from checkflow.state.attached import Attached
from checkflow.state.host.computed_by import computed_by
from checkflow.state.host.objects import HostObjects
from checkflow.state.restore import restore_parsed
from checkflow.store.trainer.handle import StoreHandle
from checkflow.store.trainer.status import Status
from checkflow.training import Training
from checkflow.units import whole_number

_LOG = logging.getLogger("checkflow")


class Checkpointer:
    """An attached training; made by `attach`, closed by `with`."""

    def __init__(
        self,
        engine: Engine,
        training: Training,
        objects: HostObjects,
        store: Path,
        adapting: Adapting | None,
        pacing: Pacing | None,
        together: Together | None,
        behind: BehindOne | BehindRanks | None,
        *,
        start_over: bool,
        sigterm_deadline_s: float | None,
        notify: Callable[[str], None],
        tell: Callable[[str], None],
        said: Sequence[Voice],
        on_event: Callable[[Event], object] | None,
    ) -> None:
        self._engine = engine
        self._adapting = adapting
        self._pacing = pacing
        self._together = together
        self._behind = behind
        self._training = training
        self._objects = objects
        self._attached = Attached(training, {**objects.objects, **objects.generators}, engine.handle.path, engine.doubt)
        self._forgotten = None if adapting is not None else Forgotten(training, notify, None)
        self._switches = Switches(training)
        self._computed_by = computed_by(training)
        self._order = StepOrder(training, objects)
        self._first_shapes = FirstShapes(training)
        self._store = store
        self._notify = notify
        self._tell = tell
        self._said = said
        self._start_over = start_over
        self._owner = os.getpid()
        self._inside = engine.inside
        self._meter = Meter(engine.counters)
        self._narrator = Narrator(store, engine.events, on_event, engine.counters)
        self._closed = self._warned = False
        self._metadata: Mapping[str, object] = {}
        left = [(str(store), lambda: iterations_in([engine.handle.path]))]
        left += [] if together is None else [(str(store), together.iterations)]
        left += [] if behind is None else [(behind.url, lambda: behind.iterations)]
        if not start_over and (refused := overrun(left)):
            engine.executor.await_restore(refused)
        engine.start()
        self._order.begins()
        self._on_terminate = None
        if sigterm_deadline_s is not None:
            self._on_terminate = on_terminate(engine, behind, store, sigterm_deadline_s, notify)
        atexit.register(self._left_open)  # kept by that until closed: what a function left open is due, too

    @property
    def _executor(self) -> Executor:
        return self._engine.executor

    @property
    def _handle(self) -> StoreHandle:
        return self._engine.handle

    def restore(self, iteration: int | None = None) -> int:
        """Bring everything back to the newest checkpoint that verifies, or to that of an iteration.

        Returns how many iterations are completed: 0 for an empty store, and where this run starts over and has no
        checkpoint yet. In the middle of a run the newest is the last one that was staged; what came after the restored
        one stays in the store until newer ones take its place. Tells of checkpoints that were skipped. Raises
        CorruptStoreError where none verifies, InputError where it is of another training. Of a training in several
        processes each calls it, with the same iteration or none, else InputError; and the checkpoint is the newest of
        which every rank's part verifies. PeerError where a rank does not come to it, or has failed. Once it has begun
        to change the training and did not end, no step() is taken until another one did.
        """
        if self._forked("restore"):
            return self._executor.completed
        telling = contextlib.nullcontext() if self._together is None else self._together.group.telling()
        with self._narrated("restore"), telling:
            return self._restore(iteration)

    def _restore(self, iteration: int | None) -> int:
        if self._executor.lifecycle.phase is Phase.CLOSED:
            raise InputError("restore: is closed; attach again")
        iteration = (
            None if iteration is None else whole_number(iteration, "restore: iteration", "give how many were completed")
        )
        if self._together is not None:
            self._together.all_ask_for(iteration)
        with self._inside:
            started = time.monotonic()
            begun = self._executor.completed > 0 or self._handle.status().staged > 0
            if begun:
                with self._told(StoreError):
                    self._executor.drain()  # of several processes, what is in flight is of the attempt that ends here
                    if iteration is None or iteration not in iterations_in([self._handle.path]):
                        make_durable(self._handle, "restore: the newest iteration is not durable; an older one comes")
            elif iteration is None and self._start_over:
                return 0
            # both take memory, and this one is waited for
            with paused_collector(), self._handle.shared.restoring():
                is_here = begun and iteration in (None, *iterations_in([self._handle.path]))
                if self._together is not None:
                    found = self._together.load(iteration, self._training)
                elif isinstance(self._behind, BehindOne) and not is_here:
                    found = newest_of(self._behind, self._handle.path, iteration)
                else:
                    found = newest_in(self._handle.path, iteration)
                for skipped in found.skipped:
                    self._notify(f"{self._store}: skipped {skipped}")
                if isinstance(found, Nothing):
                    if begun:
                        raise InputError(f"restore: {self._store} has no checkpoint yet; save() one to come back to")
                    self._tell(f"{self._store}: no checkpoint yet; begins with iteration 1")
                    if self._executor.lifecycle.refusal is not None:  # for parts of what not every rank has
                        self._executor.resume(0)
                    return 0
                try:
                    restored = restore_parsed(
                        found.files, found.record, self._training, self._objects, self._begin_restore
                    )
                    if self._together is not None:
                        self._together.require_alike(self._training, restored)
                except (InputError, PeerError):
                    if self._behind is not None:
                        self._behind.take_back()
                    raise
            for line in remarks(restored, self._computed_by):
                self._notify(f"{self._store}: {line}")
            self._switches.resumed(found.record)
            self._metadata = restored.metadata
            self._objects.losses.resumed(restored.losses)
            if self._adapting is not None:
                self._adapting.restored()
            self._executor.resume(restored.iteration)
            self._handle.restored(found.checkpoint)
            if self._pacing is not None:
                self._pacing.restored()
            resumed = event_of(restored, found, time.monotonic() - started, self._objects.run, self._computed_by)
            self._tell(f"{self._store}: resumed iteration {restored.iteration} in {resumed.took}")
            self._engine.events.append(resumed)
            for line in doubts(restored.iteration, self._training, self._objects):
                self._engine.events.append(Doubted(restored.iteration, line))
            self._order.begins()
            if self._together is not None and self._together.lacks_copies():
                self._executor.save()
            return restored.iteration

    def _begin_restore(self) -> None:
        """All is checked; of several processes none changes anything before each has come as far."""
        if self._together is not None:
            self._together.fits()
        self._executor.begin_restore()

    @property
    def metadata(self) -> Mapping[str, object]:
        """The user's own JSON in the checkpoint that was restored; empty where none was."""
        return self._metadata

    def step(self, loss: float | torch.Tensor | None = None) -> None:
        """An iteration ended, its update included. Raises what went wrong in the background, within a second of it.

        `loss`: of this iteration, for the checkpoints' record; two iterations after a resume it is told whether it went
        on where it was. Nothing waits for it.

        Raises InputError where the store holds checkpoints and nothing was restored, and for a loss that is none.
        """
        try:
            executor = self._engine.executor  # until it is counted nothing is called: no handler of a signal runs
            before = executor.completed, executor.touched, executor.ending
            if executor.lifecycle.refusal is None and not self._narrator.telling:
                executor.completed, executor.touched, executor.ending = before[0] + 1, False, True
            if self._forked("step"):
                return
            with self._narrated("step"):
                if loss is not None:
                    self._objects.losses.add(loss)
                self._follow(sys._getframe(1))
        except BaseException as error:
            executor = self._engine.executor
            if isinstance(error, InputError) and executor.ending:  # refused: of the call, or of the state as it is now
                executor.completed, executor.touched, executor.ending = before
            else:
                self._leave()
            raise
        if self._adapting is not None:  # what the callback did is no part of the iteration
            self._adapting.begins(sys._getframe(1))
        elif self._forgotten is not None:
            self._forgotten.begins(sys._getframe(1))

    def _follow(self, loop: FrameType) -> None:
        """An iteration, which is counted already, has ended in this frame."""
        try:
            if self._adapting is not None and self._executor.lifecycle.refusal is None:
                with self._inside:
                    self._adapting.ended(loop)
            self._executor.step()
        finally:
            if self._on_terminate is not None and self._on_terminate.pending:
                self._leave()  # if an exception is on its way
                self._on_terminate.reached_step()
        self._meter.step()
        if self._behind is not None:
            self._behind.poll()
        if self._pacing is not None:
            self._pacing.ended()
        if (compared := self._objects.losses.compared()) is not None:
            self._engine.events.append(of_losses(self._executor.completed, compared))
        for line in (*self._switches.ended(), *self._first_shapes.ended(), *self._order.ended()):
            self._notify(f"{self._store}: {line}")
        self._narrator.ended(self._executor.completed)

    def _leave(self) -> None:
        """An exception leaves step(): what was being copied is given up if the iteration's end was not followed."""
        if self._engine.executor.leave() and self._adapting is not None:
            self._adapting.interrupted()

    @property
    def schedule(self) -> Schedule:
        """What is followed now; where nothing was learned yet, that all is read when an iteration ends."""
        return self._engine.fitting.schedule

    @property
    def learning(self) -> str:
        """What is being done for a schedule: "settling", "watching", "recording", "planning", "planned" (to be followed
        from the next `step()` on) or "knowing"."""
        return "knowing" if self._adapting is None else self._adapting.stage

    def save(self, *, keep: bool = True) -> None:
        """Checkpoint the iteration that just ended, or was restored, and return when it is durable.

        `keep`: retain it for good. Raises InputError where the next iteration has begun and this one was not saved,
        StoreError where it is not durable in the end. Of a training in several processes each calls it, after the same
        iteration, and it returns when every rank's part is durable; PeerError where a rank does not come to it within
        `peers_deadline_s`, or has failed.
        """
        if not self._forked("save"):
            with self._narrated("save"), self._inside:
                self._executor.without_update.saved()
                save(self._engine, None if self._together is None else self._together.group, keep=keep)
                if keep and isinstance(self._behind, BehindRanks):
                    self._behind.keep(self._executor.completed)

    def stats(self) -> Stats:
        """What checkpointing did and cost so far."""
        learned_in = 0 if self._adapting is None else self._adapting.learned_in
        return self._meter.stats(self._executor, self.schedule, learned_in)

    def status(self) -> Status:
        """How far the checkpoints are: staged, durable, verified."""
        return self._handle.status()

    def close(self) -> None:
        """Make the last completed iteration durable, due or not, and let the training go.

        A process that exits without it makes durable what is due, and so does this where the next iteration has begun:
        its host state has moved on. Iterations that are in no checkpoint then are told.
        """
        self._close()

    def _close(self, left_by: str | None = None) -> None:
        if self._closed or self._executor.lifecycle.phase is Phase.FORKED:
            return
        with self._narrated("close"), held_back(sigterm=False), contextlib.ExitStack() as last:
            if self._on_terminate is not None:
                last.callback(self._on_terminate.remove)
            last.enter_context(self._inside)
            self._end(left_by)
        _LOG.info("%s: %s", self._store, self.stats())

    def _left_open(self) -> None:
        """The process exits. What is due becomes durable; nobody knows whether the loader is ahead of it.

        A thread that copies must not be there any more when the interpreter ends it.
        """
        with self._told(Exception, "exit: "):
            self._close("exit")
        raise_problems(self._said)

    def _end(self, left_by: str | None) -> None:
        with contextlib.ExitStack() as last:
            last.callback(self._ended)
            last.callback(end, self._engine, self._together, self._behind, self._notify, self._store, left_by)
            self._order.remove()
            self._attached.end()
            if self._adapting is not None:
                self._adapting.close()

    def _ended(self) -> None:
        """Only now is it closed: where something got in the way of the steps themselves, close() takes them again."""
        self._closed = True
        atexit.unregister(self._left_open)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._close()
        else:  # it is the one to raise; and the loader may be ahead of the last iteration
            with self._told(Exception):
                self._close(f"left by {type(error).__name__}")
            raise_problems(self._said)

    def _told(self, kind: type[Exception], what: str = "") -> contextlib.AbstractContextManager[None]:
        """What goes wrong inside is told, not raised."""
        return told(kind, self._notify, self._store, what)

    @contextlib.contextmanager
    def _narrated(self, call: str) -> Iterator[None]:
        """What happened until the inside ended is told then; an error of the inside goes before one of the callback.

        In a forked child nothing is. Raises InputError where the callback, or a signal's handler, made this call: it is
        inside another one.
        """
        if self._executor.lifecycle.phase is Phase.FORKED:
            yield
            return
        if self._narrator.telling:
            raise InputError(f"{call}: on_event called it, inside another call; do that in the training loop")
        self._inside.refuse(call)
        try:
            yield
        except Exception as error:
            self._narrator.failed(self._executor.completed, error)
            with self._told(InputError):
                self._narrator.tell()
            raise
        if self._engine.events:
            self._narrator.tell()
        raise_problems(self._said)

    def _forked(self, call: str) -> bool:
        """Whether this is a child's copy, which is told once that its calls do nothing."""
        if self._executor.lifecycle.phase is not Phase.FORKED:
            return False
        if not self._warned:
            self._warned = True
            self._notify(
                f"{self._store}: {call}() does nothing in a forked process; the checkpoints are those of process "
                f"{self._owner}, which attached"
            )
        return True
