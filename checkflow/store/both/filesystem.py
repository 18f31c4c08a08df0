"""File systems that somebody else implements: a server, or a program (FUSE). What the store needs of one is tried."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from checkflow.errors import StoreError
from checkflow.store.both.bytelocks import take
from checkflow.store.format.disk import LocalDisk, remove_tree
from checkflow.text import plain

NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "orangefs", "wekafs", "virtiofs"}
)
_TRIED = b"checkflow"


@dataclass(frozen=True, slots=True)
class Mount:
    """As the kernel's table says: "nfs4" or "fuse.sshfs", where it comes from, and how it was mounted."""

    kind: str
    source: str
    options: frozenset[str]

    @property
    def is_fuse(self) -> bool:
        return self.kind.split(".")[0] in ("fuse", "fuseblk")

    @property
    def is_remote(self) -> bool:
        return self.kind in NETWORK

    @property
    def locks_are_local(self) -> bool:
        """Whether its locks do not reach other machines."""
        return bool(self.options & {"nolock", "local_lock=all", "local_lock=posix", "nobrl"})


def mount_of(fd: int) -> Mount | None:
    """Where an open file or directory is; None where the kernel does not tell."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        told = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
        number = next(line.split()[1] for line in told if line.startswith("mnt_id:"))
        for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
            here, _, there = line.partition(" - ")
            if here.split()[0] == number:
                kind, source, options = [*there.split(), ""][:3]
                return Mount(kind, source, frozenset((*here.split()[5].split(","), *options.split(","))))
    return None


def refuse_or_tell(store: Path, directory_fd: int, lock_fd: int) -> tuple[str, ...]:
    """What a person should know of the store's file system; nothing of one in this machine's kernel.

    The trainer's byte of `lock_fd` is locked. Raises StoreError where the file system lacks what the store needs.
    """
    mount = mount_of(directory_fd)
    if mount is None or not (mount.is_fuse or mount.is_remote):
        return ()
    what = plain(f"{mount.kind} ({mount.source})", 200)
    missing = _missing(directory_fd, lock_fd)
    if missing is not None:
        raise StoreError(f"{store}: its file system, {what}, {missing}; choose a store on another one")
    owner = "program" if mount.is_fuse else "server"
    lines = [f"{store}: is on {what}: what is durable or verified is so as far as its {owner} tells the truth"]
    if mount.locks_are_local or mount.is_fuse:
        lines.append(f"{store}: locks of {what} may not reach other machines: let none of them train into this store")
    return tuple(lines)


def _missing(directory_fd: int, lock_fd: int) -> str | None:
    """What it cannot do, though it was tried."""
    again = os.open(f"/proc/self/fd/{lock_fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if take(again, 0):
            return "gives one lock to two"
    finally:
        os.close(again)
    store, disk = Path(f"/proc/self/fd/{directory_fd}"), LocalDisk()
    before, after = (store / f"{prefix}tried-{os.getpid()}" for prefix in (".incomplete-", ".pruned-"))
    try:
        disk.make_directory(before)
        fd = disk.create(before / "file", direct=False)
        try:
            disk.write(fd, memoryview(_TRIED), 0)
            disk.sync(fd)
        finally:
            disk.close(fd)
        disk.sync_directory(before)
        disk.rename(before, after)
        disk.sync_directory(store)
        moved = not before.exists() and (after / "file").read_bytes() == _TRIED
    except OSError as error:
        return f"cannot write, sync and rename a directory ({error.strerror})"
    finally:
        for path in (before, after):
            with contextlib.suppress(OSError):
                remove_tree(disk, path)
    return None if moved else "does not rename a directory as a whole"
