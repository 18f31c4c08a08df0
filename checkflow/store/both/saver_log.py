"""What went wrong when no trainer was there to hear it: written down for the next one, in the store or beside it."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from checkflow.store.format.regular_file import open_regular
from checkflow.store.libc import birth_ns
from checkflow.text import plain

LOG = "saver.log"
MAX_TOLD = 20  # lines of a log
_MAX_BYTES = 2**16


def write_log(store: Path, directory_fd: int, messages: Sequence[str]) -> None:
    """`store`: its path when it was attached; `directory_fd`: the directory itself. Never raises."""
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    text = "".join(f"{when} saver {os.getpid()}: {plain(message)}\n" for message in messages).encode()
    try:
        _append(LOG, text, directory_fd)
    except OSError:
        name = f"saver-{_of_directory(directory_fd)}-{_of_path(store)}.log"
        for folder in _folders(make=True):
            with contextlib.suppress(OSError):
                _append(os.fspath(folder / name), text)
                return


def take_log(store: Path, directory_fd: int) -> tuple[str, ...]:
    """What former savers had nobody to tell, of this directory or of one that was at this path; removed by this."""
    lines = _take(LOG, directory_fd)
    for folder in _folders(make=False):
        found = set[Path]()
        with contextlib.suppress(OSError):  # it cannot be listed now; what is there stays for the next
            for pattern in (f"saver-{_of_directory(directory_fd)}-*.log", f"saver-*-{_of_path(store)}.log"):
                found.update(folder.glob(pattern))
        for path in sorted(found):
            lines += _take(os.fspath(path))
    return tuple(lines)


def _folders(*, make: bool) -> Iterator[Path]:
    """Where a log may be put that the store does not take; each only if nobody else can write to it."""
    home = os.environ.get("XDG_STATE_HOME", "")
    bases = [Path(home)] if home.startswith("/") else []
    with contextlib.suppress(RuntimeError):  # a user without a home
        bases.append(Path.home() / ".local" / "state")
    own = [base / "checkflow" for base in bases]
    own += [Path(base) / f"checkflow-{os.geteuid()}" for base in (tempfile.gettempdir(), "/dev/shm")]
    for folder in dict.fromkeys(own):
        with contextlib.suppress(OSError):
            if make:
                folder.mkdir(mode=0o700, parents=folder.name == "checkflow", exist_ok=True)
            information = folder.lstat()
            others_write = stat.S_IMODE(information.st_mode) & 0o022
            if stat.S_ISDIR(information.st_mode) and information.st_uid == os.geteuid() and not others_write:
                yield folder


def _append(path: str, text: bytes, directory_fd: int | None = None) -> None:
    fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666, dir_fd=directory_fd)
    try:
        left = memoryview(text)
        while left:
            left = left[os.write(fd, left) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _take(path: str, directory_fd: int | None = None) -> list[str]:
    try:
        with os.fdopen(open_regular(path, os.O_RDONLY, dir_fd=directory_fd), "rb") as log:
            lines = log.read(_MAX_BYTES).decode(errors="replace").splitlines()
        os.unlink(path, dir_fd=directory_fd)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{path} cannot be read and removed ({error.strerror}); remove it"]
    more = [f"... and {len(lines) - MAX_TOLD} lines more"] if len(lines) > MAX_TOLD else []
    return [*(plain(line) for line in lines[:MAX_TOLD]), *more]


def _of_directory(fd: int) -> str:
    """Of no other directory, ever: the number of one that was removed is given again, with a later birth."""
    information = os.fstat(fd)
    return f"{information.st_dev:x}.{information.st_ino:x}.{birth_ns(fd):x}"


def _of_path(store: Path) -> str:
    return xxhash.xxh3_64_hexdigest(os.fsencode(store))
