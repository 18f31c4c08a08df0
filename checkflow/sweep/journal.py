"""What a sweep has found, kept as it comes: one JSON line an answer, with all that it depends on.

A line that is torn or not understood is as if it were not there. Data that a model reads when it runs, and versions of
libraries other than torch, are not seen.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import TracebackType

from pydantic import TypeAdapter, ValidationError

from checkflow import hardware
from checkflow.errors import InputError, remedy
from checkflow.jsonfile import check_no_device, digest_of
from checkflow.sources import PACKAGE
from checkflow.sweep.cells import Answer, Question, Strict, cell_of, question_of
from checkflow.sweep.traces import Files, digest, file_of


class JournalEntry(Strict):
    """One line: an answer, and the exact state of what made it."""

    checkflow: str  # version, and digest of its source
    torch: str
    profile: str  # digest of the device's profile; "" where a graph had its own times
    files: Files  # of the user's, absolute paths
    answer: Answer


_BEGINNING = b'{"checkflow":'  # of each line
_READER = TypeAdapter(JournalEntry)
Profiles = Mapping[Question, hardware.Profile | None]


def read_journal(path: Path, questions: Iterable[Question], profiles: Profiles) -> dict[Question, Answer]:
    """The answers to these questions that are in a journal and hold for what is there now.

    Raises InputError where the journal is there and cannot be read.
    """
    try:
        check_no_device(path)
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); {remedy(error, 'give another --journal', 'read')}"
        ) from None
    wanted, now = set(questions), cache(digest)
    found: dict[Question, Answer] = {}
    for line in lines:
        try:
            entry = _READER.validate_json(line)
        except ValidationError:
            continue
        question = question_of(entry.answer)
        if question in wanted and _holds(entry, question, profiles[question], now):
            found[question] = entry.answer
    return found


def _holds(
    entry: JournalEntry, question: Question, profile: hardware.Profile | None, digest_now: Callable[[Path], str]
) -> bool:
    model = file_of(cell_of(question).model)
    return (
        entry.checkflow == checkflow_version()
        and entry.torch == torch_version()
        and entry.profile == profile_digest(profile)
        and (model is None or str(model) in dict(entry.files))
        and all(digest_now(Path(path)) == then for path, then in entry.files)
    )


class Journal:
    """Appends to a journal. As a context; raises InputError where that cannot be done."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Journal:
        try:
            self._stream = self._path.open("a+b")
            if self._stream.tell():
                self._stream.seek(0)
                self._check(self._stream.readline(len(_BEGINNING)))
                self._stream.seek(-1, 2)
                if self._stream.read(1) != b"\n":  # a line torn by a kill stays alone
                    self._stream.write(b"\n")
        except OSError as error:
            raise InputError(
                f"{self._path}: cannot be written ({error.strerror}); {remedy(error, 'give another --journal')}"
            ) from None
        return self

    def _check(self, beginning: bytes) -> None:
        """Raises InputError for a file of something else. A torn entry is one, and so is one of another checkflow."""
        if not (_BEGINNING.startswith(beginning.rstrip(b"\n")) and beginning.strip()):
            self._close()
            raise InputError(f"{self._path}: is no journal of a sweep, and stays as it is; give another --journal")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # each answer was written when it came, or that it could not be was told
            self._stream.close()

    def keep(self, answer: Answer, profile: hardware.Profile | None, files: Files) -> None:
        """Append one answer. Failures are not kept: they are tried again."""
        if answer.failed:
            return
        entry = JournalEntry(
            checkflow=checkflow_version(),
            torch=torch_version(),
            profile=profile_digest(profile),
            files=files,
            answer=answer,
        )
        try:
            self._stream.write(entry.model_dump_json().encode() + b"\n")
            self._stream.flush()
        except OSError as error:
            raise InputError(
                f"{self._path}: cannot be written ({error.strerror}); {remedy(error, 'check the disk')}, and go on"
            ) from None


@cache
def torch_version() -> str:
    """As installed: nothing else here needs torch itself."""
    return version("torch")


@cache
def checkflow_version() -> str:
    """The version with a digest of the source, which changes between versions while it is worked on."""
    content = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        content.update(f"{path.relative_to(PACKAGE)}\0".encode() + path.read_bytes() + b"\0")
    return f"{version('checkflow')}+{content.hexdigest()[:16]}"


def profile_digest(profile: hardware.Profile | None) -> str:
    """Digest of a profile's figures."""
    return digest_of(profile.model_dump(mode="json")) if profile else ""
