"""What a saver holds of its store: the directory that was locked, whatever its path is now, and the `lock` in it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

from checkflow.errors import StoreError
from checkflow.store.both.bytelocks import take
from checkflow.store.both.held import same
from checkflow.store.both.lock import LOCK, SAVER, TRAINER, found_at, open_lock


class HeldStore:
    """Looked at before the store is changed. The saver works in the directory, so its path is of no consequence."""

    def __init__(self, store: Path, directory_fd: int, lock_fd: int) -> None:
        self._store = store
        self._directory_fd = directory_fd
        self._lock_fd = lock_fd
        self._for_trainer_fd = -1
        self._where: Path | None = store  # None: nowhere that anybody finds

    def look(self, tell: Callable[[str], None], *, trainer_lives: bool) -> None:
        """Tell once where the store is, if it is not at its path; put back a `lock` that was deleted, with its locks.

        The trainer's lock in a new `lock` is held by the saver, for as long as the trainer lives. Raises OSError where
        the directory is gone, or somebody else has a new `lock`.
        """
        if not os.fstat(self._directory_fd).st_nlink:
            raise OSError(errno.ENOENT, "the store was removed")
        self._look_at_path(tell)
        if not trainer_lives and self._for_trainer_fd >= 0:
            os.close(self._for_trainer_fd)
            self._for_trainer_fd = -1
        if self._lock_is_there():
            return
        self._put_back(trainer_lives=trainer_lives)
        tell(f"its `{LOCK}` was deleted, and is put back; no other trainer can have had the store meanwhile")

    def _look_at_path(self, tell: Callable[[str], None]) -> None:
        try:
            is_there = same(self._store.stat(), os.fstat(self._directory_fd))
        except (FileNotFoundError, NotADirectoryError):
            is_there = False
        except OSError:  # who may not look there does not know
            return
        where = self._store if is_there else found_at(self._directory_fd)
        if where == self._where:
            return
        self._where = where
        if where is None:
            tell(
                "is no longer at its path (something is mounted over it, or its file system was unmounted); this run's "
                "checkpoints still go to it, but no other run finds them: unmount what covers it, or mount it again"
            )
        elif not is_there:
            tell(f"was moved to {where}; this run's checkpoints go there from now on")

    def _lock_is_there(self) -> bool:
        try:
            there = os.stat(LOCK, dir_fd=self._directory_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return same(there, os.fstat(self._lock_fd))

    def _put_back(self, *, trainer_lives: bool) -> None:
        with contextlib.ExitStack() as opened:
            fds: list[int] = []
            for _ in range(2 if trainer_lives else 1):
                fds.append(open_lock(self._directory_fd))
                opened.callback(os.close, fds[-1])
            try:
                taken = all(take(fd, byte) for fd, byte in zip(fds, (SAVER, TRAINER), strict=False))
            except StoreError as error:
                raise OSError(errno.ENOLCK, str(error)) from None
            if not taken:
                raise OSError(errno.EBUSY, f"its `{LOCK}` was deleted, and another run has the new one")
            opened.pop_all()
        before, self._lock_fd = self._lock_fd, fds[0]
        if self._for_trainer_fd >= 0:
            os.close(self._for_trainer_fd)
        self._for_trainer_fd = fds[1] if trainer_lives else -1
        with contextlib.suppress(OSError):  # who holds the store, for messages; the disk may be full
            os.pwrite(self._lock_fd, os.pread(before, 4096, 0), 0)
        os.close(before)
