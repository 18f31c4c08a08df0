"""Follows a schedule: what `follower` does in an iteration, and between two of them: the next checkpoint begins.

There the user may save, restore, or end.
"""

from __future__ import annotations

import time

from checkflow.errors import InputError
from checkflow.runtime.counters import Cause
from checkflow.runtime.firings import Firings
from checkflow.runtime.follower import Follower
from checkflow.runtime.guards import GuardKind
from checkflow.runtime.lifecycle import Phase


class Executor(Follower):
    """Called by the user, too, between iterations."""

    raised_for = -1  # the iteration for which step() raised what a checkpoint failed with
    _restored = -1  # iteration
    _paced: int | None = None  # the interval from the next checkpoint on

    def step(self) -> None:
        """An iteration ended: its state is the next checkpoint's, if one is due.

        It is counted here, unless whoever asks has done so. Raises what cost a checkpoint since, and InputError where
        the state is that of no iteration.
        """
        if self.lifecycle.refusal is not None:
            raise InputError(f"step: {self.lifecycle.refusal}")
        if not self.ending:
            self.completed, self.touched, self.ending = self.completed + 1, False, True
        try:
            self._follow()
        except BaseException:
            self.leave()
            raise
        self._sink.poll()

    def _follow(self) -> None:
        if not self.bound.opaque:  # else updates may be made without hooks
            self.without_update.ended()
        before = self.completed - 1
        if self._lacks(before) and before % self._first_interval == 0:  # read as a whole, it is not due each time
            self._sink.pass_over(before)
        is_due = self.completed % self.interval == 0
        interval = self._paced if is_due and self._paced else self.interval
        next_is_due = self._due(self.completed + 1, interval) is not None
        if self.awake or is_due or next_is_due:
            with self._entered():
                self._end(interval, next_is_due=next_is_due)
            if self._problems:
                self.raised_for = self.completed
                raise self._problems.pop(0)
        else:
            started = time.perf_counter_ns()
            self._device.check()
            self._device.collect()
            self.ending = False
            self._counters.issue_ns += time.perf_counter_ns() - started

    def leave(self) -> bool:
        """An exception leaves step(). Whether it does so before the iteration's end was followed: then nothing that is
        in flight can be vouched for."""
        if not self.ending:
            return False
        with self.inside:
            self._break()
            self.ending = False
        return True

    def pace(self, interval: int) -> None:
        """Another interval, from the end of the next iteration on that a checkpoint is due at: hooks know of that."""
        self._paced = interval

    def await_restore(self, refusal: str) -> None:
        """No step is taken before `resume`; `refusal` says why."""
        self._to(Phase.RESTORING, refusal)

    def begin_restore(self) -> None:
        """The state is about to be written: all that reads it ends first. Until `resume` it is that of no iteration."""
        with self._entered():
            self._mend()
            self.pipeline.drop_open()
            self.pipeline.drain()
            self.bound.unseen()
            self._to(Phase.RESTORING, "restore() did not end, so that the state is that of no iteration; restore again")

    def resume(self, completed: int) -> None:
        """The state is as it was after so many iterations."""
        with self._entered():
            self._rebind()
            self.pipeline.forget()
            self.firings = Firings(self.timetable)
            self.completed = self._restored = completed
            self.ending = False
            self.bound.restored()
            self.without_update.restored()
            if self.parts is not None:
                self.parts.resumed()
            self._anchor, self.touched = 0, False
            self.bound.distrust()
            self._to(Phase.FILLING)

    @property
    def newest(self) -> int:
        """The last iteration that is in a staged checkpoint, or was restored; 0 before any."""
        return max(0, self._restored, self.pipeline.last_staged)

    @property
    def behind(self) -> bool:
        """Whether the last completed iteration is in no checkpoint, nor was restored."""
        return self._lacks(self.completed)

    @property
    def unsaved(self) -> bool:
        """Whether it is in none and still can be saved."""
        return self.behind and not self.touched

    def save(self) -> bool:
        """Stage a checkpoint of the last completed iteration; False where no slot is to be had.

        Raises InputError where its state is gone already, and what the host's state cannot be read for.
        """
        self._mend()
        if self.lifecycle.refusal is not None:
            raise InputError(f"save: {self.lifecycle.refusal}")
        if not self.pipeline.has(self.completed) and self.touched:
            raise InputError("save: the next iteration has begun; call it right after step()")
        with self._entered():
            if not self.pipeline.has(self.completed):
                self.pipeline.drop_open()
                self.pipeline.drain()  # no plan has this one: what those before it hold would be held beside it
                self._begin(wait=True)
            self.pipeline.drain()
        staged = self.pipeline.last_staged == self.completed
        if not staged and self._problems:
            raise self._problems.pop(0)
        return staged

    def drain(self, timeout_s: float | None = None) -> bool:
        """Stage the checkpoints of all completed iterations that are due; False where the time did not suffice."""
        with self._entered():
            self._mend()
            return self.pipeline.drain(timeout_s)

    def retire(self) -> None:
        """Complete what can be vouched for; hooks do nothing from now on."""
        if self.lifecycle.deaf:
            return
        try:
            self.drain()
        finally:
            self._to(Phase.CLOSED, "is closed; attach again")
            self.pipeline.drop_all()
            self._device.collect()

    def succeed(self, before: Executor) -> None:
        """Go on where another one, which has retired, left off: it was told of all that was done until now."""
        self.completed, self._restored, self.ending = before.completed, before._restored, before.ending
        self.without_update = before.without_update
        self.pipeline.succeed(before.pipeline)

    def close(self) -> None:
        """Retire. Raises what no step() has raised."""
        if self.lifecycle.deaf:
            return
        self.retire()
        if self._problems:
            raise self._problems.pop(0)

    # Inside

    def _end(self, interval: int, *, next_is_due: bool) -> None:
        """An iteration ended that a checkpoint was filled or due in, or after which one is, `interval` from then on."""
        self._mend()
        self._device.check()
        if self.awake:
            self._advance(self.completed, self.timetable.anchor_count)
            self.firings.end()
            self.bound.vouch()
        is_due = self.completed % self.interval == 0
        if is_due:
            self._begin(wait=self._settings.wait_when_full)
        elif self.pipeline.parted is not None:
            self._part_ended()
        if interval != self.interval:
            self.interval, self._paced = interval, None
        if is_due and self.parts is not None and self.parts.refused:  # a whole is more than a link carries at once
            self.interval = max(self.interval, self.parts.whole_every())
            next_is_due = next_is_due or self._due(self.completed + 1) is not None
        self.bound.distrust()
        self._anchor, self.touched = 0, False
        self._device.collect()
        if self._settings.wait_when_full and self._device.is_host:
            self._keep_up()
        self.pipeline.stage_finished()
        for update in self._updates:
            update.rest()
        filling = next_is_due or self.pipeline.busy or self._audit is not None
        self.bound.ended(self._armed if filling else ())
        self._to(Phase.FILLING if filling else Phase.IDLE)
        self.ending = False

    def _lacks(self, iteration: int) -> bool:
        """Whether an iteration that ended is in no checkpoint, nor was restored."""
        self._mend()
        known = iteration in (0, self._restored) or self.pipeline.has(iteration)
        return not known and self.lifecycle.refusal is None

    def _keep_up(self) -> None:
        """What has left of a checkpoint is there when the next one is due: copies may get no time beside training, and
        nothing else waits for those of gradients."""
        before = self.completed - self.interval
        for late in (each.last for each in self.pipeline.waiting if each.issued and each.iteration <= before):
            if late is not None and not self._device.done(late):
                self._device.wait(late, Cause.LATE)

    def _part_ended(self) -> None:
        """A part of the checkpoint that is being filled is as it is now."""
        assert self.parts is not None
        if self._found():
            self.parts.part_ended(self.completed)
            self.pipeline.protect(self.bound.cover(), Cause.UNWATCHED)

    def _found(self) -> bool:
        """The tensors are where they are bound, or bound anew. False where they are no longer what the schedule has."""
        for update in self._updates:
            update.settle()
        try:
            if self.bound.is_stale:
                self._rebind()
        except InputError as error:
            self._problems.append(error)
            return False
        return True

    def _begin(self, *, wait: bool) -> None:
        before = self.bound.binding
        if not self._found():
            return
        self.bound.begin(before)
        self._to(Phase.FILLING)
        if self.parts is not None:
            self.parts.part_ended(self.completed)
        begun = self.pipeline.begin(self.completed, wait=wait)
        if begun and self.parts is not None and not self.parts.prove():
            self.pipeline.stage_finished()  # its slot is free again
            begun = self.pipeline.begin(self.completed, wait=wait)
        if not begun:
            return
        if wait and self.pipeline.lanes > 1 and self.pipeline.goes_on(self.completed + 1):
            self.pipeline.open(self.completed + 1, wait=True)  # later there is no moment at which training may wait
        unwatched = self.bound.cover()
        if unwatched and GuardKind.UNWATCHED not in self._disarmed:
            self.pipeline.protect(unwatched, Cause.UNWATCHED)
        if self._audit is not None:
            self._audit.sample(self.bound.storages, frozenset(unwatched))
