"""torch.save as tutorials have it: nothing synced, so a power cut may lose it, or leave half of it."""

from __future__ import annotations

from pathlib import Path

import torch

from contenders import Contender
from contenders._state import first_that_loads, newest_first, place, prune, put_back, state_of


class PlainTorchSave(Contender):
    what = "torch.save and nothing else: in the page cache only"
    durable = False

    def after_iteration(self, iteration: int) -> None:
        if self.job.due(iteration):
            torch.save(state_of(self.training, iteration), place(self.job.folder, iteration))
            prune(self.job.folder)

    def wait(self) -> None:
        """It never returns before it is done."""

    def restore(self) -> int:
        return first_that_loads(newest_first(self.job.folder), self._load)

    def _load(self, path: Path) -> int:
        return put_back(self.training, torch.load(path, weights_only=True))
