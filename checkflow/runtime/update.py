"""Inside an optimizer's update: anchors before its foreach functions, and a guard before each that writes state.

The guard before `optimizer.step()` waits for all that the update writes, though most of it is written later. What a
foreach function was seen to write in the last update is left to the guard before that function. What was left must not
be written by anything else: its version counters say at that guard, and before any checkpoint is staged, that it was
not. Where one says that it was, the checkpoints in flight are given up, and all is waited for before this optimizer's
updates from then on. Fused functions count no writes: where a group's settings changed, what was seen says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import torch

from checkflow.foreach import Look, can_look, writes_first
from checkflow.runtime.binding import Binding, BoundStorage
from checkflow.runtime.bound import Bound
from checkflow.runtime.guards import Guard, GuardKind
from checkflow.state.groups import IMPLEMENTATION
from checkflow.state.names import subject_of
from checkflow.torch_internals import is_ours, step_pre_hooks, versions

_KEPT = 1000  # selections of tensors: an update that leaves out others each time has no end of them


class Followed(Protocol):
    """What an update needs of the executor."""

    @property
    def bound(self) -> Bound: ...
    @property
    def follows_updates(self) -> bool: ...
    @property
    def acts_in_updates(self) -> bool: ...
    def reach(self, kind: str, subject: str) -> None: ...
    def write(self, storages: tuple[BoundStorage, ...]) -> None: ...
    def wrote(self, storages: tuple[BoundStorage, ...], kind: GuardKind) -> None: ...
    def give_up(self) -> None: ...


@dataclass(slots=True, eq=False)
class JointWrite:
    """State that one foreach function writes together."""

    storages: tuple[BoundStorage, ...]
    all: frozenset[BoundStorage]  # the same
    counted: tuple[torch.Tensor, ...]  # those of its tensors that count their writes
    before: list[int]  # their counters when the update began

    def versions(self) -> list[int]:
        return versions(self.counted)


class Update:
    """The updates of one optimizer. `begin` and `end` are called by its step hooks; `begin` before its guard fires."""

    def __init__(self, executor: Followed, optimizer: torch.optim.Optimizer, subject: str, guard: Guard) -> None:
        self._executor = executor
        self._optimizer = optimizer
        self._subject = subject
        self._guard = guard
        self._look = Look(self._reached, executor)
        self._binding: Binding | None = None
        self._found: dict[tuple[int, ...], JointWrite] = {}  # by the ids of the tensors that a function is given
        self._bound: dict[int, BoundStorage] = {}  # by the id of a live tensor
        self._left: dict[JointWrite, None] = {}  # to guards inside the update, and none of them has fired yet
        self._seen: dict[JointWrite, None] = {}  # in this update
        self._last: dict[JointWrite, None] = {}  # in the one before
        self._unseen: tuple[BoundStorage, ...] = guard.storages  # what no foreach function writes
        self._as: tuple[object, ...] = ()  # the form of the last update
        self._distrusted = False  # something else wrote, once
        self._last_hook: int | None = None  # which step pre-hook has to run after all others

    def is_last(self, hook: int) -> None:
        """This step pre-hook, by its id, has to run after all others, those too that are registered later."""
        self._last_hook = hook

    @property
    def is_overtaken(self) -> bool:
        """Whether one of others will run after it this time."""
        hooks = step_pre_hooks(self._optimizer)
        if self._last_hook not in hooks:
            return False
        later = takewhile(lambda hook: hook != self._last_hook, reversed(hooks))
        return not all(is_ours(hooks[hook]) for hook in later)

    def rest(self) -> None:
        """An iteration has ended: no update is under way, nor any hook."""
        self.settle()
        hooks = step_pre_hooks(self._optimizer)
        if self._last_hook is not None and self._last_hook in hooks:
            hooks.move_to_end(self._last_hook)

    def begin(self) -> None:
        """The update is about to begin."""
        self.settle()
        self._left, self._seen = {}, {}
        if self._executor.follows_updates:
            form = _form(self._optimizer)
            if self._binding is not self._executor.bound.binding or form != self._as:
                self._as = form
                self._bind()
            if self._bound and (self._executor.acts_in_updates or not self._last) and self._look.open():
                self._left = dict(self._last)
                for written in self._left:
                    written.before = written.versions()
        self._guard.leave(storage for written in self._left for storage in written.storages)

    def end(self) -> None:
        """The update has ended."""
        if not self._look.is_open:
            return
        self._look.close()
        self.vouch()
        self._left = {}
        if self._seen.keys() != self._last.keys():
            taken: set[BoundStorage] = set()
            self._last = {}
            for written in self._seen:
                if taken.isdisjoint(written.storages):
                    self._last[written] = None
                    taken.update(written.storages)
            self._unseen = tuple(storage for storage in self._guard.storages if storage not in taken)
        # A fused function counts no writes: what was copied at an anchor before it is known to be old by this alone.
        self._executor.wrote(self._unseen, self._guard.kind)

    def settle(self) -> None:
        """One that raised has ended, too, and may have written whatever it likes."""
        if self._look.is_open:
            self._look.close()
            self.vouch()
            self._left = {}
            self._executor.wrote(self._guard.storages, self._guard.kind)

    def remove(self) -> None:
        """No hook calls this any more."""
        self._look.close()

    def vouch(self) -> None:
        """Gives up what is in flight if state was written that no guard has fired for."""
        if self._left and any(written.versions() != written.before for written in self._left):
            self._torn()

    def _reached(self, function: str, tensors: Sequence[torch.Tensor]) -> None:
        self._executor.reach("update", subject_of(self._subject, function))
        if not writes_first(function) or not tensors or id(tensors[0]) not in self._bound:
            return  # the update's own temporaries, or gradients
        written = self._written(tensors)
        if written not in self._seen:
            for left in [left for left in self._left if not left.all.isdisjoint(written.storages)]:
                self._left.pop(left, None)
                if left.versions() != left.before:
                    self._torn()
                if left is not written:  # another selection of the tensors than in the last update
                    self._executor.write(left.storages)
        self._executor.write(written.storages)
        self._seen[written] = None

    def _written(self, tensors: Sequence[torch.Tensor]) -> JointWrite:
        key = tuple(map(id, tensors))  # of tensors that are bound, which nothing else is while they are
        written = self._found.get(key)
        if written is None:
            if len(self._found) > _KEPT:
                self._found.clear()
            bound = {self._bound[tensor]: None for tensor in key if tensor in self._bound}
            storages = tuple(bound) if set(key) <= self._bound.keys() else self._guard.storages
            counted = tuple(tensor for storage in storages for tensor in storage.counted)
            written = self._found[key] = JointWrite(storages, frozenset(storages), counted, [])
        return written

    def _bind(self) -> None:
        self._binding = self._executor.bound.binding
        looks = not self._distrusted and can_look(self._optimizer)
        self._bound = {id(live.held): s for s in self._guard.storages for live in s.lives} if looks else {}
        self._found, self._last, self._unseen = {}, {}, self._guard.storages

    def _torn(self) -> None:
        self._left, self._bound, self._distrusted = {}, {}, True
        self._executor.give_up()


def _form(optimizer: torch.optim.Optimizer) -> tuple[object, ...]:
    """What torch's optimizers choose their functions by, of each group."""
    return tuple((len(group["params"]), *map(group.get, IMPLEMENTATION)) for group in optimizer.param_groups)
