"""The plain loop and the attached one in turns, from one evaluation to the next; who has not the turn is frozen.

Each turn of the attached one lies between two of the plain one, and is compared with their mean: the machine's speed
drifts. Frozen is all that a process started, so that copies and writes cost the one whose they are.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peering.processes import tree

from .kills import LoopError, start, watched
from .loops import ROUND, Loop

WARM = 4  # turns of each before those that count: a schedule is learned in them


@dataclass(frozen=True, slots=True)
class Times:
    """Medians over the turns."""

    turns: int
    plain_ms: float  # an iteration
    attached_ms: float
    overhead: float
    quartiles: tuple[float, float]  # of the overhead
    stall_ms: float  # an iteration, as Checkpointer.stats() has it
    differs: tuple[str, ...]  # of the attached loop's end


class Side:
    """One of the two, frozen but for its turns."""

    def __init__(self, loop: Loop, script: Path, arguments: list[str], folder: Path, stack: ExitStack) -> None:
        self._name = script.name
        self._process, says = start(loop, script, arguments, folder, turn=ROUND)
        self._lines = stack.enter_context(os.fdopen(says, "rb"))
        stack.enter_context(watched(self._process))
        stack.callback(self._signal, signal.SIGCONT)
        self._heard()
        self._signal(signal.SIGSTOP)

    def turn_s(self) -> float:
        """The mean iteration of the next turn."""
        with self._going_on():
            return statistics.mean(map(float, self._heard().split()))

    def end(self) -> dict[str, Any]:
        """Let it come to its end."""
        with self._going_on():
            left: dict[str, Any] = json.loads(self._heard())
            self._process.wait()
        return left

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        yield
        self._signal(signal.SIGSTOP)

    def _heard(self) -> str:
        line: bytes = self._lines.readline()
        if not line:
            raise LoopError(f"{self._name} ended with {self._process.wait()} in its turns")
        return line.decode().partition(" ")[2]

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            for pid in tree(self._process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)


def measured(loop: Loop, data: Path, folder: Path, turns: int) -> Times:
    """Raises LoopError where one of them ends otherwise than it should."""
    arguments = loop.arguments(data, ROUND * (1 + WARM + turns + 1))
    with ExitStack() as stack:
        plain = Side(loop, loop.plain, arguments, folder / "plain-turns", stack)
        attached = Side(loop, loop.attached, arguments, folder / "attached-turns", stack)
        for _ in range(WARM):
            attached.turn_s()
            before_s = plain.turn_s()
        plain_s, attached_s, ratios = [before_s], list[float](), list[float]()
        for _ in range(turns):
            attached_s.append(attached.turn_s())
            plain_s.append(plain.turn_s())
            ratios.append(attached_s[-1] / statistics.mean(plain_s[-2:]))
        for side in (plain, attached):  # the last turn of each is not compared
            side.turn_s()
        whole, left = plain.end(), attached.end()
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Times(
        turns,
        statistics.median(plain_s) * 1e3,
        statistics.median(attached_s) * 1e3,
        median - 1,
        (low - 1, high - 1),
        left["stats"]["stall_ns"] / 1e6,
        tuple(name for name, digest in whole["digests"].items() if left["digests"][name] != digest),
    )
