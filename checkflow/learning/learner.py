"""From a training that runs to its schedule: when to record an iteration, what to plan, and when to learn anew.

    settling ──► watching ──► recording ──► planning ──► knowing
       ▲            ▲             │             │            │ most iterations are of another kind
       │            └─────────────┴─ no use ────┴────────────┘
       └── the state has other tensors than before

Two iterations without new state settle it: optimizers make theirs in the first. Nothing is recorded before an update is
seen: some trainings fill a buffer first, and some make an update now and then. What is recorded is one iteration; its
kind has to be the most common one, unless all differ. Where nothing comes of it, what is in force stays in force; where
nothing is, it is tried again: a link that was busy may be free by then.
Another schedule is due, too, where the link has come to carry much less than was planned for, or much more (link.py).
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from types import FrameType

from checkflow.errors import TraceError
from checkflow.graph import Graph
from checkflow.learning.forgotten import Forgotten
from checkflow.learning.kept import kept_schedule, place_of
from checkflow.learning.kinds import Kinds
from checkflow.learning.link import LinkWatch
from checkflow.learning.messages import DEFAULT_POLICY, Planned, Request
from checkflow.learning.planner import Planner
from checkflow.learning.provisional import provisional
from checkflow.learning.running import Running
from checkflow.schedule import Schedule
from checkflow.state.live import parameters_of
from checkflow.torch_internals import block_around, compiled_from
from checkflow.trace.assemble import NoUpdateError
from checkflow.trace.live import LiveIteration
from checkflow.trace.reachable import Reached, reachable_from
from checkflow.trace.stopwatch import Elapsed, Stopwatch
from checkflow.training import Training
from checkflow.unlisted import Unlisted

_KIND = "iteration"  # of a schedule's arguments
_SEEN = 8  # iterations whose kinds are known when one is chosen to be planned for
_RECORDED = 4  # at most, before a plan for one that is not common is better than none
_WINDOW = 20  # iterations after which it is looked whether the plan is still of most of them; then twice as many
_AGAIN = 50  # iterations after which it is tried again where there was no plan; then twice as many
_AWAITS = 50  # iterations, at most, until copies have told what the link carries
_WITHIN = 50  # iterations that cannot be recorded for a block of the caller's, until that is told
_UPDATELESS = 16  # recorded, at most, where others make updates
_OTHER_CODE = "other code runs"  # the calls are the same, but what is planned at an anchor waits for one that is gone
_UNSEEN = (
    "of what your loop carries, generators and modules alone are looked for, so see to it that the rest is attached"
)


class Stage(StrEnum):
    SETTLING = "settling"  # the state may not be complete
    WATCHING = "watching"  # it is; the next iteration is recorded
    RECORDING = "recording"
    PLANNING = "planning"  # in the other process
    PLANNED = "planned"  # it has answered, which the next iteration's end will see
    KNOWING = "knowing"  # a plan is in force, or there is none to be had
    CLOSED = "closed"


class Learner:
    """Asked between iterations, in the training's thread.

    Args:
        training: live.
        store: where checkpoints are, and what was learned is kept.
        interval: as the user asked; None: as often as the link allows.
        policy: by which is planned.
        ignores: says that what runs now is checkflow's own.
        tell: told of what is so, in a line.
        notify: told of what a person should see to.
        found: told what the iteration hands on to the next and nothing lists.
    """

    def __init__(
        self,
        training: Training,
        store: Path,
        interval: int | None,
        policy: str,
        ignores: Callable[[], bool],
        tell: Callable[[str], None],
        notify: Callable[[str], None],
        found: Callable[[tuple[Unlisted, ...]], None],
    ) -> None:
        self._training = training
        self._interval = interval
        self._policy = policy
        self._factors = True
        self._ignores = ignores
        self._tell = tell
        self._notify = notify
        self._found = found
        self._forgotten = Forgotten(training, notify, found)
        self._place = place_of(store, training, interval, policy)
        self.kept = kept_schedule(self._place, notify)
        self._stage = Stage.SETTLING if self.kept is None else Stage.KNOWING
        self._kinds = Kinds(training)
        self._recent: deque[str] = deque(maxlen=_SEEN)
        self._known = _kind_of(self.kept)
        self._since: list[str] = []  # kinds, since they were last looked at
        self._window = _WINDOW
        self._said_they_differ = False
        self._link = LinkWatch(self.kept)
        device = next((each.device for _, each in parameters_of(training) if each.is_cuda), None)
        self._stopwatch = Stopwatch(device)  # not the host's clock: that may be far ahead of it
        self._took: deque[tuple[Elapsed, int]] = deque(maxlen=_SEEN)  # iterations, and what was waited for within each
        self._waited_ns = 0  # when the one that runs began
        self._timed = False  # the one that runs
        self._recorded = 0
        self._has_updated = False  # since an iteration was recorded that had not
        self._updateless = 0  # of these, where there were updates
        self._pause = 0  # iterations to let pass after an update was seen
        self._waits = self._patience = _AGAIN  # those to let pass without one, and how many of them are left
        self._within = 0  # those that could not be, since one was
        self._earlier: Mapping[str, Reached] = {}
        self._live: LiveIteration | None = None
        self._planner: Planner | None = None  # is started, plans, or has answered
        self._planned_kind = ""
        self._awaited = 0  # iterations, until the link was known
        self._unplanned, self._again = 0, _AGAIN  # iterations without a plan, and after how many it is tried again
        self._was_told = False  # that there was none
        self._has_looked = self.kept is not None  # an iteration was, for what it carries and nothing lists
        self._still = ""  # the kind whose plan is in force, and stays so where the link allows no other

    @property
    def stage(self) -> Stage:
        """What it is doing."""
        if self._stage is Stage.PLANNING and self._planner is not None and self._planner.answer is not None:
            return Stage.PLANNED
        return self._stage

    def provisional(self) -> Schedule:
        """What is followed as long as nothing is known. Raises InputError as provisional.py does."""
        return provisional(self._training, self._policy, self._interval or 1)

    def anew(self, why: str) -> None:
        """What was learned is of no use."""
        self._stop_recording()
        if self._stage is Stage.PLANNING:
            self._end_planner()
        if self._stage is Stage.KNOWING and self._known:
            self._tell(f"learns its schedule anew: {why}")
        self._stage, self._recorded, self._known, self._still = Stage.SETTLING, 0, "", ""
        self._kinds.ended()  # it is of what was
        self._recent.clear()
        self._since.clear()

    def without_parts(self, why: str, *, factored: bool) -> None:
        """What was learned cannot be followed: the next plan has no factors, or if this one had none, no parts."""
        if factored:
            self._factors = False
        else:
            self._policy = DEFAULT_POLICY
        self.anew(why)

    def ended(self, frame: FrameType, running: Running) -> Schedule | None:
        """An iteration ended, and nothing of it was checkpointed yet. A schedule to be followed from it on, or None."""
        kind = self._kinds.ended()
        self._recent.append(kind)
        self._has_updated |= self._kinds.updated
        if self._stage is not Stage.KNOWING:
            self._link.saw(running.copied)
        if self._timed and self._stage is not Stage.RECORDING:
            self._took.append((self._stopwatch.stop(), running.waited_ns - self._waited_ns))
        if self._stage is Stage.RECORDING:
            self._recorded_one(frame, kind, running)
            return None
        self._stop_recording()
        if self._stage is Stage.PLANNING:
            return self._answer()
        if self._stage is Stage.KNOWING:
            self._check(kind, running)
        return None

    def begins(self, frame: FrameType, running: Running) -> None:
        """The checkpoint of the iteration that ended is under way; the next one begins when this returns."""
        self._forgotten.begins(frame)  # before anything of it is recorded
        if self._stage is Stage.SETTLING:
            if self._awaited < _AWAITS and self._link.awaits(running.copied, running.state_bytes):
                self._awaited += 1
            elif self._opaque(running):
                self._give_up("code runs that was compiled, or captured as a CUDA graph, whose operators nobody sees")
            elif not self._awaits_update() and self._is_outside() and self._has_planner():
                self._earlier = reachable_from(self._training, frame)
                self._stage = Stage.WATCHING
        elif self._stage is Stage.WATCHING and self._live is None and self._is_outside():
            try:
                reached = reachable_from(self._training, frame)
                name = Path(frame.f_code.co_filename).name
                self._live = LiveIteration(self._training, name, self._earlier, reached, self._ignores)
                self._stage = Stage.RECORDING
            except Exception as error:  # noqa: BLE001 (training goes on without a plan)
                self._give_up(_said(error))
        self._timed, self._waited_ns = True, running.waited_ns
        self._stopwatch.start()

    def interrupted(self) -> None:
        """Something else than an iteration happened since the last one ended."""
        self._stop_recording()
        self._timed = False
        if self._stage in (Stage.WATCHING, Stage.RECORDING):
            self._stage = Stage.SETTLING

    def close(self) -> None:
        """Learn nothing any more."""
        self._stop_recording()
        self._stage = Stage.CLOSED
        self._kinds.remove()
        self._end_planner()

    def _awaits_update(self) -> bool:
        """Whether the next iteration is not to be recorded yet. One that comes at another distance from an update than
        the last one that was recorded may make one, where each fourth does."""
        if not self._has_updated and self._patience:
            self._patience -= 1
            return True
        if self._pause:
            self._pause -= 1
            return True
        return False

    def _is_outside(self) -> bool:
        """Whether a recording, which outlives this call, may begin or end: no block of the caller's is around it."""
        if not (block := block_around()):
            return True
        self._stage, self._within = Stage.SETTLING, self._within + 1
        if self._within >= _WITHIN:
            self._within = 0
            self._give_up(f"step() is called within {block}, where no recording can begin or end; call it outside")
        return False

    def _recorded_updateless(self) -> None:
        self._stop_recording()
        self._stage = Stage.SETTLING
        if self._has_updated:
            self._updateless += 1
        else:
            self._waits *= 2
        self._has_updated, self._pause, self._patience = False, self._updateless, self._waits
        if self._updateless >= _UPDATELESS:
            self._updateless = 0
            self._give_up(f"{_UPDATELESS} iterations were recorded, and none of them wrote a parameter")

    def _recorded_one(self, frame: FrameType, kind: str, running: Running) -> None:
        assert self._live is not None
        self._recorded += 1
        constants = self._live.constants()
        try:
            graph = self._live.end(reachable_from(self._training, frame), ((_KIND, kind),))
        except NoUpdateError:
            self._recorded_updateless()
            return
        except TraceError as error:
            graph = None
            if self._recorded >= _RECORDED:
                self._give_up(_said(error))
                return
        except Exception as error:  # noqa: BLE001 (training goes on without a plan)
            self._give_up(_said(error))
            return
        self._stage = Stage.SETTLING
        self._stop_recording()
        if graph is None:
            self._is_outside()
            return
        self._within = 0
        if self._opaque(running) or self._planner is None:
            return
        common, _ = Counter(self._recent).most_common(1)[0]
        if kind == common or self._recorded >= _RECORDED:
            self._found(graph.unlisted)
            self._forgotten.recorded(constants)
            self._has_looked = True
            self._planned_kind = kind
            bandwidth = self._link.asks(running.copied)
            self._planner.ask(
                Request(self._retimed(graph), bandwidth, self._policy, self._interval, self._factors, self._place)
            )
            self._stage = Stage.PLANNING

    def _retimed(self, graph: Graph) -> Graph:
        """No longer than iterations take that nobody records; what they wait for copies is of the plan in force."""
        if not self._took:
            return graph
        usual_ns = round(statistics.median(max(1, elapsed() - waited_ns) for elapsed, waited_ns in self._took))
        if graph.iteration_time_ns <= usual_ns:
            return graph
        return graph.retimed("measured", [op.time_ns * usual_ns // graph.iteration_time_ns for op in graph.ops])

    def _answer(self) -> Schedule | None:
        assert self._planner is not None
        answer = self._planner.answer
        if answer is None:
            return None
        if not isinstance(answer, Planned):
            self._give_up(answer.why)
            return None
        self._stage, self._known, self._recorded, self._was_told = Stage.KNOWING, self._planned_kind, 0, False
        self._link.follows(answer.schedule)
        return answer.schedule

    def _check(self, kind: str, running: Running) -> None:
        """Whether training is, most of the time, still what the plan in force was made of. Without one: whether it is
        time to try again."""
        if not self._known:
            self._unplanned += 1
            at_last = self._unplanned >= self._again
            if at_last:
                self._again *= 2
            if at_last or (self._unplanned % _WINDOW == 0 and self._link.grew(running.copied)):
                self._unplanned = 0
                self.anew("there was no plan")
            return
        self._since.append(kind if kind != self._known or not running.silent else _OTHER_CODE)
        if len(self._since) < self._window:
            return
        common, count = Counter(self._since).most_common(1)[0]
        self._since.clear()
        if 2 * count >= self._window:
            if common == self._known:
                if why := self._link.changed(running.copied, self._interval or 1, self._window):
                    self._window *= 2
                    self.anew(why)
                    self._still = common
                return
            self._window *= 2  # training that goes to and fro is not learned again and again
            self.anew(common if common is _OTHER_CODE else f"iterations are {common}, not {self._known}")
        elif not self._said_they_differ:
            self._said_they_differ = True
            self._notify(
                f"iterations differ, and none is common: planned for {self._known}; others may have to wait for copies"
            )

    def _opaque(self, running: Running) -> bool:
        return running.opaque or any(
            compiled_from(part) is not None for model in self._training.models for part in model.modules()
        )

    def _has_planner(self) -> bool:
        """Whether there is one to be asked: one that has answered is none."""
        if self._planner is not None and self._planner.answer is not None:
            self._end_planner()
        if self._planner is None:
            try:
                self._planner = Planner()
            except OSError as error:
                self._give_up(f"the planner's process cannot be started ({error.strerror})")
        return self._planner is not None

    def _give_up(self, why: str) -> None:
        self._stop_recording()
        self._stage, self._known = Stage.KNOWING, self._still
        if not self._has_looked:
            self._forgotten.cannot_record()
        if not self._was_told or self._still:
            self._was_told = True
            then = "as planned before" if self._still else "when its iteration ends, and it is tried again later"
            unseen = "" if self._has_looked else f"; {_UNSEEN}"
            self._notify(f"no schedule was learned ({why}); each checkpoint is read {then}{unseen}")

    def _stop_recording(self) -> None:
        """Also of what could not be stopped before."""
        if self._live is not None and self._live.abandon():
            self._live = None

    def _end_planner(self) -> None:
        if self._planner is not None:
            self._planner.close()
        self._planner = None


def _kind_of(schedule: Schedule | None) -> str:
    return "" if schedule is None else dict(schedule.arguments).get(_KIND, "")


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, TraceError) else f"{type(error).__name__}: {error}".splitlines()[0]
