"""What is bound now, and which guards cover it: found anew when a tensor moved, and told of where that costs."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from checkflow.runtime.binding import Binding, BoundStorage
from checkflow.runtime.counters import Cause
from checkflow.runtime.device import Device
from checkflow.runtime.guards import Guard, GuardKind
from checkflow.runtime.matching import bind, check_updated
from checkflow.runtime.outside import Outside
from checkflow.runtime.pipeline import Pipeline
from checkflow.schedule import Schedule
from checkflow.state.names import StateName
from checkflow.state.shards import give_back_gathered
from checkflow.training import Training
from checkflow.wrapped import is_hookable


class Bound:
    """The live state of a training, as the schedule names it."""

    def __init__(
        self,
        schedule: Schedule,
        training: Training,
        binding: Binding,
        pipeline: Pipeline,
        device: Device,
        tell: Callable[[str], None],
    ) -> None:
        self.binding = binding
        self.opaque = False  # code without hooks may run: compiled, or captured as a CUDA graph
        self.unwatched: tuple[BoundStorage, ...] = ()  # that no trusted guard covered when an iteration ended
        self._schedule = schedule
        self._training = training
        self._pipeline = pipeline
        self._tell = tell
        self._guards: list[Guard] = []
        self._unguarded: set[BoundStorage] = set()  # buffers of modules that came since the hooks did
        self._outside = Outside(device)
        self._said: set[str] = set()  # state that was told of
        self._unsaid: list[StateName] = []  # what was written outside of what its guard covers
        self._waits = False  # a person was told of waiting for what is written outside of what its guard covers
        self._moved: set[int] = set()  # state that was another tensor when the last checkpoint began than before
        self._updated: set[int] = set()  # optimizers that made an update
        self._unhooked = [number for number, found in enumerate(training.optimizers) if not is_hookable(found)]

    @property
    def storages(self) -> Iterable[BoundStorage]:
        return self.binding.storages.values()

    @property
    def loose(self) -> tuple[StateName, ...]:
        """Names of state that is read when an iteration ends, for it does not lie in memory as planned."""
        return tuple(live.name for live in self.binding.loose)

    @property
    def is_stale(self) -> bool:
        """Whether a tensor moved, or appeared; not where ranks have only gathered what they share, as to evaluate."""
        if self.binding.stale(self._training):
            give_back_gathered(self._training.models)
            return self.binding.stale(self._training)
        return False

    def watch(self, guards: Iterable[Guard]) -> None:
        """Guards that fire from now on."""
        self._guards += guards
        self._bind_guards()

    def distrust(self) -> None:
        """No guard is known to fire before the next write, but by its having fired since."""
        for guard in self._guards:
            guard.fired = False

    def find(self) -> Binding:
        """The tensors as they are now. Raises InputError where they no longer are what the schedule has."""
        return bind(self._schedule, self._training, self.binding)

    def take(self, binding: Binding) -> None:
        """What `find` found is what is bound from now on."""
        before, self.binding = self.binding, binding
        bound = set(self.storages)
        gone = [storage for storage in before.storages.values() if storage not in bound]
        self._pipeline.protect(gone, Cause.UNWATCHED)  # no guard covers them any more
        self._pipeline.rebind(binding)
        self._outside.forget()
        self._say(
            tuple(name for name in self.loose if not name.is_extra),  # attach told of those
            "lies in memory otherwise than at attach; read when each iteration ends, which training waits for",
        )
        self._bind_guards()

    def _bind_guards(self) -> None:
        for guard in self._guards:
            guard.bind(self.binding)
        hooked = {module for guard in self._guards for module in (guard.subject, *guard.inside)}
        buffers = self.binding.buffer_storages.items()
        self._unguarded = {s for module, storages in buffers if module not in hooked for s in storages}

    def begin(self, before: Binding) -> None:
        """A checkpoint begins; `before` was bound until then. Counts what was replaced, and what nothing tells of."""
        known, now = before.storages, self.binding.storages
        moved = {id_ for id_, storage in now.items() if known.get(id_, storage) is not storage}
        again = [storage.name for id_, storage in now.items() if id_ in moved & self._moved]
        self._say(again, "replaced in each iteration, not updated in place; read when the iteration has ended")
        self._moved = moved
        for storage in self._without_hooks():  # nothing tells when, or whether, they were written
            storage.epoch += 1

    def cover(self) -> tuple[BoundStorage, ...]:
        """What no trusted guard covers of what may have been written."""
        unhooked = self._without_hooks()
        trusted = {s for guard in self._guards if guard.trusted(opaque=self.opaque) for s in guard.storages}
        written = self._outside.found
        self.unwatched = tuple(
            s for s in self.storages if (s.written or s in unhooked) and (s not in trusted or s.name in written)
        )
        return self.unwatched

    def ended(self, kinds: Container[GuardKind]) -> None:
        """An iteration did: guards of these kinds will fire before what they cover is written next."""
        guards = [guard for guard in self._guards if guard.kind in kinds]
        self._outside.ended(guards, frozenset(self.unwatched))

    def unseen(self) -> None:
        """What is written from now on no guard may tell of; nothing is pending."""
        self._outside.forget()

    def fires(self, guard: Guard) -> None:
        """A guard does: what it covers is about to be written. Gives up what is in flight if some of it was already."""
        self._gives_up(self._outside.fires(guard))

    def vouch(self) -> None:
        """Gives up what is in flight if state was written since the iteration ended, and no guard has fired for it."""
        self._gives_up(self._outside.now())

    def _gives_up(self, written: list[StateName]) -> None:
        if written:
            self._pipeline.doubt()
            self._unsaid += written
        # Where no attached optimizer makes an update another one may, which is told of elsewhere.
        if self._unsaid and self._outside.updates:
            # Whether an iteration ends with that, so that a resume lacks it, or begins with it, nothing here can know.
            self._say(
                self._unsaid,
                "was written after step() and before its update: if an iteration ends with that, a resume goes on "
                "without it, so call step() after it; if one begins with it, or it is undone by then, nothing is lost"
                + ("" if self._waits else ". From now on training waits in step() until what is written so is read"),
            )
            self._waits, self._unsaid = True, []

    def check_updated(self, number: int) -> None:
        """Optimizer `number` made an update. Raises InputError if state is still absent after the first."""
        if number not in self._updated:
            self._updated.add(number)
            check_updated(self.binding, self._training, number)

    def restored(self) -> None:
        """What a checkpoint lacks may be lacking."""
        self._updated.update(range(len(self._training.optimizers)))

    def _without_hooks(self) -> set[BoundStorage]:
        return self._unguarded | {s for number in self._unhooked for s in self.binding.optimizer_storages[number]}

    def _say(self, names: Iterable[str], what: str) -> None:
        """What is so of state, once for each name."""
        new = [name for name in names if name not in self._said]
        if new:
            self._said.update(new)
            more = f" and {len(new) - 1} more" if len(new) > 1 else ""
            self._tell(f"{new[0]}{more}: {what}")
