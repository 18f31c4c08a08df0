"""Workers of the comparison are forked from a process that has imported torch, which takes three seconds."""

from __future__ import annotations

import os
import subprocess
from multiprocessing.connection import Connection
from pathlib import Path

import benchmarks_path  # noqa: F401 (makes the next ones importable)
import pytest
from peering import processes
from programs import CONTEXT


class Forked:
    """As subprocess has it."""

    def __init__(self, workload: str, contender: str, driver: Connection, log: Path) -> None:
        self._process = CONTEXT.Process(target=_work, args=(workload, contender, driver, log, dict(os.environ)))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("worker", timeout)
        return self._process.exitcode


def _work(workload: str, contender: str, driver: Connection, log: Path, environment: dict[str, str]) -> None:
    from peering.worker import main

    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    main(workload, contender, os.dup(driver.fileno()))


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "start", Forked)
