"""Objects below a URL, by obstore: the calls that are made, what each promises, and one line for what goes wrong.

obstore is imported where a bucket is opened: without one nobody needs it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from checkflow.errors import InputError, remedy
from checkflow.store.bucket.folder import folder_of
from checkflow.store.format.manifest import BLOCK_BYTES, parse_directory_name
from checkflow.store.format.ranks import parse_directory
from checkflow.text import plain

if TYPE_CHECKING:
    from obstore.store import ObjectStore

RETRY_S = 10.0  # by obstore, of one request; who calls has patience for more
PART_S = 120.0  # so that 70 kB/s are enough for one
SMALL_S = 20.0  # of any other request
PART_BYTES = 2 * BLOCK_BYTES
MOST_PARTS = 9_000  # S3 takes 10 000
PARTS_AT_ONCE = 4
BLOCKS_AT_ONCE = 8  # of a download, by one request: that many are in memory
WRITTEN = "written"  # sorts behind every other name of ours
BEFORE_OURS = "0"  # no name of ours sorts before it
_NOISE = re.compile(r"^Generic \w+ error: |\?[^\s:]+| in [\d.]+\w*s(?=[, ])|, after \d+ retries, [^-]*?\s*(?= - )")
_NO = re.compile(
    r"NoSuchBucket|AccessDenied|status code: 4(?!04|08|12|16|29)\d\d"
)  # not: no such object, too slow, is there, too short, too often

_SAY_NO = (PermissionError, NotADirectoryError, FileExistsError)  # of the directory of a bucket


class BucketError(Exception):
    """A request failed, in one line.

    Attributes:
        is_refused: the bucket answers, and says no: there is none of this name, or it is not for us.
        is_missing: there is no such object.
        remedy: what to do about it; "" where it is what helps against any refusal, or outage.
    """

    def __init__(self, message: str, *, is_refused: bool = False, is_missing: bool = False, remedy: str = "") -> None:
        super().__init__(plain(message, 300))
        self.is_refused = is_refused
        self.is_missing = is_missing
        self.remedy = remedy


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

    def remedy(self, error: BucketError) -> str:
        """What to do about a failure."""
        if error.remedy:
            return error.remedy
        if self.folder is not None:
            return "check its path, and who may read what is below it"
        return "check its name, and the credentials in the environment" if error.is_refused else "try again"

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
        """Every object that may be ours and its size in bytes, none where there is no directory yet. Whoever asks after
        an object was put sees it.

        An answer that is no listing, such as a login page, reads as one of nothing, and one that breaks off as a whole
        one. So what is uploaded to has an object with the last of all names: a listing without it is neither whole nor
        empty, and raises BucketError.
        """
        for _ in range(2):  # an uploader may put it between the two questions
            found = self._listed()
            if WRITTEN in found or not self._has(WRITTEN):
                return found
        raise BucketError(
            f"its listing does not show {WRITTEN}, which can be read: it is not whole, or what answers is no bucket",
            remedy="try again, and see what answers at its endpoint",
        )

    def _listed(self) -> dict[str, int]:
        import obstore
        from obstore.exceptions import InvalidPathError

        try:
            with _told():
                try:
                    pages = obstore.list(self._at(), offset=BEFORE_OURS)
                    return {meta["path"]: meta["size"] for page in pages for meta in page}
                except InvalidPathError:  # of somebody else's object, which may lie where nothing is ours
                    return self._walked("")
        except BucketError as error:
            if error.is_missing and self.folder is not None:
                return {}
            raise

    def _walked(self, directory: str) -> dict[str, int]:
        """The same, by a request for each directory that may be ours: no other is looked into."""
        import obstore
        from obstore.exceptions import InvalidPathError

        try:
            listed = obstore.list_with_delimiter(self._at(), directory)
        except InvalidPathError as error:
            raise BucketError(
                f"has an object whose name cannot be read ({first_line(error)})",
                is_refused=True,
                remedy="remove or rename that object",
            ) from None
        found = {meta["path"]: meta["size"] for meta in listed["objects"]}
        for path in listed["common_prefixes"]:
            name = path.rpartition("/")[2]
            if parse_directory_name(name) is not None or parse_directory(name) is not None:
                found |= self._walked(path)
        return found

    def _has(self, name: str) -> bool:
        """Whether it can be read: what is refused cannot, as where the right to list is for a prefix alone."""
        try:
            self.read(name)
        except BucketError as error:
            if error.is_missing or error.is_refused:
                return False
            raise
        return True

    def read(self, name: str) -> bytes:
        """A small object whole."""
        import obstore

        with _told():
            return bytes(obstore.get(self._at(), name).bytes())

    def blocks(self, name: str, size_bytes: int) -> Iterator[bytes]:
        """A large one in blocks of 4 MiB, the last one shorter. One may come short, or empty, where a server sends less
        than was asked for: each is compared with its hash."""
        step_bytes = BLOCKS_AT_ONCE * BLOCK_BYTES
        for first in range(0, size_bytes, step_bytes):
            some = self._range(name, first, min(first + step_bytes, size_bytes))
            for start in range(first, min(first + step_bytes, size_bytes), BLOCK_BYTES):
                yield bytes(some[start - first : start - first + BLOCK_BYTES])

    def block(self, name: str, number: int, size_bytes: int) -> bytes:
        """One of them by itself."""
        start = number * BLOCK_BYTES
        return bytes(self._range(name, start, min(start + BLOCK_BYTES, size_bytes)))

    def _range(self, name: str, start: int, end: int) -> memoryview:
        """One range by a request: obstore would cut several out of what it gets, and panic where that is short."""
        import obstore

        with _told():
            return memoryview(obstore.get_range(self._at(in_parts=True), name, start=start, end=end))

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
    except BaseException as error:
        if not _is_panic(error):
            raise
        raise BucketError(f"obstore has panicked ({first_line(error)})") from None


def _is_panic(error: BaseException) -> bool:
    """Of Rust below obstore: it is no Exception, and its class can be had in no other way."""
    return type(error).__module__ == "pyo3_runtime"


def first_line(error: BaseException) -> str:
    """Of several paragraphs, the last for obstore's developers. Left out are queries, how long it took and how often it
    was tried, and the XML that a server sent, but for its code."""
    line = str(error).split("\n\nDebug source")[0]
    if "http://169.254.169.254/" in line:  # where a machine of a cloud tells its role
        return "there are no credentials in the environment, and this machine has no role"
    text, _, document = line.partition("<?xml")
    code = document.partition("<Code>")[2].partition("</Code>")[0]
    text = _NOISE.sub("", text).strip().rstrip(":")
    return f"{text} {code}".strip()
