"""Which checkpoint the ranks of a training upload next: one at a time, the same on each.

    each rank:            says that it is free, once it is and every rank has verified one that is newer
    the last to say so:   chooses: the oldest that is to be kept, or else the newest
    each rank:            uploads its part, and says that the bucket has it; or that it cannot, and is free again
    once all have it:     each rank removes what is older there than retention holds

So no rank is ever ahead by more than one upload, and the bucket always has one of which it has every part.
"""

from __future__ import annotations

from collections import deque
from functools import partial

from checkflow.distributed.agreement import Agreement
from checkflow.distributed.marks import Mark
from checkflow.store.both.messages import UploadedReport
from checkflow.store.trainer.bucket_process import BucketProcess

_ON_NO_DISK = 0
_LATEST = 100  # that every rank has verified, of which older ones are on no disk any more


class Turns:
    """Of one rank. `poll` is called by the thread that trains; what ranks agree on comes in another one."""

    def __init__(self, agreement: Agreement, process: BucketProcess) -> None:
        self._agreement = agreement
        self._process = process
        self._number = 0  # of turns that this rank came to
        self._is_free = True
        self._uploading: Mark | None = None
        self._last = Mark(0, 0)  # that was chosen
        self._serials: dict[Mark, int] = {}  # on this disk, of what every rank has verified; oldest first
        self._kept: set[Mark] = set()
        self._verified: deque[tuple[Mark, int]] = deque()  # told by the other thread, as are these two
        self._chosen: deque[Mark] = deque()
        self._there: deque[Mark] = deque()
        agreement.on_whole = lambda mark, serial: self._verified.append((mark, serial))

    def keep(self, iteration: int) -> None:
        """It is to be in the bucket, whatever overtakes it."""
        self._kept.add(Mark(self._agreement.attempt, iteration))

    def poll(self) -> None:
        """Say what this rank is ready for, and have done what was agreed on. Never waits."""
        while self._verified:
            mark, serial = self._verified.popleft()
            self._serials[mark] = serial
            if len(self._serials) > _LATEST:
                del self._serials[next(iter(self._serials))]
        while self._there:
            if (known := self._serials.get(self._there.popleft())) is not None:
                self._process.may_prune(known)
        while self._process.done:
            if isinstance(self._process.done.popleft(), UploadedReport) and (done := self._uploading) is not None:
                self._agreement.all_say("uploaded", str(done), partial(self._there.append, done))
            self._uploading, self._is_free = None, True
        while self._chosen and max(self._serials, default=Mark(0, 0)) >= self._chosen[0]:  # else it is yet to be told
            self._last = self._uploading = self._chosen.popleft()
            self._kept = {mark for mark in self._kept if mark > self._last}
            self._process.upload(self._serials.get(self._last, _ON_NO_DISK))
        newer = sorted(mark for mark in self._serials if mark > self._last)
        if self._is_free and newer:
            self._number, self._is_free = self._number + 1, False
            wanted = next((mark for mark in newer if mark in self._kept), newer[-1])
            self._agreement.choose("uploads", f"{self._number}", lambda: str(wanted), self._choose)

    def _choose(self, name: str) -> None:
        self._chosen.append(Mark.parse(name))
