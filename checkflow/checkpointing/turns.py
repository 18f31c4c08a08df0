"""Which checkpoint the ranks of a training upload next: one at a time, the same on each.

    each rank:            says that it is free, once it is and every rank has verified one that is newer
    the last to say so:   chooses: the oldest that is to be kept, or else the newest
    each rank:            uploads its part, and says that the bucket has it; or that it cannot; and is free again
    once all have it:     each rank removes what is older there than retention holds
    once one cannot:      the others remove their parts of it

So no rank is ever ahead by more than one upload, and from the first turn on that all come through the bucket has one of
which it has every part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from checkflow.distributed.agreement import Agreement
from checkflow.distributed.marks import Mark
from checkflow.store.both.messages import UploadedReport
from checkflow.store.trainer.bucket_process import BucketProcess

_ON_NO_DISK = 0
_LATEST = 100  # that every rank has verified, of which older ones are on no disk any more


class Turns:
    """Of one rank. `poll` is called by the thread that trains; what ranks agree on comes in another one."""

    def __init__(self, agreement: Agreement, process: BucketProcess, notify: Callable[[str], None]) -> None:
        self._agreement = agreement
        self._process = process
        self._notify = notify
        self._turn = 0  # the last one that this rank came to
        self._is_free = True
        self._is_over = False  # there will be no more turns
        self._uploading: Mark | None = None
        self._last = Mark(0, 0)  # that was chosen
        self._serials: dict[Mark, int] = {}  # on this disk, of what every rank has verified; oldest first
        self._kept: set[Mark] = set()
        self._verified: deque[tuple[Mark, int]] = deque()  # told by the other thread, as are these two
        self._chosen: deque[Mark | None] = deque()
        self._ruled: deque[tuple[Mark, bool]] = deque()  # whether the bucket has every rank's part
        agreement.on_whole = lambda mark, serial: self._verified.append((mark, serial))

    def keep(self, iteration: int) -> None:
        """It is to be in the bucket, whatever overtakes it."""
        self._kept.add(Mark(self._agreement.attempt, iteration))

    @property
    def verified_attempt(self) -> int:
        """The last one of which every rank has verified a checkpoint, as far as was told; -1: of none."""
        told = (mark for mark, _ in tuple(self._verified))
        return max((mark.attempt for mark in (*self._serials, *told)), default=-1)

    def poll(self) -> None:
        """Say what this rank is ready for, and have done what was agreed on. Never waits."""
        while self._verified:
            mark, serial = self._verified.popleft()
            self._serials[mark] = serial
            if len(self._serials) > _LATEST:
                del self._serials[next(iter(self._serials))]
        while self._ruled:
            mark, is_whole = self._ruled.popleft()
            if (known := self._serials.get(mark)) is not None:
                self._process.settle(known, is_whole=is_whole)
        while self._process.done:
            self._ends(is_there=isinstance(self._process.done.popleft(), UploadedReport))
        if self._process.is_over:  # which it has said itself
            self._give_up()
        elif not self._is_over:
            self._go_on()

    def _ends(self, *, is_there: bool) -> None:
        if (mark := self._uploading) is None:
            return
        if is_there:
            self._agreement.uploaded(mark, lambda is_whole: self._ruled.append((mark, is_whole)))
        else:
            self._agreement.not_uploaded(mark)
        self._uploading, self._is_free = None, True

    def _give_up(self) -> None:
        """There is no later turn, and what was chosen in this one the others have for nothing."""
        if not self._is_over:
            self._is_over = True
            self._agreement.choosing_no_more(self._turn + 1)
        if self._uploading is not None:
            self._agreement.not_uploaded(self._uploading)
            self._uploading = None
        while self._chosen:
            if (chosen := self._chosen.popleft()) is not None:
                self._agreement.not_uploaded(chosen)

    def _go_on(self) -> None:
        if self._chosen and self._is_known(self._chosen[0]):
            chosen = self._chosen.popleft()
            if chosen is None:
                self._is_over = True
                self._notify("another rank uploads no more, so that no newer checkpoint will be whole in the bucket")
                return
            self._last = self._uploading = chosen
            self._kept = {mark for mark in self._kept if mark > chosen}
            self._process.upload(self._serials.get(chosen, _ON_NO_DISK))
        if self._is_free and (newer := sorted(mark for mark in self._serials if mark > self._last)):
            self._turn, self._is_free = self._turn + 1, False
            wanted = next((mark for mark in newer if mark in self._kept), newer[-1])
            self._agreement.choosing(self._turn, wanted, self._chosen.append)

    def _is_known(self, chosen: Mark | None) -> bool:
        """Else it is yet to be told that all have verified it, which is never told of what too many others overtook."""
        newer = sum(mark > chosen for mark in self._serials) if chosen is not None else 0
        return chosen is None or chosen in self._serials or newer >= _LATEST // 2
