"""State that no action moves: what the iteration does not write, and what does not lie where the plan has it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import torch

from checkflow.runtime.binding import Binding, BoundStorage
from checkflow.runtime.counters import Cause, Counters
from checkflow.runtime.device import Batch, Device
from checkflow.runtime.in_flight import InFlight
from checkflow.runtime.slot_map import SlotMap
from checkflow.state.names import StateName
from checkflow.torch_internals import foreach_copy


class Unmoved:
    """Copies it into slots when an iteration has ended, and knows what each slot has of it.

    `late`: tensors of the checkpoint whose host state was just captured.
    """

    def __init__(
        self, device: Device, counters: Counters, late: Callable[[], Mapping[StateName, torch.Tensor]]
    ) -> None:
        self._device = device
        self._counters = counters
        self._late = late
        self._statics: dict[tuple[int, str], tuple[int, ...]] = {}  # (slot, storage) -> version that the slot holds

    def forget(self) -> None:
        """No slot is known to hold any of it."""
        self._statics.clear()

    def forget_slot(self, slot: int) -> None:
        """Another process has written it."""
        self._statics = {key: version for key, version in self._statics.items() if key[0] != slot}

    def copy(self, checkpoint: InFlight, slots: SlotMap, binding: Binding) -> int:
        """What lies beside the device, and what the slot has not as it is now; the bytes of that.

        What the iteration does not write goes into each slot once, and again when it changed.
        """
        if hosted := slots.hosted(checkpoint.slot):
            foreach_copy(*hosted.lists, non_blocking=False)
        changed: list[BoundStorage] = []
        for storage in binding.storages.values():
            if not storage.written:
                key, version = (checkpoint.slot.index, storage.name), storage.version()
                if self._statics.get(key) != version:
                    changed.append(storage)
                    checkpoint.checks[storage] = version
                    self._statics[key] = version
        if changed:
            event = self._device.offload(Batch(c for s in changed for c in slots.of_storage(checkpoint.slot, s)))
            checkpoint.last = event
            for storage in changed:
                storage.reading = event
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
