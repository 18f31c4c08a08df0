"""Trainings in child processes that may be killed, and what they leave: FOLDER/CASE/final.json, `order`, `statuses`.

A case is "kind:when:step": which training, and where in which step it is killed; "plain" trains without checkflow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

Train = Callable[[Path, str, str, int], object]  # (folder, kind, when, step) -> what the training leaves, as JSON
WHOLE = ("plain", "never")  # are not killed


def run(script: Path, root: Path, *cases: str) -> None:
    """All cases in one process that forks each: a framework takes seconds to import."""
    done = subprocess.run([sys.executable, str(script), str(root), *cases], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def main(train: Train) -> None:
    """`SCRIPT DIR CASE...`: each until it is killed, and resumed to its end."""
    root = Path(sys.argv[1])
    for case in sys.argv[2:]:
        kind, when, step = case.split(":")
        life(root / case, kind, when, int(step), train)
        if when not in WHOLE:
            life(root / case, kind, "never", 0, train)


def life(folder: Path, kind: str, when: str, step: int, train: Train) -> None:
    """One process's part of a training."""
    folder.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child == 0:
        try:
            (folder / "final.json").write_text(json.dumps(train(folder, kind, when, step), default=str))
            os._exit(0)
        except BaseException:  # noqa: BLE001 (it ends the child)
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    (folder / "statuses").open("a").write(f"{os.waitstatus_to_exitcode(status)}\n")


def told(root: Path, case: str) -> Any:
    """What the training left."""
    return json.loads((root / case / "final.json").read_text())


def statuses(root: Path, case: str) -> list[int]:
    """How its processes ended."""
    return [int(line) for line in (root / case / "statuses").read_text().split()]


def plain(case: str) -> str:
    """The same training, never interrupted and without checkflow."""
    return f"{case.split(':')[0]}:plain:0"


def begun(root: Path, case: str) -> Counter[str]:
    """How many batches were begun in each step."""
    return Counter(line.split()[0] for line in (root / case / "order").read_text().splitlines())


def order(root: Path, case: str) -> list[str]:
    """The batches that were trained on, with their steps; of a step that was begun twice, the last time."""
    sizes, lines = begun(root, plain(case)), dict[str, list[str]]()
    for line in (root / case / "order").read_text().splitlines():
        lines.setdefault(line.split()[0], []).append(line)
    return [line for step, found in lines.items() for line in found[-sizes[step] :]]
