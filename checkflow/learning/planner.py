"""The trainer's end of the planner's process: it has no CUDA context, and does not touch this interpreter's lock."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import threading

from checkflow.background import environment
from checkflow.learning.messages import Answer, Planned, Request, Unplanned
from checkflow.streams import open_closed

ENDS_S = 5.0  # what it has to write is little


class Planner:
    """Ask once, go on, and look for the answer now and then. The process ends once it has kept what it planned."""

    def __init__(self) -> None:
        """Start the process. Raises OSError where none can be started."""
        settings = {"CUDA_VISIBLE_DEVICES": "", "OPENBLAS_NUM_THREADS": "1"}
        open_closed()  # else what prints would write into its pipes
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "checkflow.learning"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=environment() | settings,
        )
        self._thread: threading.Thread | None = None
        self._answer: Answer | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: Request) -> None:
        """Returns at once: a thread hands the question over, and waits."""
        assert self._thread is None, "one question"
        self._thread = threading.Thread(target=self._converse, args=(request,), name="checkflow-plan", daemon=True)
        self._thread.start()

    @property
    def answer(self) -> Answer | None:
        """None while there is none."""
        return self._answer

    def close(self) -> None:
        """End the process: soon where it has answered, and at once, whatever it is doing, where it has not."""
        if isinstance(self._answer, Planned):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(ENDS_S)
        self._process.kill()
        self._process.wait()
        if self._thread is not None:
            self._thread.join()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()

    def _converse(self, request: Request) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump(request, self._process.stdin)
            self._process.stdin.flush()
            self._answer = pickle.load(self._process.stdout)
        except Exception as error:  # noqa: BLE001 (told: training goes on without a plan)
            self._answer = Unplanned(f"the planner's process ended ({type(error).__name__})")
