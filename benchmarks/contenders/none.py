"""No checkpoints."""

from __future__ import annotations

from contenders import Contender


class Nothing(Contender):
    what = "no checkpoint; run against itself it shows the noise"
    durable = False

    def after_iteration(self, iteration: int) -> None:
        """Nothing is saved."""

    def wait(self) -> None:
        """Nothing is on its way."""

    def restore(self) -> int:
        return 0
