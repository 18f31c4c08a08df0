"""Log what checkflow tells with Weights & Biases: attach(..., on_event=to_wandb(wandb.init(project="mine")))."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import checkflow

try:
    import wandb
except ImportError:
    sys.exit("wandb is not installed: pip install wandb")


def to_wandb(run: Any) -> Callable[[checkflow.Event], None]:
    run.define_metric("checkflow/*", step_metric="checkflow/iteration")

    def on_event(event: checkflow.Event) -> None:
        if event.metrics:
            run.log({**event.metrics, "checkflow/iteration": event.iteration})
        if isinstance(event, checkflow.Resumed):
            run.tags = (*(run.tags or ()), "resumed")

    return on_event


if __name__ == "__main__":
    with wandb.init(project="checkflow", mode="offline") as run:
        to_wandb(run)(checkflow.Resumed(3, "00000001-iteration-3", 0.5, ()))
