"""torch.distributed.checkpoint, saving while training waits."""

from __future__ import annotations

from typing import ClassVar

from torch.distributed.checkpoint.state_dict_saver import save

from contenders import _dcp
from contenders._state import place, prune


class Synchronous(_dcp.DCP):
    what: ClassVar[str] = "dcp.save, two writer threads, files synced by it, directories by us"

    def after_iteration(self, iteration: int) -> None:
        if not self.job.due(iteration):
            return
        path = place(self.job.folder, iteration)
        save(_dcp.state_of(self.training, iteration), storage_writer=_dcp.writer(path, self.job.tier), no_dist=True)
        _dcp.published(path, self.job.tier)
        prune(self.job.folder)

    def wait(self) -> None:
        """It never returns before it is done."""
