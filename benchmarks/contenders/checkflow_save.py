"""checkflow where nothing may be lost: the training waits until each checkpoint is on disk."""

from __future__ import annotations

from contenders import Tier
from contenders.checkflow import Checkflow


class CheckflowSave(Checkflow):
    what = "attach(slots=2), ckpt.save() after each step(): the next iteration begins when the checkpoint is on disk"
    tiers = (Tier.DISK,)

    def after_iteration(self, iteration: int) -> None:
        super().after_iteration(iteration)
        if self.job.due(iteration):
            before_s = self.hooks_s()
            self.ckpt.save(keep=False)
            self.called_s += self.hooks_s() - before_s
