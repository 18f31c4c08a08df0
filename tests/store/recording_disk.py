"""A disk that loses power: it records every operation, and tells every state the device may be left in.

The model: a file's data and size are those of its last sync, plus any subset of the writes (in units of 4096 bytes) and
allocations since; a directory's names are those of its last sync, plus any subset of the changes since, and a rename is
two such changes, so that after it both names, one or none may be there.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from checkflow.store.format.disk import LocalDisk

UNIT_BYTES = 4096
State = tuple[tuple[str, bytes | None], ...]  # each path, sorted; None for a directory


@dataclass(frozen=True)
class DataChange:
    """A write of up to one unit, or (data None) a change of the size to `offset`."""

    inode: int
    offset: int
    data: bytes | None


@dataclass(frozen=True)
class NameChange:
    """In a directory's inode, a name is given to an inode, or (None) taken away."""

    directory: int
    name: str
    inode: int | None


@dataclass(frozen=True)
class SyncData:
    inode: int


@dataclass(frozen=True)
class SyncNames:
    directory: int


@dataclass(frozen=True)
class Told:
    """The saver said that an iteration is durable."""

    iteration: int


Event = DataChange | NameChange | SyncData | SyncNames | Told


@dataclass
class RecordingDisk(LocalDisk):
    """Does everything on the real disk too, so that the code under test can go on."""

    root: Path
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._inodes: dict[Path, int] = {self.root: 0}
        self._open: dict[int, int] = {}
        self.directories = {0}
        self._next = itertools.count(1)

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        self._inodes[path] = next(self._next)
        self.directories.add(self._inodes[path])
        self.events.append(NameChange(self._inodes[path.parent], path.name, self._inodes[path]))

    def create(self, path: Path, *, direct: bool) -> int:
        fd = super().create(path, direct=direct)
        self._inodes[path] = self._open[fd] = next(self._next)
        self.events.append(NameChange(self._inodes[path.parent], path.name, self._inodes[path]))
        return fd

    def allocate(self, fd: int, size_bytes: int) -> None:
        super().allocate(fd, size_bytes)
        self.events.append(DataChange(self._open[fd], size_bytes, None))

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        wrote = super().write(fd, data, offset)
        for start in range(0, wrote, UNIT_BYTES):
            unit = bytes(data[start : min(start + UNIT_BYTES, wrote)])
            self.events.append(DataChange(self._open[fd], offset + start, unit))
        return wrote

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.events.append(SyncData(self._open[fd]))

    def close(self, fd: int) -> None:
        super().close(fd)
        del self._open[fd]

    def link(self, source: Path, target: Path) -> None:
        super().link(source, target)
        self._inodes[target] = self._inodes[source]
        self.events.append(NameChange(self._inodes[target.parent], target.name, self._inodes[source]))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        parent, inode = self._inodes[source.parent], self._inodes.pop(source)
        for path in [path for path in self._inodes if source in path.parents]:
            self._inodes[target / path.relative_to(source)] = self._inodes.pop(path)
        self._inodes[target] = inode
        self.events += [NameChange(parent, target.name, inode), NameChange(parent, source.name, None)]

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self.events.append(SyncNames(self._inodes[path]))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._inodes.pop(path)
        self.events.append(NameChange(self._inodes[path.parent], path.name, None))

    def remove_directory(self, path: Path) -> None:
        super().remove_directory(path)
        self._inodes.pop(path)
        self.events.append(NameChange(self._inodes[path.parent], path.name, None))

    def told(self, iteration: int) -> None:
        self.events.append(Told(iteration))

    def states(self, after: int, most: int, choose: random.Random) -> Iterator[State]:
        """What the device may hold if the power goes after so many events; all of it, or `most` of it drawn."""
        events = self.events[:after]
        loose = [number for number, event in enumerate(events) if _may_be_lost(event, events[number + 1 :])]
        for kept in _subsets(len(loose), most, choose):
            lost = {number for keep, number in zip(kept, loose, strict=True) if not keep}
            yield self._build([event for number, event in enumerate(events) if number not in lost])

    def _build(self, events: Sequence[Event]) -> State:
        data: dict[int, bytearray] = {}
        names: dict[int, dict[str, int]] = {}
        for event in events:
            if isinstance(event, DataChange):
                content = data.setdefault(event.inode, bytearray())
                end = event.offset if event.data is None else max(len(content), event.offset + len(event.data))
                content.extend(bytes(max(0, end - len(content))))
                if event.data is None:
                    del content[event.offset :]
                else:
                    content[event.offset : event.offset + len(event.data)] = event.data
            elif isinstance(event, NameChange):
                entries = names.setdefault(event.directory, {})
                if event.inode is None:
                    entries.pop(event.name, None)
                else:
                    entries[event.name] = event.inode
        return tuple(sorted(self._walk(0, "", names, data)))

    def _walk(
        self, directory: int, prefix: str, names: dict[int, dict[str, int]], data: dict[int, bytearray]
    ) -> Iterator[tuple[str, bytes | None]]:
        for name, inode in names.get(directory, {}).items():
            if inode in self.directories:
                yield prefix + name, None
                yield from self._walk(inode, f"{prefix}{name}/", names, data)
            else:
                yield prefix + name, bytes(data.get(inode, b""))


def _may_be_lost(event: Event, later: Sequence[Event]) -> bool:
    if isinstance(event, DataChange):
        return SyncData(event.inode) not in later
    return isinstance(event, NameChange) and SyncNames(event.directory) not in later


def _subsets(count: int, most: int, choose: random.Random) -> Iterator[tuple[bool, ...]]:
    """Which of `count` changes reached the device: all ways, or none, all, each alone, each missing, and some drawn."""
    if 2**count <= most:
        yield from itertools.product((False, True), repeat=count)
        return
    found = {(False,) * count, (True,) * count}
    for one in range(count):
        found |= {tuple(number == one for number in range(count)), tuple(number != one for number in range(count))}
    while len(found) < most:
        found.add(tuple(choose.random() < 0.5 for _ in range(count)))
    yield from sorted(found)
