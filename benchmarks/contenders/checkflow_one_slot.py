"""checkflow where memory is scarce, or a lost machine is what one fears: each checkpoint on disk before the next."""

from __future__ import annotations

from contenders import Tier
from contenders.checkflow import Checkflow


class CheckflowOneSlot(Checkflow):
    what = 'attach(when_full="wait", slots=1): the next checkpoint is begun when the last one is on disk'
    tiers = (Tier.DISK,)
    slots = 1
