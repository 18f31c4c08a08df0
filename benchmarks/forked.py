"""Lives in forked processes: what was imported once is there, each in a session of its own, with what it said in files.

Fork only from a process of one thread in which no operator of torch has run.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from checkflow.errors import CheckflowError

INTERNAL = 70  # an exception that is no CheckflowError


class Forked:
    """A child that runs `job`. Its exit code is the job's, or that of the CheckflowError which ended it."""

    def __init__(self, job: Callable[[], int], folder: Path, *, memory_bytes: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.out, self.err = folder / "out", folder / "err"
        self._code: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._live(job, memory_bytes)
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(self.pid)

    def _live(self, job: Callable[[], int], memory_bytes: int | None) -> None:
        code = INTERNAL
        try:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
            for path, descriptor in ((Path(os.devnull), 0), (self.out, 1), (self.err, 2)):
                os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
            if memory_bytes is not None:
                resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
            code = job()
        except CheckflowError as error:
            print(f"checkflow: {error}", file=sys.stderr)
            code = error.exit_code
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        except BaseException:  # noqa: BLE001 (a fork must not return into its parent's code)
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def code(self) -> int | None:
        """Exit code, negative for a signal; None while it lives."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
                os.close(self._pidfd)
        return self._code

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code; None where it has not ended in this time."""
        deadline = time.monotonic() + timeout_s
        while self.code() is None and time.monotonic() < deadline:
            time.sleep(0.0005)
        return self._code

    def send(self, number: signal.Signals) -> None:
        """A signal to the process alone, if it lives."""
        if self.code() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def end(self) -> None:
        """Kill its process group and wait for it."""
        if self.code() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.send(signal.SIGKILL)
            self.wait(10.0)

    def said(self) -> list[str]:
        """Whole lines of its standard output; one that a kill cut is none."""
        return _text(self.out).split("\n")[:-1]

    def complaint(self) -> str:
        """What it wrote to standard error."""
        return _text(self.err)


def _text(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(errors="replace")
    return ""
