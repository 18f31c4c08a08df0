"""Waiting for a slot to fill."""

from __future__ import annotations

import time
from collections.abc import Callable

from checkflow.errors import StoreError
from checkflow.store.memory.shared_memory import SharedMemory
from checkflow.store.memory.trainer_slots import Slot, Slots
from checkflow.store.trainer.rulings import Rulings
from checkflow.store.trainer.status import Tally
from checkflow.store.trainer.supervisor import Supervisor

REPLICA_LOOK_S = 1e-3


class Waiting:
    """What training waits for is counted as blocked."""

    def __init__(
        self,
        shared: SharedMemory,
        slots: Slots,
        saver: Supervisor,
        tally: Tally,
        rulings: Rulings | None,
    ) -> None:
        self._shared = shared
        self._slots = slots
        self._saver = saver
        self._tally = tally
        self._rulings = rulings

    def for_memory(self, lane: int) -> Slot | None:
        """One whose memory is still on its way; None where none is."""
        started = time.monotonic_ns()
        slot, more = None, True
        while slot is None and more:  # tried once more at the end: the last memory may have come before the wait
            more = self._shared.pages.wait_for_more()
            slot = self._slots.try_acquire(lane)
        self._tally.blocked_ns += time.monotonic_ns() - started
        return slot

    def for_slot(self, lane: int, completed: int | None, poll: Callable[[], None]) -> Slot | None:
        """One that the saver has persisted, or that every rank has, or the replica. None where no saver runs, it hangs,
        or memory is refused; or where other ranks would have to go beyond the iterations that this one has `completed`,
        and wait for it. `poll` is called meanwhile, and may raise. Raises StoreError where none will be free.
        """
        started = time.monotonic_ns()
        try:
            while True:
                # Asked first: who has done in between what is waited for has freed a slot, which the next look finds.
                pending, of_replica, of_ranks = (
                    self._slots.pending, self._slots.awaits_replica, self._slots.awaits_agreement,
                )  # fmt: skip
                slot = self._slots.try_acquire(lane)
                if slot is not None or self._saver.is_lost or self._saver.hangs:
                    return slot
                if not pending and self._shared.pages.refused:
                    return None
                if of_replica:
                    time.sleep(REPLICA_LOOK_S)
                    poll()
                    continue
                if not pending and not of_ranks:
                    raise StoreError("slots: all are being filled; stage or abandon one before acquiring another")
                if not pending and self._rulings is not None:
                    if completed is not None and self._rulings.awaits_this_rank(completed):
                        return None
                    self._rulings.check(time.monotonic_ns() - started)
                self._saver.wait(0.05)
                poll()
        finally:
            self._tally.blocked_ns += time.monotonic_ns() - started
