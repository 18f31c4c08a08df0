"""What goes wrong while a checkpoint is made durable, in words: of the disk, of the machine, and of this program."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from checkflow.errors import remedy

_OF_A_STORE = {
    errno.ENOENT: "do not remove a store that is in use",
    errno.EBUSY: "end one of the two runs",
    errno.EISDIR: "remove that folder",  # which somebody made in a checkpoint
}


def advice(error: OSError) -> str:
    """What to do about what the store's disk refuses, and what stays."""
    what = remedy(error, _OF_A_STORE.get(error.errno or 0, "check the store"))
    fewer = ", or retain fewer checkpoints" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return f"{what}{fewer}; checkpoints that were durable before still are"


@contextlib.contextmanager
def resources_are_the_machines() -> Iterator[None]:
    """A thread that cannot be started, or memory that there is none of, is reported as what the disk refuses is."""
    try:
        yield
    except MemoryError:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from None
    except RuntimeError as error:
        if "thread" not in str(error):  # it is a bug, which nobody looks for in the machine's limits
            raise
        raise OSError(errno.EAGAIN, str(error)) from None
