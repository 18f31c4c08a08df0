"""What every tool but checkflow is given to save, and the folders it is saved to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

import torch

import checkflow

PREFIX = "iteration-"
KEPT = 2


def optimizer_of(training: checkflow.Training) -> torch.optim.Optimizer:
    return training.optimizers[0]


def state_of(training: checkflow.Training, iteration: int) -> dict[str, object]:
    """Model, optimizer, iteration, and the random state that dropout needs to go on as it would have."""
    return {
        "model": training.models[0].state_dict(),
        "optimizer": optimizer_of(training).state_dict(),
        "rng": rng_state(),
        "iteration": iteration,
    }


def rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu())


def put_back(training: checkflow.Training, state: dict[str, object]) -> int:
    """Load what `state_of` gave into the training; returns the iteration."""
    model, optimizer, rng, iteration = (state[key] for key in ("model", "optimizer", "rng", "iteration"))
    assert isinstance(model, dict) and isinstance(optimizer, dict) and isinstance(rng, dict)
    assert isinstance(iteration, int)
    training.models[0].load_state_dict(model)
    optimizer_of(training).load_state_dict(optimizer)
    set_rng_state(rng)
    return iteration


def sync(path: Path) -> None:
    """Make a file's bytes, or a directory's names, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def place(folder: Path, iteration: int) -> Path:
    return folder / f"{PREFIX}{iteration:08d}"


def newest_first(folder: Path) -> list[Path]:
    """Checkpoints in the folder, whole or not."""
    return sorted(folder.glob(f"{PREFIX}*[0-9]"), reverse=True) if folder.is_dir() else []


def prune(folder: Path) -> None:
    """Remove all but the newest; called when those are complete."""
    for old in newest_first(folder)[KEPT:]:
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink()


def first_that_loads(paths: Iterable[Path], load: Callable[[Path], int]) -> int:
    """What a user's resume does: the newest checkpoint that loads without an error; 0 where there is none at all."""
    error: BaseException | None = None
    for path in paths:
        try:
            return load(path)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as problem:  # noqa: BLE001 (DCP's errors are not Exceptions)
            error = problem
    if error is not None:
        raise error
    return 0


def not_installed(package: str) -> str | None:
    return None if find_spec(package) else f"{package} is not installed; `pip install -c constraints.txt -e '.[peers]'`"
