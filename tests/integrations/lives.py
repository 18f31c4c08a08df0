"""Trainings in child processes that may be killed, and what they leave: FOLDER/CASE/final.json, `order`, `statuses`.

A case is "kind:when:step": which training, and where in which step it is killed; "plain" trains without checkflow. In
several processes, which meet as torchrun has them meet, each rank leaves its own in FOLDER/CASE/RANK. What a case
"kind:when:step:left" leaves is not resumed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

Train = Callable[[Path, str, str, int], object]  # (folder, kind, when, step) -> what the training leaves, as JSON
WHOLE = ("plain", "never")  # are not killed
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


def run(script: Path, root: Path, *cases: str, ranks: int = 1) -> None:
    """All cases in one process that forks each: a framework takes seconds to import."""
    command = [sys.executable, str(script), str(root), str(ranks), *cases]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def main(train: Train) -> None:
    """`SCRIPT DIR RANKS CASE...`: each until it is killed, and resumed to its end."""
    root, ranks = Path(sys.argv[1]), int(sys.argv[2])
    for case in sys.argv[3:]:
        kind, when, step, *left = case.split(":")
        for moment in (when,) if left or when in WHOLE else (when, "never"):
            if ranks == 1:
                life(root / case, kind, moment, int(step), train)
            else:
                job(root / case, kind, moment, int(step), train, ranks)


def life(folder: Path, kind: str, when: str, step: int, train: Train) -> None:
    """One process's part of a training."""
    child = _begin(folder, kind, when, step, train)
    _, status = os.waitpid(child, 0)
    _note(folder, status)


def job(folder: Path, kind: str, when: str, step: int, train: Train, ranks: int) -> None:
    """The same of several; one that does not end as it should takes the others with it, as torchrun does."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    running = {}
    for rank in range(ranks):
        here = meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        running[_begin(folder / str(rank), kind, when, step, train, here)] = rank
    while running:
        child, status = os.wait()
        _note(folder / str(running.pop(child)), status)
        for other in running if status else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)


def _begin(
    folder: Path, kind: str, when: str, step: int, train: Train, environment: Mapping[str, str] | None = None
) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child == 0:
        os.environ.update(environment or {})
        try:
            (folder / "final.json").write_text(json.dumps(train(folder, kind, when, step), default=str))
            os._exit(0)
        except BaseException:  # noqa: BLE001 (it ends the child)
            traceback.print_exc()
            os._exit(1)
    return child


def _note(folder: Path, status: int) -> None:
    with (folder / "statuses").open("a") as file:
        file.write(f"{os.waitstatus_to_exitcode(status)}\n")


def in_ranks() -> bool:
    """Whether this process is one of several."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def store(folder: Path) -> Path:
    """Of the training whose part, or all of it, is in this folder."""
    return (folder.parent if in_ranks() else folder) / "store"


def told(root: Path, case: str) -> Any:
    """What the training left."""
    return json.loads((root / case / "final.json").read_text())


def statuses(root: Path, case: str) -> list[int]:
    """How its processes ended."""
    return [int(line) for line in (root / case / "statuses").read_text().split()]


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """What two trainings left, of which one was begun on another processor: in numbers that round as they do there."""
    texts = [json.dumps(each | {"tensors": ""}, sort_keys=True) for each in (found, expected)]
    assert NUMBER.sub("", texts[0]) == NUMBER.sub("", texts[1])
    of_each = [[float(number) for number in NUMBER.findall(text)] for text in texts]
    assert of_each[0] == pytest.approx(of_each[1], rel=1e-3)


def plain(case: str) -> str:
    """The same training, never interrupted and without checkflow; of a rank, "kind:when:step/rank", that rank's."""
    _, slash, rank = case.partition("/")
    return f"{case.split(':')[0]}:plain:0{slash}{rank}"


def begun(root: Path, case: str) -> Counter[str]:
    """How many batches were begun in each step."""
    return Counter(line.split()[0] for line in (root / case / "order").read_text().splitlines())


def order(root: Path, case: str) -> list[str]:
    """The batches that were trained on, with their steps; of a step that was begun twice, the last time."""
    sizes, lines = begun(root, plain(case)), dict[str, list[str]]()
    for line in (root / case / "order").read_text().splitlines():
        lines.setdefault(line.split()[0], []).append(line)
    return [line for step, found in lines.items() for line in found[-sizes[step] :]]


def check_ranks(root: Path, case: str) -> None:
    """Each rank of a job that was killed ended as it does in one that was not, and none began from the start again."""
    orders = []
    for rank in sorted((root / case).glob("[0-9]")):
        each = f"{case}/{rank.name}"
        killed, ended = statuses(root, each)
        assert killed != 0 and ended == 0
        assert lasting(told(root, each)) == lasting(told(root, plain(each)))
        assert order(root, each) == order(root, plain(each))
        assert begun(root, each)["1"] == begun(root, plain(each))["1"]
        orders.append(order(root, each))
    assert len(orders) > 1 and orders[0] != orders[1]  # each its part of the data


def lasting(left: dict[str, Any]) -> Any:
    """What a training left, but for what only its last life knows."""
    return left.get("final", left)
