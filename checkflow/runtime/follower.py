"""An iteration runs: at each anchor what is planned up to it, at each guard whatever is still missing.

No decision here depends on a predicted time. A checkpoint is staged only when every byte of it was read before its
tensor's next write; where hooks fire at other moments than planned, or not at all, training waits longer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from checkflow.errors import InputError
from checkflow.events import Skipped
from checkflow.runtime.audit import Audit
from checkflow.runtime.binding import Binding, BoundStorage
from checkflow.runtime.bound import Bound
from checkflow.runtime.compiled import has_cuda_graphs
from checkflow.runtime.counters import Cause, Counters
from checkflow.runtime.device import Device
from checkflow.runtime.firings import Firings
from checkflow.runtime.guards import CAUSES, Guard, GuardKind, changes
from checkflow.runtime.lifecycle import Inside, Lifecycle, Phase
from checkflow.runtime.parts import Parts
from checkflow.runtime.pipeline import Pipeline, Record
from checkflow.runtime.settings import Settings
from checkflow.runtime.sink import Sink
from checkflow.runtime.timetable import timetables_of
from checkflow.runtime.update import Update
from checkflow.runtime.without_update import WithoutUpdate
from checkflow.schedule import Schedule
from checkflow.state.names import StateName
from checkflow.training import Training

_LOG = logging.getLogger("checkflow")


class Follower:
    """An iteration, as hooks tell of it in whatever thread they run.

    Args:
        schedule: what to follow.
        training: the live models and optimizers; `iteration` is not called.
        binding: of both, as `bind` made it.
        device: copies.
        sink: takes whole checkpoints.
        capture: reads the host's state when an iteration ends, and returns what makes a record of it.
        settings: of the user.
        late: tensors, by target, that were found when `capture` was called; they are copied before step() returns.
        tell: told, in one line, what is slower than planned.
        inside: entered while this works.
        note: takes note, in whatever thread, of a due iteration that has no checkpoint.
        parting: makes what is asked where checkpoints are filled in several iterations; without it none is.
    """

    def __init__(
        self,
        schedule: Schedule,
        training: Training,
        binding: Binding,
        device: Device,
        sink: Sink,
        capture: Callable[[int], Record],
        counters: Counters,
        settings: Settings,
        *,
        late: Callable[[], Mapping[StateName, torch.Tensor]] = dict,
        tell: Callable[[str], None] = _LOG.warning,
        inside: Inside | None = None,
        note: Callable[[Skipped], None] = lambda _: None,
        parting: Callable[[Bound, Pipeline], Parts] | None = None,
    ) -> None:
        self.interval = settings.interval or schedule.interval  # iterations from one checkpoint to the next
        self._first_interval = self.interval  # which other ranks know of
        timetables = timetables_of(schedule, device.few_bytes)
        self.timetable = timetables[0]  # what all have in common
        # Iterations from a checkpoint's own to the end of that in which it is staged, where this waits for late copies.
        self.lag = max(self.interval, *(each.last_iteration + 1 for each in timetables))
        self.firings = Firings(self.timetable)
        self._planned = self.timetable.used != {self.timetable.anchor_count}  # something before an iteration's end
        self.pipeline = Pipeline(
            timetables, binding, device, sink, capture, counters,
            keep_early=GuardKind.REWRITE in settings.disarmed, late=late, note=note, tell=tell,
        )  # fmt: skip
        self._problems = self.pipeline.problems
        self.completed = 0  # iterations
        self.inside = inside or Inside()
        self.lifecycle = Lifecycle(Phase.FILLING if settings.audit or self.interval == 1 else Phase.IDLE)
        self.awake = self.lifecycle.phase is Phase.FILLING  # as hooks ask for it
        self.listens = self.awake and self._planned  # something is done at anchors, or waits to be staged at one
        self.touched = False  # something ran since the last iteration ended
        self.ending = False  # its end is counted, and not followed yet
        self.bound = Bound(schedule, training, binding, self.pipeline, device, tell)
        self.pipeline.vouched_by.append(self.bound.vouch)
        self.without_update = WithoutUpdate(training, tell)
        rebuilds = self.timetable.parts > 1 or self.timetable.lanes > 1
        self.parts = parting(self.bound, self.pipeline) if parting and rebuilds else None
        self.pipeline.parts_allowed = self.parts is not None
        self._device = device
        self._sink = sink
        self._counters = counters
        self._settings = settings
        self._disarmed = settings.disarmed  # asked for at each guard
        self._armed = () if settings.disarmed else (GuardKind.OPTIMIZER, GuardKind.FORWARD)
        self._audit = Audit() if settings.audit else None
        self._updates: list[Update] = []
        self._anchor = 0  # reached in the running iteration

    def reach(self, kind: str, subject: str) -> None:
        """An anchor fires."""
        started = time.perf_counter_ns()
        if self.lifecycle.deaf or self._captured():
            return
        self.touched = True
        if self.listens:
            number = self.firings.fire(kind, subject)
            if number is None or number <= self._anchor:
                return
            if number in self.timetable.used or self.pipeline.waiting:
                with self._entered():
                    self._advance(self.completed + 1, number)
                return
            self._anchor = number
        self._counters.issue_ns += time.perf_counter_ns() - started  # little, but the training's time

    def guard(self, guard: Guard) -> None:
        """What this guard covers is about to be written."""
        if self.lifecycle.deaf or self._captured():
            return
        guard.fired = guard.ever = self.touched = True
        if guard.kind in self._disarmed:
            return
        in_step = self.inside.depth > 0  # where a user's state_dict() may write what is not in flight yet
        with self._entered():
            self.bound.fires(guard)
            if self.awake and (self.pipeline.busy or in_step or self._audit is not None):
                if self._audit is not None:
                    self._audit.check(guard.now)
                self.pipeline.protect(guard.now, CAUSES[guard.kind])
                self._wrote(guard.now, guard.kind)
            else:  # only what slots hold from before may go stale
                self._wrote(guard.unplanned, guard.kind)

    def write(self, storages: tuple[BoundStorage, ...]) -> None:
        """A function inside an update is about to write these."""
        started = time.perf_counter_ns()
        if self.lifecycle.deaf or self._captured() or GuardKind.OPTIMIZER in self._disarmed:
            return
        if self.awake and (self.pipeline.busy or self._audit is not None):
            with self._entered():
                if self._audit is not None:
                    self._audit.check(storages)
                self.pipeline.protect(storages, Cause.OPTIMIZER)
        else:
            self._counters.issue_ns += time.perf_counter_ns() - started
        for storage in storages:
            storage.epoch += 1  # not every function counts its writes: on CUDA _foreach_lerp_ does not

    def give_up(self) -> None:
        """State that is being read was written unseen."""
        self.pipeline.doubt()

    def wrote(self, storages: tuple[BoundStorage, ...], kind: GuardKind) -> None:
        """They may have been written until now: what was copied at an anchor since their guard may be older."""
        if not self.lifecycle.deaf:
            self._wrote(storages, kind)

    def made(self, number: int) -> None:
        """Optimizer `number` has made an update, and no other hook has run since."""
        if self.parts is not None and self.awake and not self.lifecycle.deaf:
            with self._entered():
                self.parts.made(number)

    def updated(self, number: int) -> None:
        """Optimizer `number` has made an update. Raises InputError if state is still absent after the first."""
        self.without_update.updated()
        if self.bound.binding.absent and not self.lifecycle.deaf and not self._settings.learns:
            if self.bound.is_stale:
                self.rebind()
            self.bound.check_updated(number)

    def consumes(self, number: int, arguments: tuple[object, ...]) -> None:
        """Optimizer `number` makes an update next, of gradients that are as it consumes them."""
        if self.parts is not None and self.awake and not self.lifecycle.deaf and not self._captured():
            with self._entered():
                self.parts.consumes(self.completed + 1, number, arguments)

    def factored(self, name: str, gradient: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor]) -> None:
        """The gradient of a parameter was made of these factors."""
        if self.parts is not None and self.awake and not self.lifecycle.deaf and not self._captured():
            with self._entered():
                self.parts.factored(self.completed + 1, name, gradient, factors)

    def consult(self, update: Update) -> None:
        """One that asks before anything is staged whether state was written unseen."""
        self._updates.append(update)
        self.pipeline.vouched_by.append(update.vouch)

    @property
    def follows_updates(self) -> bool:
        """Whether it may matter when inside an update something is written, or an anchor is reached."""
        return self.listens and not self._captured()

    @property
    def acts_in_updates(self) -> bool:
        """Whether it does in the one that begins."""
        return self.timetable.acts_in_updates or bool(self.pipeline.waiting)

    def rebind(self) -> None:
        """Find the tensors anew. Raises InputError where they are not those of a schedule that was given."""
        if self.lifecycle.deaf:
            return
        try:
            self._rebind()
        except InputError:
            if not self._settings.learns:  # else step() takes other slots, or raises it
                raise

    def compiling(self) -> None:
        """Code is being compiled that may write state without a hook: nothing may be pending when it runs."""
        if self.lifecycle.deaf:
            return
        with self._entered():
            self.bound.opaque = True
            self.bound.distrust()
            self.pipeline.protect(self.bound.storages, Cause.UNWATCHED)
            self.bound.unseen()

    def look_for_graphs(self) -> None:
        """Where there are CUDA graphs, their replays may write state and gradients without a hook or a count."""
        if has_cuda_graphs():
            self.compiling()
            self._refuse_parts()

    # Inside

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """All that works on checkpoints: a signal waits until it is left, and operators within are no training's."""
        with self.inside:
            started = time.perf_counter_ns()
            try:
                yield
            except BaseException:
                self._break()
                raise
            finally:
                self.listens = self.awake and bool(self._planned or self.pipeline.waiting)
                if self.inside.depth == 1:
                    self._counters.issue_ns += time.perf_counter_ns() - started

    def _to(self, phase: Phase, refusal: str | None = None) -> None:
        self.lifecycle.to(phase, refusal)
        self.awake = phase is Phase.FILLING
        self.listens = self.awake and bool(self._planned or self.pipeline.waiting)

    def _break(self) -> None:
        """Something left undone what belongs together."""
        if self.lifecycle.phase in (Phase.IDLE, Phase.FILLING):
            self._to(Phase.BROKEN)
            self._mend()

    def _mend(self) -> None:
        """After an interruption nothing that was in flight, or lies in a slot, can be vouched for."""
        if self.lifecycle.phase is Phase.BROKEN:
            self.pipeline.discard_all()

    def _rebind(self) -> None:
        found = self.bound.find()
        with self._entered():
            self.bound.take(found)

    def _captured(self) -> bool:
        """Whether a CUDA graph is being recorded. Its replays will write without hooks."""
        if not self._device.capturing():
            return False
        self.bound.opaque = True
        self.bound.distrust()  # a guard that fired before will not fire before a replay
        self.pipeline.drop_unissued()
        self.bound.unseen()
        self._refuse_parts()
        return True

    def _refuse_parts(self) -> None:
        if self.parts is not None and not self.parts.refused:
            self.parts.refuse("CUDA graphs may write gradients before they have left")

    def _advance(self, running: int, anchor: int) -> None:
        self._anchor = anchor
        self.pipeline.advance(running, anchor, due=self._due(running))

    def _due(self, running: int, interval: int | None = None) -> int | None:
        """The checkpoint that iteration `running` ends, or is a part of, at this interval or that of now."""
        interval = interval or self.interval
        due = -(-running // interval) * interval
        return due if due - running < self.timetable.parts else None

    @staticmethod
    def _wrote(storages: Iterable[BoundStorage], kind: GuardKind) -> None:
        for storage in storages:
            if changes(storage, kind):
                storage.epoch += 1
