"""Accelerate: save_state with automatic naming and a limit of two."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import checkflow
from contenders import Contender, Job
from contenders._state import KEPT, first_that_loads, not_installed, optimizer_of


class Accelerate(Contender):
    what = "Accelerator.save_state, automatic naming, total_limit=3, for it removes before it saves; nothing synced"
    durable = False

    def __init__(self, job: Job, training: checkflow.Training) -> None:
        super().__init__(job, training)
        from accelerate import Accelerator
        from accelerate.utils import ProjectConfiguration

        project = ProjectConfiguration(
            project_dir=str(job.folder), automatic_checkpoint_naming=True, total_limit=KEPT + 1
        )
        self._accelerator = Accelerator(project_config=project)
        self._accelerator.prepare(training.models[0], optimizer_of(training))
        self._accelerator.register_for_checkpointing(self)
        self._iteration = 0

    @classmethod
    def missing(cls) -> str | None:
        return not_installed("accelerate")

    @classmethod
    def preload(cls) -> None:
        import accelerate  # noqa: F401

    @classmethod
    def version(cls) -> str:
        return f"accelerate {version('accelerate')}"

    def state_dict(self) -> dict[str, int]:
        """What Accelerate asks of an object registered with it."""
        return {"iteration": self._iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._iteration = state["iteration"]

    def after_iteration(self, iteration: int) -> None:
        if self.job.due(iteration):
            self._iteration = iteration
            self._accelerator.save_state()

    def wait(self) -> None:
        """It never returns before it is done."""

    def restore(self) -> int:
        saved = (self.job.folder / "checkpoints").glob("checkpoint_*")
        return first_that_loads(sorted(saved, key=_number, reverse=True), self._load)

    def _load(self, path: Path) -> int:
        self._accelerator.load_state(str(path))
        self._accelerator.project_configuration.iteration = _number(path) + 1  # names go on from there
        return self._iteration


def _number(path: Path) -> int:
    return int(path.name.rpartition("_")[2])
