"""Draw what checkflow tells with TensorBoard: attach(..., on_event=to_tensorboard("runs/one"))."""

from __future__ import annotations

import sys
from collections.abc import Callable

import checkflow

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:
    sys.exit("tensorboard is not installed: pip install tensorboard")


def to_tensorboard(folder: str) -> Callable[[checkflow.Event], None]:
    writer = SummaryWriter(folder)

    def on_event(event: checkflow.Event) -> None:
        for name, value in event.metrics.items():
            writer.add_scalar(name, value, event.iteration)
        if isinstance(event, (checkflow.Resumed, checkflow.Doubted, checkflow.Failed)):
            writer.add_text(f"checkflow/{type(event).__name__.lower()}", str(event), event.iteration)
            writer.flush()

    return on_event


if __name__ == "__main__":
    to_tensorboard(sys.argv[1] if len(sys.argv) > 1 else "runs")(checkflow.Resumed(3, "00000001-iteration-3", 0.5, ()))
