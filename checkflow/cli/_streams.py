"""Standard output and error as a command finds them: closed, full, read by nobody, or in a narrow encoding."""

from __future__ import annotations

import codecs
import io
import sys

from checkflow.streams import open_closed

_NEVER_RAISES = ("ignore", "replace", "backslashreplace", "xmlcharrefreplace", "namereplace")  # of Python's handlers
_ESCAPED = "checkflow.escaped"


class UnwritableError(Exception):
    """Standard output takes nothing more; its cause says why. No OSError: those of files are another matter."""

    @property
    def is_left(self) -> bool:
        """Whether its reader has what it wanted, as `head` does."""
        return isinstance(self.__cause__, BrokenPipeError)

    def __str__(self) -> str:
        why = self.__cause__.strerror if isinstance(self.__cause__, OSError) else None
        return f"standard output: cannot be written ({why}); free space, or send it elsewhere"


class _StandardOutput(io.FileIO):
    """Raises UnwritableError once. What comes then is dropped: Python writes what it has left when it ends."""

    def __init__(self) -> None:
        super().__init__(1, "wb", closefd=False)
        self._has_failed = False

    def write(self, data: memoryview, /) -> int:  # type: ignore[override]  # what the buffer above gives
        if self._has_failed:
            return data.nbytes
        try:
            return super().write(data)
        except OSError as error:
            self._has_failed = True
            raise UnwritableError from error


def _handler(given: str | None) -> str:
    """The nearest to a stream's handler of what its encoding has not that never raises."""
    if given == "surrogateescape":
        codecs.register_error(_ESCAPED, _escaped)
        return _ESCAPED
    return given if given in _NEVER_RAISES else "replace"


def _escaped(error: UnicodeError) -> tuple[str | bytes, int]:
    """As surrogateescape, which gives back the bytes of a path that is no text; "?" for any other letter."""
    assert isinstance(error, UnicodeEncodeError)
    byte = ord(error.object[error.start]) - 0xDC00
    is_byte = 0x80 <= byte <= 0xFF and not error.encoding.startswith(("utf-16", "utf-32"))  # which have no single bytes
    return bytes([byte]) if is_byte else "?", error.start + 1


def prepare() -> None:
    """Whatever the streams are, writing to them raises nothing but UnwritableError."""
    open_closed()
    given = sys.stdout if isinstance(sys.stdout, io.TextIOWrapper) else None  # None: it was closed
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_StandardOutput()),
        encoding=given.encoding if given else "utf-8",
        errors=_handler(given.errors if given else None),
        line_buffering=given is not None and given.line_buffering,
        write_through=given is not None and given.write_through,
    )
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")
