"""A loop is killed again and again while it trains, and compared with the plain one that nobody interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from .loops import Loop

BENCHMARKS = Path(__file__).parent.parent
LIFE_S = 600.0
_RESUMED = re.compile(r"resumed iteration (\d+) in")


class LoopError(Exception):
    """A life ended as none should, in one line."""


def start(
    loop: Loop, script: Path, arguments: list[str], folder: Path, *, turn: int = 0
) -> tuple[subprocess.Popen[bytes], int]:
    """A process that runs it in `folder`, and the descriptor of what it says."""
    folder.mkdir(parents=True, exist_ok=True)
    ours, theirs = os.pipe()
    path = os.pathsep.join(filter(None, (str(BENCHMARKS), str(BENCHMARKS.parent), os.environ.get("PYTHONPATH"))))
    with (folder / "stdout").open("ab") as out, (folder / "stderr").open("ab") as err:
        process = subprocess.Popen(
            [*(sys.executable, "-m", "looping.life", script, str(theirs), ",".join(loop.kept), str(turn)), *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            pass_fds=[theirs],
        )
    os.close(theirs)
    return process, ours


@dataclass(slots=True)
class Life:
    """What one process said. Iterations are counted from the training's first, which is 0."""

    first: int
    completed: int
    batches: dict[int, list[str]] = field(default_factory=dict)  # what each iteration was given
    left: dict[str, Any] | None = None  # of a life that was not killed
    learned: bool = False  # it followed a schedule that was learned, by itself or before


def live(loop: Loop, script: Path, arguments: list[str], folder: Path, kill: tuple[int, float] | None = None) -> Life:
    """One process, killed (so many iterations are completed, and this part of another one's time) or to its end."""
    told = len(_read(folder / "stderr"))
    process, says = start(loop, script, arguments, folder)
    life, times_s, last_s = Life(-1, -1), list[float](), 0.0
    with os.fdopen(says, "rb") as lines, watched(process):
        for line in lines:
            kind, _, rest = line.decode().rstrip("\n").partition(" ")
            if life.first < 0:
                resumed = _RESUMED.search(_read(folder / "stderr")[told:])
                life.first = life.completed = int(resumed[1]) if resumed else 0
            if kind == "b":
                life.batches.setdefault(life.completed, []).append(rest)
            elif kind == "u":
                life.completed += 1
                times_s.append(time.monotonic() - last_s)
                last_s = time.monotonic()
            else:
                life.left = json.loads(rest)
            if kill is not None and life.completed >= kill[0]:
                time.sleep(kill[1] * (statistics.median(times_s[1:]) if len(times_s) > 1 else 0.1))
                process.kill()
                kill = None
    said = _read(folder / "stderr")[told:]
    life.learned = "learned its schedule" in said or "learns its schedule" not in said
    if process.wait() != (0 if life.left is not None else -9):
        raise LoopError(f"{script.name} ended with {process.returncode}: {_last_line(folder / 'err')}")
    if life.left is None and kill is not None:
        raise LoopError(f"{script.name} ended before it was killed: {_last_line(folder / 'err')}")
    return life


@dataclass(frozen=True, slots=True)
class Outcome:
    kills: int
    lost: int  # iterations that were completed, and had to be made again
    differs: tuple[str, ...]  # what is not as in the loop that was never interrupted
    learned: bool  # the last life followed a schedule that was learned


def killed(loop: Loop, data: Path, folder: Path, iterations: int, kills: int, seed: int) -> Outcome:
    """The attached loop through so many deaths. Raises LoopError where a life ends otherwise."""
    arguments = loop.arguments(data, iterations)
    whole = live(loop, loop.plain, arguments, folder / "plain")
    chance = random.Random(f"{seed} {loop.name}")
    moments = sorted(chance.sample(range(1, iterations - 1), kills))
    lives = [
        live(loop, loop.attached, arguments, folder / "attached", (completed, chance.random()))
        for completed in moments
    ]  # fmt: skip
    lives.append(live(loop, loop.attached, arguments, folder / "attached"))
    deaths = [one for one in lives if one.left is None]
    lost = sum(max(0, one.completed - after.first) for one, after in pairwise(lives))
    batches: dict[int, list[str]] = {}
    for one in lives:
        batches |= one.batches
    return Outcome(len(deaths), lost, tuple(_differences(whole, lives[-1], batches)), lives[-1].learned)


def _differences(whole: Life, last: Life, batches: dict[int, list[str]]) -> Iterator[str]:
    assert whole.left is not None
    if last.left is None:
        yield "the end, which was never reached"
        return
    for name, digest in whole.left["digests"].items():
        if last.left["digests"][name] != digest:
            yield name
    other = [number for number in whole.batches if batches.get(number) != whole.batches[number]]
    if other or batches.keys() != whole.batches.keys():
        yield f"data of iteration {other[0] if other else max(batches)}"


@contextlib.contextmanager
def watched(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """What is left of it ends with us."""
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(LIFE_S)
        except BaseException:
            process.kill()
            raise


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in _read(path).splitlines() if line.strip()]
    return lines[-1][:500] if lines else "nothing was said"
