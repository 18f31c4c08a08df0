"""A job of several ranks, as torchrun starts them, of which tests kill some."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from ports import free_port
from processes import descendants, runs
from programs import Program

TRAINER = Path(__file__).parent / "rank_to_kill.py"
LONGEST_S = 240.0  # what takes longer hangs: several times what it takes on three busy cores


class Job:
    """Ranks that run; what each said, by line. A context manager that leaves none."""

    def __init__(self, size: int, *arguments: object, script: Path = TRAINER) -> None:
        port = free_port()
        meeting = {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(size),
        }
        self.ranks = {
            rank: Program(
                script.read_text(),
                *map(str, arguments),
                environment=meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                session=True,
            )
            for rank in range(size)
        }
        self.said: dict[int, list[str]] = {rank: [] for rank in self.ranks}
        self.errors: dict[int, list[str]] = {rank: [] for rank in self.ranks}
        self._threads = [
            threading.Thread(target=_listen, args=(stream, lines), daemon=True)
            for rank, process in self.ranks.items()
            for stream, lines in ((process.stdout, self.said[rank]), (process.stderr, self.errors[rank]))
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()
        for process in self.ranks.values():
            process.stdout.close()
            process.stderr.close()

    def numbers(self, rank: int, word: str) -> set[int]:
        """What it said behind a word."""
        return {int(line.split()[1]) for line in tuple(self.said[rank]) if line.startswith(word)}

    def iteration(self, rank: int) -> int:
        """How many it has completed."""
        return max(self.numbers(rank, "iteration"), default=0)

    def begun(self) -> int:
        """How many some rank has begun. The last may be in a checkpoint, though it was killed before it said so."""
        return 1 + max(map(self.iteration, self.ranks))

    def common(self, word: str) -> int:
        """The newest iteration that every rank has said behind a word."""
        return max(set.intersection(*(self.numbers(rank, word) for rank in self.ranks)), default=0)

    def reach(self, iteration: int) -> None:
        """Wait until each rank has completed so many."""
        deadline = time.monotonic() + LONGEST_S
        while min(map(self.iteration, self.ranks)) < iteration:
            assert time.monotonic() < deadline, self.errors
            assert all(process.poll() is None for process in self.ranks.values()), self.errors
            time.sleep(0.002)

    def resumed(self) -> int:
        """At which iteration; all ranks at one."""
        deadline = time.monotonic() + LONGEST_S
        while not all(self.numbers(rank, "resumed") for rank in self.ranks):
            assert time.monotonic() < deadline, self.errors
            assert all(process.poll() in (None, 0) for process in self.ranks.values()), self.errors
            time.sleep(0.01)
        (iteration,) = set.union(*(self.numbers(rank, "resumed") for rank in self.ranks))
        return iteration

    def learned(self) -> None:
        """Wait until each rank follows what it learned."""
        deadline = time.monotonic() + LONGEST_S
        while not all(self.numbers(rank, "learned") for rank in self.ranks):
            assert time.monotonic() < deadline, self.errors
            assert all(process.poll() is None for process in self.ranks.values()), self.errors
            time.sleep(0.01)

    def kill(self, ranks: Iterable[int] | None = None, number: int = signal.SIGKILL) -> None:
        """These, or all."""
        for rank in self.ranks if ranks is None else ranks:
            with contextlib.suppress(ProcessLookupError):
                self.ranks[rank].send_signal(number)

    def lose(self, ranks: Iterable[int], beside: Iterable[int] = ()) -> None:
        """Machines: the trainers, and all that run beside them, or ever did. Nothing of them writes any more.

        The trainers end first: one would start another of what it had beside it.
        """
        ranks = tuple(ranks)
        others = set(beside).union(*(descendants(self.ranks[rank].pid) for rank in ranks))
        self.kill(ranks)
        for pid in filter(runs, others):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while any(map(runs, others)):
            time.sleep(0.002)

    def end(self, who: str, victim: int) -> tuple[int, int]:
        """One rank, or a machine with its memory, then all the others. How many iterations any had begun, and the
        newest that has to come back: that all had staged, or had read back from their disks."""
        if who == "machine":
            self.lose([victim])
        elif who == "one":
            self.kill([victim])
            time.sleep(0.3)  # the others fail in their collectives, and leave as after any error
        self.kill()
        self.wait()
        return self.begun(), self.common("verified" if who == "machine" else "staged")

    def wait(self) -> dict[int, int]:
        """The exit codes, once all have ended. Whoever hangs ends with what its threads were at."""
        deadline = time.monotonic() + LONGEST_S
        hang = [rank for rank, process in self.ranks.items() if not process.has_ended(deadline - time.monotonic())]
        self.kill(hang, signal.SIGABRT)
        codes = {rank: process.wait(LONGEST_S) for rank, process in self.ranks.items()}
        for thread in self._threads:
            thread.join(LONGEST_S)
        assert not hang, (hang, {rank: lines[-2:] for rank, lines in self.said.items()}, self.errors)
        return codes

    def done(self) -> dict[int, tuple[int, str]]:
        """Once all have ended as they should: for each rank the iteration it resumed at and its digest."""
        codes = self.wait()
        assert set(codes.values()) == {0}, (codes, {rank: lines[-3:] for rank, lines in self.errors.items()})
        last = {rank: self.said[rank][-1].split() for rank in self.ranks}
        return {rank: (int(words[1]), words[2]) for rank, words in last.items()}


def check_same_end(folder: Path, size: int, kind: str, iterations: int, *options: str) -> None:
    """What goes on in its store ends with the bits of a training that was never interrupted."""
    ends = []
    for store in ("store", "uninterrupted"):
        with Job(size, kind, folder / store, iterations, 0, *options) as job:
            ends.append({rank: digest for rank, (_, digest) in job.done().items()})
    assert ends[0] == ends[1]


def _listen(stream: Iterable[str], lines: list[str]) -> None:
    for line in stream:
        if line.endswith("\n"):  # one that a kill cut is none
            lines.append(line.rstrip("\n"))
