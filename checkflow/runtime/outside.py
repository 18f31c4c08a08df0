"""Writes to guarded state outside of what its guard covers: by code between `step()` and the update.

A checkpoint may be reading that state. Version counters tell of such a write, at the latest when the guard fires, and
before anything is staged. What is in flight then is given up, and what was written is waited for from then on when an
iteration ends. A write through `.data` is in no counter, so bytes are looked at with the first checkpoints, and then in
a thousandth of the time: it is all of the state that is read.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

import torch

from checkflow.runtime.binding import BoundStorage
from checkflow.runtime.counters import Cause
from checkflow.runtime.device import Device
from checkflow.runtime.guards import Guard, GuardKind
from checkflow.runtime.unmoved import FIRST_LOOKS
from checkflow.state.memory import differing, fingerprint
from checkflow.state.names import StateName
from checkflow.torch_internals import versions

SELDOM = 1000  # after the first looks, which part of the time they take: one in so many

_Counts = tuple[list[int], list[int]]  # of writes, as torch counts them, and as guards do


class Outside:
    """From an iteration's end on, of what no guard has fired for yet."""

    def __init__(self, device: Device) -> None:
        self.found: set[StateName] = set()
        self._device = device
        self._ended: dict[Guard, _Counts] = {}
        self._fired: list[Guard] = []  # of these, since then
        self._waited_for: Collection[BoundStorage] = ()
        self._fingerprints: dict[BoundStorage, torch.Tensor] = {}
        self._looks = 0
        self._again_s = 0.0  # when it is looked again

    def ended(self, guards: Iterable[Guard], waited_for: Collection[BoundStorage]) -> None:
        """An iteration ended. What was waited for then may be written at will."""
        self._waited_for = waited_for
        self._ended = {guard: _counts(guard) for guard in guards if guard.planned}
        self._fired, self._fingerprints = [], {}
        began_s = time.monotonic()
        if self._ended and (self._looks < FIRST_LOOKS or began_s >= self._again_s):
            self._looks += 1
            storages = dict.fromkeys(s for guard in self._ended for s in guard.planned if s not in waited_for)
            with self._device.stalling(Cause.LOOK):
                self._fingerprints = {storage: fingerprint(storage.data) for storage in storages}
            self._took(began_s)

    def forget(self) -> None:
        """No guard is to fire before the next write."""
        self._ended, self._fingerprints = {}, {}

    @property
    def updates(self) -> bool:
        """Whether an attached optimizer makes, or made, an update of what the iteration left."""
        return any(guard.kind is GuardKind.OPTIMIZER for guard in self._fired)

    def fires(self, guard: Guard) -> list[StateName]:
        """What of this guard's was written before it fires, and was never found before."""
        before = self._ended.pop(guard, None)
        if before is None:
            return []
        found = self._written(guard, before)
        self._fired.append(guard)
        for storage in guard.planned if self._fingerprints else ():
            self._fingerprints.pop(storage, None)
        return found

    def now(self) -> list[StateName]:
        """The same of all guards that are yet to fire."""
        return [name for guard, before in self._ended.items() for name in self._written(guard, before)]

    def _written(self, guard: Guard, before: _Counts) -> list[StateName]:
        found = self._changed(guard) if self._fingerprints else set()
        if versions(guard.counted) != before[0]:
            counts = iter(before[0])
            found |= {s for s in guard.planned if [next(counts) for _ in s.counted] != versions(s.counted)}
        if not found:
            return []
        others = {storage for fired in self._fired for storage in fired.now}  # which other guards have fired for
        new = [
            storage.name
            for storage, epoch in zip(guard.planned, before[1], strict=True)
            if storage in found and storage not in others and storage.epoch == epoch
            if storage not in self._waited_for and storage.name not in self.found
        ]
        self.found.update(new)
        return new

    def _changed(self, guard: Guard) -> set[BoundStorage]:
        """What has other bytes than when the iteration ended."""
        began_s = time.monotonic()
        looked = [storage for storage in guard.planned if storage in self._fingerprints]
        if not looked:
            return set()
        with self._device.stalling(Cause.LOOK):
            before = [self._fingerprints[storage] for storage in looked]
            changed = differing(before, [fingerprint(storage.data) for storage in looked])
        self._took(began_s)
        return {storage for storage, is_other in zip(looked, changed, strict=True) if is_other}

    def _took(self, began_s: float) -> None:
        now_s = time.monotonic()
        self._again_s = max(self._again_s, now_s) + SELDOM * (now_s - began_s)


def _counts(guard: Guard) -> _Counts:
    return versions(guard.counted), [storage.epoch for storage in guard.planned]
