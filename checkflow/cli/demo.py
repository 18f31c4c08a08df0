"""checkflow demo: compile a training script, train it, kill it with SIGKILL, resume it, and compare every byte."""

from __future__ import annotations

import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path

import click
from rich.table import Table

from checkflow.cli import _console, run
from checkflow.errors import EXIT_DONE, EXIT_NO, InputError, StoreBusyError
from checkflow.interrupts import killed_at_the_end
from checkflow.store.both.lock import await_writer

STORE = "checkpoints"
COMPLETED, STARTED, DIGEST = "iteration ", "starting at iteration ", "digest "


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """What one run of the script said."""

    first: int  # iterations that were completed when it began
    completed: int  # and when it ended
    digest: str  # of its final state; "" for a killed run
    wall_s: float


@click.command()
@click.option("--iterations", type=click.IntRange(min=4), default=24, show_default=True)
def command(iterations: int) -> int:
    """Compile a training script, checkpoint each of its iterations, kill it, resume it, and compare every byte."""
    with _folder() as folder:
        (folder / "train.py").write_text(resources.files("checkflow.examples").joinpath("train.py").read_text())
        script, graph, schedule, store = (
            str(folder / part) for part in ("train.py", "graph.json", "schedule.json", STORE)
        )
        for arguments in (
            ["trace", script, "--device", "measure", "-o", graph],
            ["compile", graph, "--bandwidth", "5GB/s", "--interval", "auto", "-o", schedule],
            ["verify", schedule, graph],
        ):
            _say(f"checkflow {shlex.join(arguments)}")
            if code := run(arguments):
                return code
        trainer = [script, "--iterations", str(iterations)]
        whole = _train(trainer)
        trainer += ["--schedule", schedule, "--store", store]
        killed = _train(trainer, kill_after=random.randint(iterations // 3, 2 * iterations // 3))
        resumed = _train(trainer)
        _say(f"checkflow list {store}")
        run(["list", store])
    return _compare(whole, killed, resumed)


@contextmanager
def _folder() -> Iterator[Path]:
    """A temporary one, removed once nobody writes to its store: the saver of a killed training outlives it."""
    with tempfile.TemporaryDirectory(prefix="checkflow-demo-", ignore_cleanup_errors=True) as name:
        try:
            yield Path(name)
        finally:
            with suppress(StoreBusyError):  # a process that the training left: what ended the block is what is told
                await_writer(Path(name) / STORE)


def _say(command_line: str) -> None:
    _console.say()
    _console.say(f"$ {command_line}", style="bold")


def _train(arguments: list[str], kill_after: int | None = None) -> ScriptRun:
    """Run the script; with `kill_after`, kill it at a random moment of the iteration after that many."""
    _say(f"python {shlex.join(arguments)}")
    began = last = time.monotonic()
    first = completed = 0
    digest = ""
    start = partial(subprocess.Popen[str], [sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    with killed_at_the_end(start) as process:
        assert process.stdout is not None
        for line in process.stdout:
            iteration_s, last = time.monotonic() - last, time.monotonic()
            if line.startswith(STARTED):
                first = completed = int(line.removeprefix(STARTED))
            elif line.startswith(COMPLETED):
                completed = int(line.removeprefix(COMPLETED).partition(":")[0])
            elif line.startswith(DIGEST):
                digest = line.removeprefix(DIGEST).strip()
            if not line.startswith(COMPLETED) or completed in (first + 1, kill_after):
                _console.say(line, indent="  ")
            if completed == kill_after:
                time.sleep(random.random() * iteration_s)
                process.send_signal(signal.SIGKILL)
                break
        process.wait()
        process.stdout.close()
    wall_s = time.monotonic() - began
    if kill_after is not None:
        _console.say(f"killed with SIGKILL in the middle of iteration {completed + 1}", "red", "  ")
    elif process.returncode != EXIT_DONE:
        raise InputError(f"{arguments[0]}: the demo's training ended with exit code {process.returncode}; see above")
    return ScriptRun(first, completed, digest, wall_s)


def _compare(whole: ScriptRun, killed: ScriptRun, resumed: ScriptRun) -> int:
    """Show what was lost, and whether the resumed run ended in the same bytes."""
    same = whole.digest == resumed.digest != ""
    completed = max(killed.completed, resumed.first)  # it may have been killed before it said so
    lost = completed - resumed.first
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in (
        ("uninterrupted", f"{whole.completed} iterations, no checkpoints, {whole.wall_s:.1f} s"),
        ("killed", f"in iteration {completed + 1}, a checkpoint at every iteration, {killed.wall_s:.1f} s"),
        ("resumed", f"from iteration {resumed.first}: {lost} completed iteration(s) lost, and the one in flight"),
        ("final state", "bit-identical to the uninterrupted run" if same else "DIFFERS from the uninterrupted run"),
    ):
        table.add_row(name, value, style="bold" if name == "final state" else None)
    _console.say()
    _console.out.print(table)
    return EXIT_DONE if same else EXIT_NO
