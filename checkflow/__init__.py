"""checkflow: checkpoint PyTorch training every iteration, at a memory cost that is proven before the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from checkflow.checkpointing.attach import attach
    from checkflow.training import Training

__all__ = ["Training", "attach"]


def __getattr__(name: str) -> object:
    """Import on first use: the saver process and `checkflow --help` do without torch."""
    if name == "Training":
        from checkflow.training import Training

        return Training
    if name == "attach":
        from checkflow.checkpointing.attach import attach

        return attach
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
