"""Objects below a URL, by obstore: the calls that are made, what each promises, and one line for what goes wrong.

obstore is imported where a bucket is opened: without one nobody needs it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from checkflow.errors import InputError, remedy
from checkflow.store.bucket.folder import folder_of
from checkflow.store.format.manifest import BLOCK_BYTES
from checkflow.text import plain

if TYPE_CHECKING:
    from obstore.store import ObjectStore

RETRY_S = 10.0  # by obstore, of one request; who calls has patience for more
PART_S = 120.0  # so that 70 kB/s are enough for one
SMALL_S = 20.0  # of any other request
PART_BYTES = 2 * BLOCK_BYTES
MOST_PARTS = 9_000  # S3 takes 10 000
PARTS_AT_ONCE = 4
BLOCKS_AT_ONCE = 16  # of a download, that many are in memory
_NOISE = re.compile(r"^Generic \w+ error: |\?[^\s:]+| in [\d.]+\w*s(?=[, ])|, after \d+ retries, [^-]*?\s*(?= - )")
_NO = re.compile(
    r"NoSuchBucket|status code: 4(?!04|08|12|29)\d\d"
)  # not: no such object, too slow, is there, too often

_SAY_NO = (PermissionError, NotADirectoryError, FileExistsError)  # of the directory of a bucket


class BucketError(Exception):
    """A request failed, in one line.

    Attributes:
        is_refused: the bucket answers, and says no: there is none of this name, or it is not for us.
        is_missing: there is no such object.
    """

    def __init__(self, message: str, *, is_refused: bool = False, is_missing: bool = False) -> None:
        super().__init__(plain(message, 300))
        self.is_refused = is_refused
        self.is_missing = is_missing


@dataclass(frozen=True, slots=True)
class Objects:
    """What lies below a URL, by names that begin there. Each call raises BucketError, and may be made again.

    Attributes:
        folder: where it lies, where that is a directory: made by what is put there, and by nothing that only reads.
    """

    url: str
    folder: Path | None
    _over_network: tuple[ObjectStore, ObjectStore] | None  # for small requests, and for parts

    @classmethod
    def open(cls, url: str) -> Objects:
        """Nothing is asked of it yet. Raises InputError for what is no URL of a bucket, and without obstore."""
        try:
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError as error:
            raise InputError(f"bucket: {url} needs obstore ({error}); pip install 'checkflow[bucket]'") from None
        if url.startswith("memory:"):
            raise InputError(f"bucket: {url} is this process's alone; give a URL such as s3://bucket/prefix")
        if (folder := folder_of(url)) is not None:
            return cls(url, folder, None)
        try:
            small, large = (
                from_url(
                    url,
                    retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=RETRY_S)},
                    client_options={"timeout": timedelta(seconds=limit_s), "allow_http": True},  # as the endpoint says
                )
                for limit_s in (SMALL_S, PART_S)
            )
        except (BaseError, ValueError, OSError) as error:
            raise InputError(f"bucket: {url}: {first_line(error)}; give a URL such as s3://bucket/prefix") from None
        return cls(url, None, (small, large))

    @property
    def to_check(self) -> str:
        """What is looked at first where it says no."""
        return "its name, and the credentials" if self.folder is None else "its path, and who may read what is below it"

    def make(self) -> None:
        """What is uploaded has a place from here on. Raises InputError."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = remedy(error, "choose another directory")
            raise InputError(f"bucket: {self.url}: cannot be made ({error.strerror}); {what}") from None

    def check_there(self) -> None:
        """Raises BucketError for a directory that nobody has made."""
        with _told():
            self._at()

    def _at(self, *, in_parts: bool = False, makes: bool = False) -> ObjectStore:
        """Asked for by each request: a directory may come, and go, between two."""
        from obstore.store import LocalStore

        if self._over_network is not None:
            return self._over_network[in_parts]
        assert self.folder is not None
        if makes:
            self.folder.mkdir(parents=True, exist_ok=True)
        os.stat(f"{self.folder}/.")  # noqa: PTH116 (a Path has no dot, and of a file there is none)
        return LocalStore(self.folder)

    def below(self, name: str) -> Objects:
        """What lies below that name."""
        return Objects.open(f"{self.url.rstrip('/')}/{name}")

    def sizes(self) -> dict[str, int]:
        """Every object and its size in bytes, none where there is no directory yet. Whoever asks after an object was
        put sees it.

        An answer of somebody else, such as a login page, reads as a listing of nothing; it raises BucketError, too.
        """
        import obstore

        try:
            with _told():
                found = {meta["path"]: meta["size"] for page in obstore.list(self._at()) for meta in page}
        except BucketError as error:
            if error.is_missing and self.folder is not None:
                return {}
            raise
        if not found and self._has(f"{secrets.token_hex(8)}.absent"):
            raise BucketError(f"{self.url}: has even what nobody put there, so that it is no bucket")
        return found

    def _has(self, name: str) -> bool:
        """Whether it can be read: what is refused cannot."""
        with contextlib.suppress(BucketError):
            self.read(name)
            return True
        return False

    def read(self, name: str) -> bytes:
        """A small object whole."""
        import obstore

        with _told():
            return bytes(obstore.get(self._at(), name).bytes())

    def blocks(self, name: str, size_bytes: int) -> Iterator[bytes]:
        """A large one in blocks of 4 MiB, the last one shorter."""
        import obstore

        starts = range(0, size_bytes, BLOCK_BYTES)
        for first in range(0, len(starts), BLOCKS_AT_ONCE):
            some = starts[first : first + BLOCKS_AT_ONCE]
            with _told():
                found = obstore.get_ranges(
                    self._at(in_parts=True),
                    name,
                    starts=some,
                    ends=[min(start + BLOCK_BYTES, size_bytes) for start in some],
                )
            yield from map(bytes, found)

    def block(self, name: str, number: int, size_bytes: int) -> bytes:
        """One of them by itself."""
        import obstore

        start = number * BLOCK_BYTES
        with _told():
            return bytes(
                obstore.get_range(self._at(in_parts=True), name, start=start, end=min(start + BLOCK_BYTES, size_bytes))
            )

    def put(self, name: str, blocks: Iterator[bytes], size_bytes: int) -> None:
        """Whole or not at all; in parts where it is larger than one. What `blocks` raises is raised."""
        import obstore

        if size_bytes <= PART_BYTES:
            data = b"".join(blocks)
            with _told():
                obstore.put(self._at(in_parts=True, makes=True), name, data)
            return
        part_bytes = max(PART_BYTES, -(-size_bytes // MOST_PARTS))
        with _told():
            obstore.put(
                self._at(in_parts=True, makes=True), name, blocks, chunk_size=part_bytes, max_concurrency=PARTS_AT_ONCE
            )

    def put_new(self, name: str, data: bytes) -> bool:
        """Whether there was none of this name: of several who come at once, one puts it."""
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with _told():
            try:
                obstore.put(self._at(makes=True), name, data, mode="create")
            except AlreadyExistsError:
                return False
        return True

    def remove(self, names: Sequence[str]) -> None:
        """Some may be gone before others; one that is not there is as good as removed."""
        import obstore

        for name in names:
            with _told(), contextlib.suppress(FileNotFoundError):
                obstore.delete(self._at(), name)

    def remove_directory(self, name: str) -> None:
        """What a directory still has when all below this name was removed; over a network there is nothing."""
        if self.folder is not None:
            with contextlib.suppress(OSError):  # somebody else's are in it
                (self.folder / name).rmdir()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

    try:
        yield
    except (BaseError, OSError) as error:  # what is not found is a FileNotFoundError to obstore
        said = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
        no = isinstance(error, (*_SAY_NO, PermissionDeniedError, UnauthenticatedError)) or _NO.search(said) is not None
        is_missing = isinstance(error, FileNotFoundError) and not no
        raise BucketError(said, is_refused=no, is_missing=is_missing) from None


def first_line(error: Exception) -> str:
    """Of several paragraphs, the last for obstore's developers. Left out are queries, how long it took and how often it
    was tried, and the XML that a server sent, but for its code."""
    line = str(error).split("\n\nDebug source")[0]
    if "http://169.254.169.254/" in line:  # where a machine of a cloud tells its role
        return "there are no credentials in the environment, and this machine has no role"
    text, _, document = line.partition("<?xml")
    code = document.partition("<Code>")[2].partition("</Code>")[0]
    text = _NOISE.sub("", text).strip().rstrip(":")
    return f"{text} {code}".strip()
