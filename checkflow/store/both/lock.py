"""One writer at a time: byte locks, the trainer's and its saver's, both on the store's directory and on its `lock`.

Those on the directory hold whatever is done to the files in it: who deletes `lock` lets nobody in. Those on `lock`
reach other machines, where the file system has such locks. The trainer's refuses a second trainer; the saver's, which
the saver inherits, makes the next trainer wait until a dead trainer's last checkpoint is on disk. The file also names
the processes, for messages only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from checkflow.errors import StoreBusyError, StoreError, remedy
from checkflow.interrupts import let_through
from checkflow.store.both.bytelocks import is_held, take, take_of_directory
from checkflow.store.both.filesystem import refuse_or_tell
from checkflow.store.both.held import is_still, same
from checkflow.store.format.disk import LocalDisk
from checkflow.store.format.regular_file import open_regular
from checkflow.streams import open_closed
from checkflow.text import plain

LOCK = "lock"
_OWN_FDS = Path("/proc/self/fd")
TRAINER, SAVER = 0, 1
_TRIES = 100  # a store that is moved away while it is taken is looked for again

_Pid = Annotated[int, Field(gt=0, lt=2**31)]


@dataclass(frozen=True, slots=True)
class LockHolder:
    """Who holds, or held, the store."""

    host: str
    trainer_pid: _Pid
    saver_pid: _Pid | None = None


_HOLDER = TypeAdapter(LockHolder)


class StoreLock:
    """All locks, held. Close releases them, except the saver's while a saver has inherited them."""

    def __init__(self, trainer: _Descriptors, saver: _Descriptors) -> None:
        self._trainer = trainer
        self._saver = saver
        self.name_holder(None)

    @property
    def directory_fd(self) -> int:
        """The store's, to be inherited by the saver: what was locked, whatever its path is later."""
        return self._saver.directory_fd

    @property
    def path(self) -> Path:
        """Where that directory is now."""
        return path_of(self.directory_fd)

    @property
    def saver_fd(self) -> int:
        """Of `lock`, to be inherited by the saver."""
        return self._saver.file_fd

    @classmethod
    def acquire(
        cls,
        store: Path,
        notify: Callable[[str], None],
        timeout_s: float | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> StoreLock:
        """Take the store, made if there is none. Waits for the previous run's saver, having said so to `tell`, which is
        `notify` unless given.

        Raises StoreBusyError that names the other trainer, or the saver that did not end within `timeout_s`, and
        StoreError where the store cannot be written.
        """
        if not _OWN_FDS.is_dir():
            raise StoreError(f"{store}: /proc is not mounted, by which a store that was moved is found; mount it")
        open_closed()
        _make(store)
        for _ in range(_TRIES):
            with contextlib.ExitStack() as opened:
                trainer, saver = _Descriptors.open(store), _Descriptors.open(store)
                opened.callback(trainer.close)
                opened.callback(saver.close)
                if not trainer.take_as_trainer():
                    raise StoreBusyError(_busy(store))
                _wait_for_saver(store, saver, tell or notify, timeout_s)
                if not (trainer.are_of(store) and saver.are_of(store)):
                    continue  # moved away, or the file deleted, since it was opened
                for line in refuse_or_tell(store, saver.directory_fd, trainer.file_fd):
                    notify(line)
                opened.pop_all()
                return cls(trainer, saver)
        raise StoreError(f"{store}: somebody keeps replacing it; choose another store")

    def name_holder(self, saver_pid: int | None) -> None:
        """Write who holds the store; a message's detail only, so that failing to is no error."""
        text = _HOLDER.dump_json(LockHolder(socket.gethostname(), os.getpid(), saver_pid))
        if self._trainer.has_file:
            with contextlib.suppress(OSError):
                os.pwrite(self._trainer.file_fd, text, 0)
                os.ftruncate(self._trainer.file_fd, len(text))

    def close(self) -> None:
        """Release the trainer's lock, and the saver's unless one runs."""
        if self._trainer.has_file:
            with contextlib.suppress(OSError):
                os.ftruncate(self._trainer.file_fd, 0)
        self.disown()

    def disown(self) -> None:
        """Close the descriptors, as a forked child does; whoever else has them still holds the store."""
        self._trainer.close()
        self._saver.close()


@dataclass(slots=True)
class _Descriptors:
    """The store's directory and its `lock`, opened for one of the two locks."""

    directory_fd: int
    file_fd: int
    _opened: tuple[os.stat_result, os.stat_result]  # what they are of

    @classmethod
    def open(cls, store: Path) -> _Descriptors:
        try:
            directory_fd = os.open(store, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise StoreError(
                f"{store}: cannot be opened ({error.strerror}); {remedy(error, 'choose another store')}"
            ) from None
        try:
            file_fd = open_lock(directory_fd)
            return cls(directory_fd, file_fd, (os.fstat(directory_fd), os.fstat(file_fd)))
        except OSError as error:
            os.close(directory_fd)
            if error.errno in (errno.ELOOP, errno.ENOTSUP, errno.ENXIO, errno.EISDIR):
                raise StoreError(
                    f"{store / LOCK}: cannot be opened ({error.strerror}); remove it, and a new one is made"
                ) from None
            raise StoreError(
                f"{store}: cannot be written ({error.strerror}); {remedy(error, 'choose another store or its rights')}"
            ) from None

    def take_as_trainer(self) -> bool:
        """The file's first: of two that come at once one has it, where of the directory's none might."""
        return take(self.file_fd, TRAINER) and take_of_directory(self.directory_fd, TRAINER)

    def take_as_saver(self) -> bool:
        """The directory's first: a saver that is waited for may have to put the file back, and lock it."""
        return take_of_directory(self.directory_fd, SAVER) and take(self.file_fd, SAVER)

    def are_of(self, store: Path) -> bool:
        try:
            return same(store.stat(), os.fstat(self.directory_fd)) and same(
                os.stat(LOCK, dir_fd=self.directory_fd, follow_symlinks=False), os.fstat(self.file_fd)
            )
        except OSError:
            return False

    @property
    def has_file(self) -> bool:
        """Whether nobody closed it, and opened another file that has its number now."""
        return is_still(self.file_fd, self._opened[1])

    def close(self) -> None:
        for fd, opened in zip((self.directory_fd, self.file_fd), self._opened, strict=True):
            if fd >= 0 and is_still(fd, opened):
                os.close(fd)
        self.directory_fd = self.file_fd = -1


def path_of(directory_fd: int) -> Path:
    """A path to an open directory: where it is now, or its descriptor where none leads to it; of a removed one, where
    it was."""
    if not os.fstat(directory_fd).st_nlink:
        return _as_known(directory_fd)
    return found_at(directory_fd) or _OWN_FDS / str(directory_fd)


def found_at(directory_fd: int) -> Path | None:
    """Where an open directory is now. None where its path leads elsewhere: something is mounted over it, or its file
    system was unmounted."""
    where = _as_known(directory_fd)
    with contextlib.suppress(OSError):
        if same(where.stat(), os.fstat(directory_fd)):
            return where
    return None


def _as_known(directory_fd: int) -> Path:
    """The path that the kernel has for it, which knows nothing of mounts that came later."""
    return (_OWN_FDS / str(directory_fd)).readlink()


def open_lock(directory_fd: int) -> int:
    """A descriptor of a store's `lock`, made if there is none. Raises OSError."""
    fd = open_regular(LOCK, os.O_RDWR | os.O_CREAT, 0o600, dir_fd=directory_fd)
    with contextlib.suppress(OSError):  # not ours, or without rights here
        _for_writers_only(fd, directory_fd)
    return fd


def _for_writers_only(fd: int, directory_fd: int) -> None:
    """Who can read the file can hold its locks: that is for who may write to the store."""
    writers = os.fstat(directory_fd).st_mode & 0o022
    mode = 0o600 | writers | writers << 1
    if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
        os.fchmod(fd, mode)


def _make(store: Path) -> None:
    missing = [folder for folder in (store, *store.parents) if not os.path.lexists(folder)]
    disk = LocalDisk()
    try:
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):  # ranks of one job make it at the same time
                disk.make_directory(folder)
            disk.sync_directory(folder.parent)
    except OSError as error:
        raise StoreError(
            f"{store}: cannot be made ({error.strerror}); {remedy(error, 'choose another store')}"
        ) from None


def _wait_for_saver(store: Path, saver: _Descriptors, tell: Callable[[str], None], timeout_s: float | None) -> None:
    started = time.monotonic()
    told = False
    while not saver.take_as_saver():
        if not told:
            tell(_waits_for(store))
            told = True
        if timeout_s is not None and time.monotonic() - started > timeout_s:
            who = _saver_of(store)
            raise StoreBusyError(f"{store}: the previous run's saver, {who}, did not end in {timeout_s:g} s; end it")
        _pause()


def writer_of(store: Path) -> str:
    """A line on the saver that still writes to a directory which is to be read; "" where nobody does.

    Nothing is locked: several may look at once. Raises StoreBusyError where a trainer writes to it.
    """
    with contextlib.ExitStack() as opened:
        fds: list[int] = []
        with contextlib.suppress(OSError):  # what cannot be opened cannot be read either
            fds.append(os.open(store, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            opened.callback(os.close, fds[0])
            fds.append(open_regular(LOCK, os.O_RDONLY, dir_fd=fds[0]))
            opened.callback(os.close, fds[1])
        if any(_is_held(fd, TRAINER) for fd in fds):
            raise StoreBusyError(_busy(store))
        return _waits_for(store) if any(_is_held(fd, SAVER) for fd in fds) else ""


def await_writer(store: Path) -> None:
    """Until nobody writes to it any more. Raises as `writer_of` does."""
    while writer_of(store):
        _pause()


def _is_held(fd: int, byte: int) -> bool:
    try:
        return is_held(fd, byte)
    except OSError:  # no such locks
        return False


def _pause() -> None:
    time.sleep(0.02)
    let_through()


def _waits_for(store: Path) -> str:
    return f"{store}: waiting for the previous run's saver, {_saver_of(store)}, to finish its last checkpoint"


def _saver_of(store: Path) -> str:
    holder = _holder(store)
    return "a process" if holder is None else f"process {holder.saver_pid} on {holder.host}"


def _busy(store: Path) -> str:
    holder = _holder(store)
    if holder is None:
        return f"{store}: another trainer writes to it; end that one, or give each run its own store"
    who = f"process {holder.trainer_pid} on {holder.host}"
    if holder.host == socket.gethostname() and not _alive(holder.trainer_pid):
        return f"{store}: {who} has ended, but a process that it forked still holds the store; end that one"
    advice = "end that one, or give each run its own store"
    if (holder.host, holder.trainer_pid) == (socket.gethostname(), os.getpid()):
        advice = (
            "that is this process: close() the Checkpointer that it has, as `with attach(...)` does at its end; where "
            "nothing refers to that any more, start the process again"
        )
    return f"{store}: another trainer, {who}, writes to it; {advice}"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _holder(store: Path) -> LockHolder | None:
    try:
        fd = open_regular(store / LOCK, os.O_RDONLY)
        try:
            holder = _HOLDER.validate_json(os.read(fd, 4096))
        finally:
            os.close(fd)
    except (OSError, ValidationError):
        return None
    return dataclasses.replace(holder, host=plain(holder.host, 64))


def check_is_store(store: Path) -> None:
    """Of a directory without checkpoints: raises StoreError where it has other things and no `lock`, which each store
    has from its first trainer on. An empty one may become a store."""
    if not (store / LOCK).exists() and any(store.iterdir()):
        raise StoreError(f"{store}: is no store, it has no checkpoint and no file {LOCK!r}; check the path")
