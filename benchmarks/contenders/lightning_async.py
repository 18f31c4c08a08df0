"""Lightning with its AsyncCheckpointIO plugin, as a Trainer calls it."""

from __future__ import annotations

import checkflow
from contenders import Job
from contenders._state import place, prune, state_of
from contenders.lightning import Lightning


class LightningAsync(Lightning):
    what = "AsyncCheckpointIO around TorchCheckpointIO: cloned, then saved by a thread; nothing synced"

    def __init__(self, job: Job, training: checkflow.Training) -> None:
        super().__init__(job, training)
        from lightning.fabric.plugins import TorchCheckpointIO
        from lightning.pytorch.plugins.io import AsyncCheckpointIO

        self._io = AsyncCheckpointIO(TorchCheckpointIO())

    @classmethod
    def preload(cls) -> None:
        super().preload()
        from lightning.pytorch.plugins import io  # noqa: F401

    def after_iteration(self, iteration: int) -> None:
        if self.job.due(iteration):
            self._io.save_checkpoint(state_of(self.training, iteration), place(self.job.folder, iteration))
            prune(self.job.folder)

    def wait(self) -> None:
        """What failed is raised by this or by a later save; saves go on after it."""
        self._io.teardown()
