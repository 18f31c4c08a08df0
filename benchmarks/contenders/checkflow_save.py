"""checkflow where nothing may be lost: the training waits until each checkpoint is on disk."""

from __future__ import annotations

import time

from contenders import Tier
from contenders.checkflow import Checkflow


class CheckflowSave(Checkflow):
    what = "attach(slots=2), ckpt.save() after each step(): the next iteration begins when the checkpoint is on disk"
    tiers = (Tier.DISK,)

    def step(self, iteration: int) -> None:
        super().step(iteration)
        if self.job.due(iteration):
            began_s, hooks_s = time.perf_counter(), self.hooks_s()
            self.ckpt.save(keep=False)
            self.stepping_s -= time.perf_counter() - began_s - (self.hooks_s() - hooks_s)  # waited for in no hook
