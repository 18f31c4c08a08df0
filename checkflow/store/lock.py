"""One writer at a time: two byte locks on the store's `lock` file, one for the trainer and one for its saver.

They are open-file-description locks: the kernel drops them with the last descriptor, whatever the process died of. The
trainer's lock refuses a second trainer; the saver's, which the saver inherits, makes the next trainer wait until a dead
trainer's last checkpoint is on disk. The file also names the processes, for messages only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import socket
import stat
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from checkflow.errors import StoreBusyError, StoreError
from checkflow.store.disk import LocalDisk
from checkflow.store.interrupts import let_through
from checkflow.store.opening import open_regular
from checkflow.text import plain

LOCK = "lock"
_TRAINER, _SAVER = 0, 1
_FLOCK = "@hhqqi"  # struct flock: type, whence, start, length, pid (0 for these locks)


_Pid = Annotated[int, Field(gt=0, lt=2**31)]


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds, or held, the store."""

    host: str
    trainer_pid: _Pid
    saver_pid: _Pid | None = None


_HOLDER = TypeAdapter(Holder)


class StoreLock:
    """Both locks, held. Close releases them, except the saver's while a saver has inherited it."""

    def __init__(self, store: Path, trainer_fd: int, saver_fd: int) -> None:
        self._store = store
        self.trainer_fd = trainer_fd
        self.saver_fd = saver_fd
        self.name_holder(None)

    @classmethod
    def acquire(cls, store: Path, notify: Callable[[str], None], timeout_s: float | None = None) -> StoreLock:
        """Take the store, made if there is none. Waits for the previous run's saver, having said so.

        Raises StoreBusyError that names the other trainer, or the saver that did not end within `timeout_s`, and
        StoreError where the store cannot be written.
        """
        _make(store)
        trainer_fd = _open(store)
        saver_fd = -1
        try:
            if not _take(trainer_fd, _TRAINER):
                raise StoreBusyError(_busy(store))
            saver_fd = _open(store)
            _wait_for_saver(store, saver_fd, notify, timeout_s)
            return cls(store, trainer_fd, saver_fd)
        except BaseException:
            os.close(trainer_fd)
            if saver_fd >= 0:
                os.close(saver_fd)
            raise

    def name_holder(self, saver_pid: int | None) -> None:
        """Write who holds the store; a message's detail only, so that failing to is no error."""
        text = _HOLDER.dump_json(Holder(socket.gethostname(), os.getpid(), saver_pid))
        with contextlib.suppress(OSError):
            os.pwrite(self.trainer_fd, text, 0)
            os.ftruncate(self.trainer_fd, len(text))

    def close(self) -> None:
        """Release the trainer's lock, and the saver's unless one runs."""
        with contextlib.suppress(OSError):
            os.ftruncate(self.trainer_fd, 0)
        self.disown()

    def disown(self) -> None:
        """Close the descriptors, as a forked child does; whoever else has them still holds the store."""
        for fd in (self.trainer_fd, self.saver_fd):
            if fd >= 0:
                os.close(fd)
        self.trainer_fd = self.saver_fd = -1


def _make(store: Path) -> None:
    missing = [folder for folder in (store, *store.parents) if not os.path.lexists(folder)]
    disk = LocalDisk()
    try:
        for folder in reversed(missing):
            disk.make_directory(folder)
            disk.sync_directory(folder.parent)
    except OSError as error:
        raise StoreError(f"{store}: cannot be made ({error.strerror}); choose another store") from None


def _open(store: Path) -> int:
    try:
        fd = open_regular(store / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        where = f"{LOCK}: " if error.errno in (errno.ELOOP, errno.ENOTSUP, errno.ENXIO, errno.EISDIR) else ""
        raise StoreError(
            f"{store}: cannot be written ({where}{error.strerror}); choose another store or its rights"
        ) from None
    with contextlib.suppress(OSError):  # not ours, or without rights here
        _for_writers_only(fd, store)
    return fd


def _for_writers_only(fd: int, store: Path) -> None:
    """Who can read the file can hold its locks: that is for who may write to the store."""
    writers = store.stat().st_mode & 0o022
    mode = 0o600 | writers | writers << 1
    if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
        os.fchmod(fd, mode)


def _take(fd: int, byte: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise StoreError(f"lock: the file system refuses locks ({error.strerror}); choose another store") from None
    return True


def _wait_for_saver(store: Path, fd: int, notify: Callable[[str], None], timeout_s: float | None) -> None:
    started = time.monotonic()
    told = False
    while not _take(fd, _SAVER):
        holder = _holder(store)
        who = f"process {holder.saver_pid} on {holder.host}" if holder is not None else "a process"
        if not told:
            notify(f"{store}: waiting for the previous run's saver, {who}, to finish its last checkpoint")
            told = True
        if timeout_s is not None and time.monotonic() - started > timeout_s:
            raise StoreBusyError(f"{store}: the previous run's saver, {who}, did not end in {timeout_s:g} s; end it")
        time.sleep(0.02)
        let_through()


def _busy(store: Path) -> str:
    holder = _holder(store)
    if holder is None:
        return f"{store}: another trainer writes to it; give each run its own store"
    who = f"process {holder.trainer_pid} on {holder.host}"
    if holder.host == socket.gethostname() and not _alive(holder.trainer_pid):
        return f"{store}: {who} has ended, but a process that it forked still holds the store; end that one"
    advice = "end that one, or give each run its own store"
    if (holder.host, holder.trainer_pid) == (socket.gethostname(), os.getpid()):
        advice = "that is this process: close() the Checkpointer that it has"
    return f"{store}: another trainer, {who}, writes to it; {advice}"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _holder(store: Path) -> Holder | None:
    try:
        fd = open_regular(store / LOCK, os.O_RDONLY)
        try:
            holder = _HOLDER.validate_json(os.read(fd, 4096))
        finally:
            os.close(fd)
    except (OSError, ValidationError):
        return None
    return dataclasses.replace(holder, host=plain(holder.host, 64))
