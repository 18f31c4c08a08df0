"""An engine whose schedule is learned: it changes over to what the learner hands out, and to what the state has become.

Asked at the beginning of `step()`, when nothing of the iteration that ended was copied yet, so that nothing is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from types import FrameType

from checkflow.checkpointing.engine import Engine
from checkflow.checkpointing.fitting import fit
from checkflow.errors import InputError, StoreError
from checkflow.events import Learned
from checkflow.learning.learner import Learner
from checkflow.learning.link import Copied
from checkflow.learning.running import Running
from checkflow.runtime.binding import sizes_of
from checkflow.schedule import Schedule
from checkflow.state.host.objects import HostObjects
from checkflow.state.live import in_models, listed_state
from checkflow.state.members import Members
from checkflow.state.names import StateName
from checkflow.training import Training


class _OfEngine(Running):
    """What a learner asks of an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def copied(self) -> Copied:
        counters, pipeline = self._engine.counters, self._engine.executor.pipeline
        return Copied(
            counters.offloaded_bytes,
            counters.link_busy_ns,
            counters.waited_ns,
            pipeline.started,
            pipeline.skipped,
        )

    @property
    def waited_ns(self) -> int:
        return self._engine.counters.waited_ns

    @property
    def state_bytes(self) -> int:
        return self._engine.fitting.schedule.state_bytes

    @property
    def opaque(self) -> bool:
        executor = self._engine.executor
        if not executor.bound.opaque:
            executor.look_for_graphs()  # which may have been captured since, where no hook saw it
        return executor.bound.opaque

    @property
    def silent(self) -> bool:
        return bool(self._engine.executor.firings.silent)


def _counted(training: Training) -> tuple[frozenset[StateName], tuple[int, ...]]:
    """The names of what modules hold, and how much optimizers do."""
    lives = chain(in_models(training), listed_state(training.listed))
    return frozenset(live.name for live in lives), sizes_of(training)


class Adapting:
    """Joins both."""

    def __init__(
        self,
        engine: Engine,
        learner: Learner,
        training: Training,
        objects: HostObjects,
        tell: Callable[[str], None],
        *,
        advises: bool,
    ) -> None:
        """`advises`: a user who chose no policy is told of one that has a checkpoint more often."""
        self._engine = engine
        self._running = _OfEngine(engine)
        self._learner = learner
        self._training = training
        self._objects = objects
        self._tell = tell
        self._advises = advises
        self._members, self._counted = Members.of(training), _counted(training)
        self._refused: Schedule | None = None  # in whose parts nothing can be saved
        self.learned_in = 0  # iteration from which on a learned schedule is followed; 0: none is

    @property
    def stage(self) -> str:
        """What the learner is doing."""
        return self._learner.stage.value

    def ended(self, frame: FrameType) -> None:
        """An iteration has ended. Raises InputError where its state cannot be checkpointed, StoreError for its room."""
        if self._follow_state() or self._follow_refusal():
            return
        schedule = self._learner.ended(frame, self._running)
        if schedule is None:
            return
        try:
            fitting = fit(schedule, self._training, self._objects)
        except InputError as error:  # the state changed since
            self._learner.anew(str(error))
            return
        try:
            self._engine.check_room(fitting)
        except StoreError as error:
            self._learner.without_parts(str(error), factored=False)
            return
        self._engine.change_over(fitting)
        self.learned_in = self._engine.executor.completed
        claims = schedule.certificate
        learned = Learned(
            self.learned_in,
            self._engine.interval,
            claims.peak_bytes,
            claims.training_peak_bytes,
            schedule.lanes,
            schedule.replica,
        )
        self._engine.events.append(learned)
        self._tell(str(learned))
        if self._advises and schedule.interval > 1:
            self._advises = False  # once is enough
            self._tell(
                'the link carries no more; with policy="rolling" each iteration may have one, for more host memory'
            )

    def begins(self, frame: FrameType) -> None:
        """The next iteration begins."""
        self._learner.begins(frame, self._running)

    def interrupted(self) -> None:
        """The iteration's end was not seen."""
        self._learner.interrupted()

    def restored(self) -> None:
        """The state is another iteration's; optimizers may have state that they had not."""
        self._learner.interrupted()
        self._follow_state()

    def close(self) -> None:
        """Learn nothing any more."""
        self._learner.close()

    def _follow_state(self) -> bool:
        """Whether the state has other tensors than the slots have room for, and others were taken."""
        if not self._members.changed() and sizes_of(self._training) == self._counted[1]:
            return False
        counted = _counted(self._training)
        fits = counted == self._counted or self._still_fits()  # what only has another shape the executor refuses
        if not fits:
            fitting = fit(self._learner.provisional(), self._training, self._objects)
            self._learner.anew("its state has other tensors")
            self._engine.change_over(fitting)
            self.learned_in = 0
        self._members, self._counted = Members.of(self._training), counted
        return not fits

    def _follow_refusal(self) -> bool:
        """Whether the runtime has found that updates cannot be made again as was learned: another plan is learned."""
        schedule, parts = self._engine.fitting.schedule, self._engine.executor.parts
        if parts is None or not parts.refused or schedule is self._refused:
            return False
        self._refused = schedule
        self._learner.without_parts(parts.refused, factored=any(row.factor_rows for row in schedule.gradients))
        return True

    def _still_fits(self) -> bool:
        """Whether what is followed has room for all of the state: some of it may not have been there so far."""
        try:
            fitting = fit(self._engine.fitting.schedule, self._training, self._objects)
        except InputError:
            return False
        return fitting.fits(self._engine.handle.layouts)
