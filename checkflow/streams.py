"""Standard input, output and error that are closed, as they may be in a daemon."""

from __future__ import annotations

import contextlib
import os


def open_closed() -> None:
    """/dev/null takes the place of each: before anything is opened that is not to be taken for a stream.

    What gets one of their numbers instead is written to by whoever prints, and lost to a process that is to inherit it
    and has streams of its own.
    """
    with contextlib.suppress(OSError):  # what was to be opened next then says why it cannot be
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # gets the lowest number that is free
            os.set_inheritable(fd, True)  # as streams are
        os.close(fd)
