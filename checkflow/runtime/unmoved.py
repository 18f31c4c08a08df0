"""State that no action moves: what the iteration does not write, and what does not lie where the plan has it.

Whether the former changed is told by version counters, which know nothing of a write through NumPy's memory, by another
process or by an extension. So its bytes are looked at now and then, and more often where NumPy or another process could
write: what changed uncounted is then copied for each checkpoint, and waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import torch

from checkflow.runtime.binding import Binding, BoundStorage
from checkflow.runtime.counters import Cause, Counters
from checkflow.runtime.device import Batch, Device
from checkflow.runtime.in_flight import InFlight
from checkflow.runtime.slot_map import SlotMap
from checkflow.state.memory import differing, fingerprint, is_lent
from checkflow.state.names import StateName
from checkflow.torch_internals import foreach_copy

FIRST_LOOKS = 3  # at the first checkpoints
SELDOM, OFTEN = 100, 50  # then looks take a hundredth of the time; a fiftieth of it where somebody else may write


class Unmoved:
    """Copies it into slots when an iteration has ended, and knows what each slot has of it.

    `late`: tensors of the checkpoint whose host state was just captured. `tell`: told what is written uncounted.
    """

    def __init__(
        self,
        device: Device,
        counters: Counters,
        late: Callable[[], Mapping[StateName, torch.Tensor]],
        tell: Callable[[str], None],
    ) -> None:
        self._device = device
        self._counters = counters
        self._late = late
        self._tell = tell
        self._known: dict[str, tuple[tuple[int, ...], torch.Tensor]] = {}  # fingerprint by storage, of which version
        self._uncounted: set[str] = set()  # storages that are written, and count it not
        self._looks = 0
        self._seldom_s = self._often_s = 0.0  # when it is looked again
        self._lent: tuple[Binding | None, list[BoundStorage]] = None, []  # where somebody else may write
        self._told: set[str] = set()  # storages that actions leave out bytes of
        self._statics: dict[tuple[int, str], tuple[int, ...]] = {}  # (slot, storage) -> version that the slot holds

    def forget(self) -> None:
        """No slot is known to hold any of it."""
        self._statics.clear()
        self._known.clear()

    def forget_slot(self, slot: int) -> None:
        """Another process has written it."""
        self._statics = {key: version for key, version in self._statics.items() if key[0] != slot}

    def look(self, binding: Binding) -> None:
        """An iteration has ended: what was written since the last time is another version, counted or not."""
        now_s = time.monotonic()
        self._looks += 1
        if self._looks <= FIRST_LOOKS or now_s >= self._seldom_s:
            static = [storage for storage in binding.storages.values() if not storage.written]
            self._lent = binding, [storage for storage in static if is_lent(storage.data)]
            self._seldom_s = now_s + SELDOM * self._compare(static)
        elif self._lent[0] is binding and self._lent[1] and now_s >= self._often_s:
            self._often_s = now_s + OFTEN * self._compare(self._lent[1])
        if self._uncounted:
            for storage in binding.storages.values():
                if storage.name in self._uncounted:
                    storage.epoch += 1

    def _compare(self, storages: list[BoundStorage]) -> float:
        """With what they were. The seconds that it took."""
        if not storages:
            return 0.0
        began_s = time.monotonic()
        known: list[tuple[BoundStorage, torch.Tensor, torch.Tensor]] = []
        with self._device.stalling(Cause.LOOK):
            for storage in storages:
                if storage.name not in self._uncounted:
                    before, version, now = self._known.get(storage.name), storage.version(), fingerprint(storage.data)
                    self._known[storage.name] = version, now
                    if before is not None and before[0] == version:
                        known.append((storage, before[1], now))
            if known:
                changed = differing([before for _, before, _ in known], [now for _, _, now in known])
                for (storage, _, _), is_other in zip(known, changed, strict=True):
                    if is_other:
                        self._found(storage)
        return time.monotonic() - began_s

    def _found(self, storage: BoundStorage) -> None:
        self._uncounted.add(storage.name)
        self._tell(
            f"{storage.name}: is written uncounted (.data, NumPy's memory, another process, an extension, a CUDA "
            "graph); read when each iteration ends, which training waits for"
        )

    def copy(self, checkpoint: InFlight, slots: SlotMap, binding: Binding) -> int:
        """What lies beside the device, and what the slot has not as it is now; the bytes of that.

        What the iteration does not write goes into each slot once, and again when it changed. What it writes, and
        actions leave out bytes of, is read at each iteration's end: no checkpoint is sealed over a hole.
        """
        for storage in slots.lacking:
            if storage.name not in self._told:
                self._told.add(storage.name)
                self._tell(f"{storage.name}: the schedule leaves out bytes of it; read when each iteration ends")
        if hosted := slots.hosted(checkpoint.slot):
            foreach_copy(*hosted.lists, non_blocking=False)
        changed: list[BoundStorage] = []
        for storage in binding.storages.values():
            if not storage.written or storage in slots.lacking:
                key, version = (checkpoint.slot.index, storage.name), storage.version()
                if storage.written or self._statics.get(key) != version:
                    changed.append(storage)
                    checkpoint.checks[storage] = version
                    self._statics[key] = version
        if changed:
            event = self._device.offload(Batch(c for s in changed for c in slots.of_storage(checkpoint.slot, s)))
            checkpoint.last = event
            for storage in changed:
                storage.reading = event
            if any(storage.name in self._uncounted or is_lent(storage.data) for storage in changed):
                self._device.wait(event, Cause.UNWATCHED)  # no guard will
                for storage in changed:
                    checkpoint.checks.pop(storage)
        return sum(storage.data.numel() for storage in changed)

    def copy_loose(self, filled: Iterable[tuple[InFlight, SlotMap]], binding: Binding) -> None:
        """State that does not lie where the plan has it, element by element; returns when it is there.

        What was copied early to its place in the slot has been waited for: by the rebinding that found it gone, or to
        release its snapshot.
        """
        late = self._late()
        if not binding.loose and not late:
            return
        started = time.perf_counter_ns()
        for checkpoint, slots in filled:
            slots.copy_loose(checkpoint.slot)
            for name, tensor in late.items():
                slots.copy_now(checkpoint.slot, name, tensor)
            for live in binding.loose:
                self._statics.pop((checkpoint.slot.index, live.name), None)
        self._counters.stalled(Cause.UNWATCHED, time.perf_counter_ns() - started)
