"""A user's code runs in a process that ends with it: what it changes there is nobody else's."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

from checkflow.errors import CheckflowError, ModelFileError

T = TypeVar("T")
_CONTEXT = multiprocessing.get_context("fork")  # torch is imported once, and what is to be run need not be pickled


def isolated(run: Callable[[], T], what: str) -> T:
    """What `run` returns, or raises of checkflow's own errors.

    `what`: the file that it runs. Where that ends its process before there is an answer, it is a ModelFileError.
    """
    import torch  # noqa: F401 (here, so that no child has to)

    ours, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_answer, args=(run, theirs))
    with ours:
        with theirs, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the other threads here hold nothing that it needs
            sys.stdout.flush()  # or the child would write it, too
            sys.stderr.flush()
            process.start()
        try:
            answer, error = ours.recv()
        except EOFError:
            process.join()
            how = how_it_ended(process.exitcode)
            raise ModelFileError(f"{what}: ended the process that it ran in ({how}); correct the file") from None
        finally:
            process.kill()
            process.join()
    if error is not None:
        raise error
    return answer  # type: ignore[no-any-return]


def how_it_ended(exit_code: int | None) -> str:
    """For a person, of a process's exit code, negative for a signal; None where that is not known."""
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    return signal.Signals(-exit_code).name + (" (out of memory?)" if exit_code == -signal.SIGKILL else "")


def _answer(run: Callable[[], object], to: Connection) -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # others of the parent's are not here
    try:
        to.send((run(), None))
    except CheckflowError as error:
        to.send((None, error))
