"""Lightning: Fabric.save, which Trainer.save_checkpoint goes through as well (TorchCheckpointIO)."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import torch

import checkflow
from contenders import Contender, Job
from contenders._state import (
    first_that_loads,
    newest_first,
    not_installed,
    place,
    prune,
    put_back,
    state_of,
)


class Lightning(Contender):
    what = "Fabric.save: serialized in memory, written, moved; nothing synced"
    durable = False

    def __init__(self, job: Job, training: checkflow.Training) -> None:
        super().__init__(job, training)
        from lightning.fabric import Fabric

        self._fabric = Fabric(accelerator="cuda" if torch.cuda.is_available() else "cpu", devices=1)

    @classmethod
    def missing(cls) -> str | None:
        return not_installed("lightning")

    @classmethod
    def preload(cls) -> None:
        from lightning import fabric  # noqa: F401

    @classmethod
    def version(cls) -> str:
        return f"lightning {version('lightning')}"

    def after_iteration(self, iteration: int) -> None:
        if self.job.due(iteration):
            self._fabric.save(place(self.job.folder, iteration), state_of(self.training, iteration))
            prune(self.job.folder)

    def wait(self) -> None:
        """It never returns before it is done."""

    def restore(self) -> int:
        return first_that_loads(newest_first(self.job.folder), self._load)

    def _load(self, path: Path) -> int:
        return put_back(self.training, self._fabric.load(path))
