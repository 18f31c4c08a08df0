"""The uploader's loop: what is newest on disk goes to the bucket; when the trainer is gone, the last one, and an end.

A bucket that is out is tried again for as long as anybody trains, with what is newest then: nothing waits for it, and
nothing piles up. Where several ranks train, their trainers say what is next, so that it is the same on each.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
from collections import deque
from pathlib import Path

from checkflow.errors import CorruptStoreError, internal
from checkflow.store.both.bytelocks import is_held
from checkflow.store.both.config import BucketConfig
from checkflow.store.both.lock import LOCK, SAVER, TRAINER
from checkflow.store.both.messages import FailedReport, Message, Notice, PassedReport, RestReport, encode, send
from checkflow.store.both.retry import Patience
from checkflow.store.both.saver_log import write_log
from checkflow.store.both.words import CLOSE, DROPPED, LAST, MAX_WORD_BYTES, THERE, UPLOAD, number_in
from checkflow.store.bucket.objects import BucketError
from checkflow.store.bucket.upload import OlderError, OvertakenError, StoreThereError, Uploads
from checkflow.store.format.reader import Checkpoint
from checkflow.store.format.regular_file import open_regular

PATIENT_UPLOADS = 3  # without a word of what cannot be removed, which an outage explains by itself
LOOK_S = 1.0  # how often the store's directory is looked at


class Uploader:
    """Runs until the trainer closes or dies. `trainer` is a pidfd of it; the store is the working directory."""

    def __init__(
        self, config: BucketConfig, uploads: Uploads, end: socket.socket, trainer: int, directory_fd: int
    ) -> None:
        self._config = config
        self._uploads = uploads
        self._end = end
        self._trainer = trainer
        self._directory_fd = directory_fd
        self._patience = Patience(config.retry_s)
        self._unpruned = 0  # uploads in a row, after which nothing could be removed
        self._closing = self._orphan = self._dead = False
        self._has_all = False  # what is newest, when this ends
        self._hurries = False  # the newest is wanted, and a group is not waited for
        # of a group, serials on disk:
        self._asked: int | None = None  # what is next
        self._last_done = 0  # of what was asked for
        self._there: int | None = None  # what the bucket has every rank's part of, until older ones are removed
        self._dropped: int | None = None  # what it never will, until it is removed
        self._outbox: deque[Message] = deque()

    def run(self) -> bool:
        """Until the trainer is gone and the bucket has what is newest, or another run, or a store, has its place.

        Whether the bucket has it.
        """
        try:
            while self._next():
                pass
        except OvertakenError as error:
            if not self._orphan:  # else it is the run that goes on after this one
                self._fail(
                    f"another run uploads to it now ({error} says who), and this one no more; give each run its own"
                )
        except StoreThereError as error:
            self._fail(f"{error}; this run uploads no more")
        except Exception as error:  # noqa: BLE001 (likewise)
            self._fail(f"{internal(error)}; this run uploads no more")
        if self._orphan:
            failures = [message.message for message in self._outbox if isinstance(message, FailedReport)]
            if failures:
                write_log(self._config.store, self._directory_fd, failures)
        else:
            self._end.settimeout(1.0)  # what is left to be said is little
            self._flush()
        return self._has_all

    def _next(self) -> bool:
        """Do one thing; False at the end."""
        self._listen(0)
        ending = self._closing or self._orphan
        succeeded = self._dead and self._is_held(TRAINER)  # by the next run: one last upload, of what there is now
        # asked before it is looked what there is
        more = self._orphan and not self._closing and not succeeded and self._is_held(SAVER)
        if (ending and self._patience.exhausted) or (succeeded and self._patience.wait_s):
            return False
        if not self._patience.wait_s:
            try:
                due = self._due(all_the_same=ending or self._hurries)
            except OSError as error:
                self._put_off("the store cannot be read", error.strerror or str(error))
                return True
            if due is not None:
                self._upload(due)
                return not succeeded
            if (self._hurries or (ending and not more)) and not self._is_there():
                return True
            if ending and not more:
                self._has_all = True
                self._report(RestReport(is_end=True))
                return False
            if self._hurries:
                self._hurries = False
                self._report(RestReport(is_end=False))
            if self._there is not None and not ending:
                self._prune(self._there)
            if self._dropped is not None and not ending:
                self._drop(self._dropped)
        self._listen(math.ceil(1000 * min(LOOK_S, self._patience.wait_s or LOOK_S)))
        return True

    def _is_there(self) -> bool:
        """Whether the bucket was seen to have what it was said to have."""
        try:
            is_there = self._uploads.is_there()
        except BucketError as error:
            self._put_off("it cannot be seen whether the last checkpoint is still there", str(error))
            return False
        if is_there:
            self._recovers("it answers again")
        else:
            self._last_done = 0  # of a group what is left is due again
        return is_there

    def _due(self, *, all_the_same: bool) -> Checkpoint | None:
        """What is next; in a group, until there is no time for all to have the same, what was asked for."""
        if not self._config.grouped:
            return self._uploads.due(Path())
        if all_the_same:
            return self._uploads.left(Path(), self._last_done, self._config.in_doubt)
        if self._asked is None:
            return None
        found = self._uploads.found(Path(), self._asked)
        if found is None:
            self._pass(self._asked)
        return found

    def _pass(self, serial: int) -> None:
        if self._asked == serial:
            self._done()
            self._report(PassedReport(serial=serial))

    def _done(self) -> None:
        assert self._asked is not None
        self._last_done = self._asked
        self._asked = None

    def _upload(self, checkpoint: Checkpoint) -> None:
        try:
            report = self._uploads.upload(checkpoint, to_cache=self._closing or self._orphan)
        except OlderError:
            return
        except FileNotFoundError:  # pruned since, so there is a newer one
            self._pass(checkpoint.serial)
            return
        except CorruptStoreError as error:
            self._tell(f"{checkpoint.path.name} is not uploaded ({error}); check the disk")
            self._pass(checkpoint.serial)
            return
        except (OvertakenError, StoreThereError):
            raise
        except Exception as error:  # noqa: BLE001 (one uploader after the other would die of it, and nobody hear why)
            why = str(error) if isinstance(error, BucketError | OSError) else internal(error)
            self._put_off(f"iteration {checkpoint.iteration} cannot be uploaded", why)
            return
        self._recovers("checkpoints are uploaded again")
        self._report(report)
        if self._asked == checkpoint.serial:
            self._done()
        if not self._config.grouped:
            self._prune(None)

    def _recovers(self, what: str) -> None:
        lasted_s = self._patience.succeeds()
        if lasted_s is not None:
            self._tell(f"{what}, after {lasted_s:.0f} s")

    def _put_off(self, what: str, why: str) -> None:
        begins = self._patience.fails()
        if (self._closing or self._orphan) and self._patience.exhausted:
            self._uploads.clear()
            self._fail(f"{what} ({why}), and was tried for {self._config.retry_s:g} s; the disk has it")
        elif begins:
            self._tell(f"{what} ({why}); tried again, with what is newest then, while training goes on")

    def _prune(self, serial: int | None) -> None:
        """With the next upload it is tried again; told once where that does not help: it fills the bucket."""
        self._there = None
        try:
            self._uploads.prune(serial)
        except BucketError as error:
            self._unpruned = PATIENT_UPLOADS if error.is_refused and not self._unpruned else self._unpruned + 1
            if self._unpruned == PATIENT_UPLOADS:
                remedy = error.remedy or "give the right to list and delete objects"
                self._tell(f"old checkpoints cannot be removed ({error}); {remedy}")
        else:
            self._unpruned = 0

    def _drop(self, serial: int) -> None:
        """What cannot be removed now goes once a newer one is there."""
        self._dropped = None
        with contextlib.suppress(BucketError):
            self._uploads.drop(serial)

    def _is_held(self, byte: int) -> bool:
        """Whether a saver, or a trainer, has the store. This process has no lock: the next run need not wait for it."""
        try:
            fd = open_regular(LOCK, os.O_RDONLY, dir_fd=self._directory_fd)
        except OSError:
            return False
        try:
            return is_held(fd, byte)
        except OSError:
            return False
        finally:
            os.close(fd)

    def _listen(self, timeout_ms: int) -> None:
        """Wait for the trainer's word or end."""
        self._flush()
        poll = select.poll()
        if not self._dead:
            poll.register(self._trainer, select.POLLIN)
        if not self._orphan:
            poll.register(self._end, select.POLLIN)
        for fd, _ in poll.poll(timeout_ms):
            if fd == self._trainer:
                self._dead = True
                self._be_alone()
            else:
                self._hear()
        self._flush()

    def _hear(self) -> None:
        try:
            packet = self._end.recv(MAX_WORD_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionResetError:
            packet = b""
        if not packet:
            self._be_alone()
        elif packet == LAST:
            self._hurries = True
            self._patience.hurry()
        elif (serial := number_in(packet, UPLOAD)) is not None:
            self._asked = serial
        elif (serial := number_in(packet, THERE)) is not None:
            self._there = serial
        elif (serial := number_in(packet, DROPPED)) is not None:
            self._dropped = serial
        elif packet == CLOSE and not self._closing:
            self._closing = True
            self._patience.renew()

    def _be_alone(self) -> None:
        if not self._orphan:
            self._orphan = True
            self._patience.renew()

    def _fail(self, message: str) -> None:
        self._report(FailedReport(sequence=0, message=f"{self._config.url}: {message}"))

    def _tell(self, message: str) -> None:
        self._report(Notice(message=f"{self._config.url}: {message}"))

    def _report(self, message: Message) -> None:
        self._outbox.append(message)
        self._flush()

    def _flush(self) -> None:
        while self._outbox and not self._orphan and send(self._end, encode(self._outbox[0])):
            self._outbox.popleft()
