"""torch.save made durable by hand: a new file, synced, renamed, and its directory synced."""

from __future__ import annotations

from pathlib import Path

import torch

from contenders import Contender, Tier
from contenders._state import first_that_loads, newest_first, place, prune, put_back, state_of, sync


class TorchSave(Contender):
    what = "torch.save to a new file, fsync, rename, fsync of the directory"
    durable = True

    def after_iteration(self, iteration: int) -> None:
        if not self.job.due(iteration):
            return
        path = place(self.job.folder, iteration)
        written = path.with_suffix(".tmp")
        torch.save(state_of(self.training, iteration), written)
        if self.job.tier is Tier.DISK:
            sync(written)
        written.rename(path)
        if self.job.tier is Tier.DISK:
            sync(self.job.folder)
        prune(self.job.folder)

    def wait(self) -> None:
        """It never returns before it is done."""

    def restore(self) -> int:
        return first_that_loads(newest_first(self.job.folder), self._load)

    def _load(self, path: Path) -> int:
        return put_back(self.training, torch.load(path, weights_only=True))
