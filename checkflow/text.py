"""Text from elsewhere (names, paths, what a file says), made fit to be shown."""

from __future__ import annotations

import re

MOST = 900  # characters of a line; a person reads no more
MOST_OF_ERROR = 300  # of somebody else's
# Where in its own sources an error of torch comes from: a backtrace behind what it says, or a mark before that.
_OF_TORCH = re.compile(
    r"\s*(?:Exception raised from .+? \(most recent call first\)|C\+\+ CapturedTraceback):.*?(\"?)\s*\Z"
    r"|\[enforce fail at [^\]]*\]\s*(?:\S+ == \S+\. )?()",
    re.DOTALL,
)


def plain(text: str, most: int = MOST) -> str:
    """The text as one line: what a terminal would obey is escaped, of a long one the middle is left out."""
    line = " ".join(part.strip() for part in text.splitlines() if part.strip())
    if not line.isprintable():  # line breaks are gone; a lone surrogate, a byte of a path that is no UTF-8, is none
        line = "".join(c if c.isprintable() else _escaped(c) for c in line)
    if len(line) > most:
        tail = most // 3  # where a message says what to do
        line = f"{line[: most - tail - 3]}...{line[-tail:]}"
    return line


def _escaped(character: str) -> str:
    """A byte of a path that could not be read as text is shown as that byte."""
    byte = ord(character) - 0xDC00
    return f"\\x{byte:02x}" if 0x80 <= byte <= 0xFF else character.encode("unicode_escape").decode("ascii")


def said(error: BaseException) -> str:
    """What an exception says; nothing where its own code fails at that."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 (of anybody's class)
        return ""


def brief(error: BaseException) -> str:
    """An exception in one line, which ends with a word."""
    text = plain(_OF_TORCH.sub(r"\1", said(error)))
    if len(text) > MOST_OF_ERROR:
        text = f"{text[:MOST_OF_ERROR].rsplit(' ', 1)[0]} ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
