"""Checkpoints on disk: list them, verify them, read them. No byte is handed out before its hash matched."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from checkflow.errors import CorruptStoreError, StoreError
from checkflow.store.format.blocks import Block, Way, buffer_of, open_file, read_files
from checkflow.store.format.layout import padded
from checkflow.store.format.manifest import (
    KEPT,
    MANIFEST,
    RECORD,
    Manifest,
    directory_name,
    max_manifest_bytes,
    parse_directory_name,
    parse_manifest,
)
from checkflow.store.format.ranks import no_store
from checkflow.store.format.regular_file import is_scarcity, read_at
from checkflow.store.format.tensor_file import check_header, contents_of, header_bytes

MAX_ENTRIES = 10_000  # names in one checkpoint's directory
result = TypeVar("result")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose manifest is sound; its files are not verified by that."""

    path: Path
    manifest: Manifest

    @property
    def serial(self) -> int:
        return self.manifest.serial

    @property
    def iteration(self) -> int:
        return self.manifest.iteration

    @property
    def kept(self) -> bool:
        """Whether retention never removes it."""
        return self.manifest.keep or (self.path / KEPT).exists()


@dataclass(frozen=True, slots=True)
class SkippedCheckpoint:
    """A checkpoint that is not what was written, and why in a few words."""

    path: Path
    serial: int
    iteration: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path.name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint's verified bytes: each safetensors file, and the commit record."""

    checkpoint: Checkpoint
    files: dict[str, memoryview]
    record: bytes


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest checkpoint that verifies, None for an empty store, and why newer ones were skipped."""

    checkpoint: Checkpoint | None
    skipped: tuple[SkippedCheckpoint, ...]


@dataclass(frozen=True, slots=True)
class LoadedNewest:
    """The newest checkpoint that verifies, read; None for an empty store, and why newer ones were skipped."""

    loaded: Loaded | None
    skipped: tuple[SkippedCheckpoint, ...]


def list_checkpoints(store: Path) -> tuple[Checkpoint | SkippedCheckpoint, ...]:
    """Every checkpoint of a store, newest first, manifests checked but not the files. Raises StoreError."""
    with nothing_is_scarce(store):
        examined = [examine(store, name) for name in checkpoint_names(store)]
    return tuple(found for found in examined if not is_gone(found.path))  # a running trainer prunes


def sound_checkpoints(store: Path) -> Iterator[Checkpoint]:
    """Those whose manifest is sound, newest first; none is looked at before it is asked for. Raises StoreError."""
    for name in checkpoint_names(store):
        with nothing_is_scarce(store):
            found = examine(store, name)
        if isinstance(found, Checkpoint):
            yield found


def is_gone(path: Path) -> bool:
    """Whether nothing has this name any more; not where that cannot be told."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


@contextmanager
def nothing_is_scarce(store: Path) -> Iterator[None]:
    """A checkpoint that cannot be read for want of something is not a wrong one: StoreError."""
    try:
        yield
    except (OSError, MemoryError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or "out of memory"
        raise StoreError(
            f"{store}: cannot be read now ({why}); free memory, or allow more open files, and try again"
        ) from None


def verify(checkpoint: Checkpoint, progress: Callable[[], None] = lambda: None) -> None:
    """Read every byte of a checkpoint from the device, and look into each file for tensors.

    Raises CorruptStoreError that names the first wrong file, OSError where something is scarce.
    """
    with _directory(checkpoint.path) as directory:
        read_files(directory, checkpoint.manifest.files, progress=progress)
        for entry in checkpoint.manifest.tensor_files:
            fd = open_file(directory, entry.name)
            try:
                length = header_bytes(entry.name, read_at(fd, 0, 8), entry.size_bytes)
                check_header(entry.name, read_at(fd, 8, length), entry.size_bytes - 8 - length)
            finally:
                os.close(fd)


def verify_written(
    checkpoint: Checkpoint, progress: Callable[[], None] = lambda: None, *, to_cache: bool = False
) -> None:
    """As `verify`, of a checkpoint just written: its manifest too has to be on the device as it is here.

    `to_cache`: read through the page cache, emptied of it before, and leave it there.
    """
    expected = checkpoint.manifest.render()
    with _directory(checkpoint.path) as directory:
        with os.fdopen(open_file(directory, MANIFEST), "rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # the page cache would prove nothing
            if stream.read(len(expected) + 1) != expected:
                raise CorruptStoreError(f"{MANIFEST}: is not what was written")
        way = Way.DEVICE_TO_CACHE if to_cache else Way.DEVICE
        read_files(directory, checkpoint.manifest.files, progress=progress, way=way)


def newest(store: Path, iteration: int | None = None) -> Newest:
    """The newest checkpoint that verifies (of that iteration, if given).

    Raises CorruptStoreError where there are checkpoints and none verifies, StoreError for a path that is no store or
    an iteration that it does not have.
    """
    found, skipped = _first(store, iteration, _verified)
    return Newest(found, skipped)


def load_newest(store: Path, iteration: int | None = None, buffer: memoryview | None = None) -> LoadedNewest:
    """As `newest`, and `load` in the same pass over the disk."""
    found, skipped = _first(store, iteration, lambda checkpoint: load(checkpoint, buffer))
    return LoadedNewest(found, skipped)


def load(checkpoint: Checkpoint, buffer: memoryview | None = None) -> Loaded:
    """Read a whole checkpoint, all or nothing, each file into memory of its own or all into one page-aligned buffer.

    Each file begins at a multiple of 4096 of the buffer, in the manifest's order, as in a slot. Raises
    CorruptStoreError, StoreError for a buffer that is too small, and OSError where something is scarce.
    """
    manifest = checkpoint.manifest
    found: dict[str, memoryview] = {}

    def targets() -> Callable[[Block], memoryview]:  # called before memory is taken on the manifest's word alone
        found.update(_places(checkpoint, buffer))
        return lambda block: found[block.entry.name][block.start_bytes :]

    with _directory(checkpoint.path) as directory:
        read_files(directory, manifest.files, targets, way=Way.ANYWHERE)
    contents = {file.name: found[file.name][: file.size_bytes] for file in manifest.files}
    record = bytes(contents.pop(RECORD))
    for name, data in contents.items():
        contents_of(name, data)  # raises for what has no tensors: an older checkpoint is better than that
    return Loaded(checkpoint, contents, record)


def _places(checkpoint: Checkpoint, buffer: memoryview | None) -> dict[str, memoryview]:
    """Memory for each file, with room to the next multiple of 4096."""
    places = {RECORD: buffer_of(checkpoint.manifest.entry(RECORD).size_bytes)}
    end = 0
    for file in checkpoint.manifest.files:
        if file.name == RECORD:
            continue
        start, end = end, end + padded(file.size_bytes)
        places[file.name] = buffer_of(file.size_bytes) if buffer is None else buffer[start:end]
    if buffer is not None and len(buffer) < end:
        raise StoreError(f"{checkpoint.path}: needs {end} bytes, the buffer has {len(buffer)}; give a larger one")
    return places


def read_file(checkpoint: Checkpoint, name: str) -> memoryview:
    """One verified file. Raises CorruptStoreError, OSError where something is scarce."""
    entry = checkpoint.manifest.entry(name)
    found: list[memoryview] = []

    def targets() -> Callable[[Block], memoryview]:
        found.append(buffer_of(entry.size_bytes))
        return lambda block: found[0][block.start_bytes :]

    with _directory(checkpoint.path) as directory:
        read_files(directory, [entry], targets, way=Way.ANYWHERE)
    return found[0][: entry.size_bytes]


def _verified(checkpoint: Checkpoint) -> Checkpoint:
    verify(checkpoint)
    return checkpoint


def _first(
    store: Path, iteration: int | None, attempt: Callable[[Checkpoint], result]
) -> tuple[result | None, tuple[SkippedCheckpoint, ...]]:
    skipped: list[SkippedCheckpoint] = []
    names = checkpoint_names(store)
    wanted = [name for name in names if iteration is None or _iteration(name) == iteration]
    if names and not wanted:
        has = ", ".join(sorted({str(_iteration(name)) for name in names}, key=int))
        raise StoreError(f"{store}: has no checkpoint of iteration {iteration}; it has {has}")
    for name in wanted:
        with nothing_is_scarce(store):  # else an older one would be taken for want of a descriptor
            examined = examine(store, name)
            if isinstance(examined, SkippedCheckpoint):
                skipped.append(examined)
                continue
            try:
                return attempt(examined), tuple(skipped)
            except CorruptStoreError as error:
                skipped.append(SkippedCheckpoint(examined.path, examined.serial, examined.iteration, str(error)))
    if skipped:
        reasons = "; ".join(map(str, skipped[:3])) + (f"; and {len(skipped) - 3} more" if len(skipped) > 3 else "")
        raise CorruptStoreError(f"{store}: no checkpoint verifies ({reasons}); restore the store from a copy")
    return None, ()


def checkpoint_names(store: Path) -> list[str]:
    """The names of a store's checkpoints, newest first. Raises StoreError."""
    try:
        found = [(parse_directory_name(name), name) for name in os.listdir(store)]  # noqa: PTH208 (only the names)
    except (OSError, ValueError) as error:
        raise no_store(store, error) from None
    if parse_directory_name(store.name) is not None and (store / MANIFEST).is_file():
        raise StoreError(f"{store}: is one checkpoint of a store; give the store, {store.parent}")
    return [name for parsed, name in sorted(((p.serial, n) for p, n in found if p is not None), reverse=True)]


def _iteration(name: str) -> int:
    parsed = parse_directory_name(name)
    assert parsed is not None
    return parsed.iteration


def examine(store: Path, name: str) -> Checkpoint | SkippedCheckpoint:
    """A checkpoint by its directory's name, its manifest checked but not its files.

    Raises OSError where something is scarce.
    """
    path = store / name
    try:
        return Checkpoint(path, _read_manifest(path))
    except CorruptStoreError as error:
        parsed = parse_directory_name(name)
        assert parsed is not None
        return SkippedCheckpoint(path, parsed.serial, parsed.iteration, str(error))


def _read_manifest(path: Path) -> Manifest:
    with _directory(path) as directory:
        data_bytes = files = 0
        with os.scandir(directory) as entries:
            for entry in entries:
                files += 1
                if files > MAX_ENTRIES:
                    raise CorruptStoreError(f"holds more than {MAX_ENTRIES} files")
                information = entry.stat(follow_symlinks=False)
                data_bytes += information.st_size if stat.S_ISREG(information.st_mode) else 0
        fd = open_file(directory, MANIFEST)
        with os.fdopen(fd, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > max_manifest_bytes(data_bytes - size, files):
                raise CorruptStoreError(f"{MANIFEST}: its {size} bytes are more than its files can need")
            data = stream.read(size)
        try:
            manifest = parse_manifest(data)
        except CorruptStoreError as error:
            raise CorruptStoreError(f"{MANIFEST}: {error}") from None
    if directory_name(manifest.serial, manifest.iteration) != path.name:
        raise CorruptStoreError(f"{MANIFEST}: belongs to {directory_name(manifest.serial, manifest.iteration)}")
    return manifest


@contextmanager
def _directory(path: Path) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if is_scarcity(error):
            raise
        why = "it is a link" if path.is_symlink() else error.strerror
        raise CorruptStoreError(f"is no directory that can be read ({why})") from None
    try:
        yield fd
    except OSError as error:
        if is_scarcity(error):
            raise
        raise CorruptStoreError(f"cannot be read ({error.strerror})") from None
    finally:
        os.close(fd)
