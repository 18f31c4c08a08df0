"""checkflow: checkpoint PyTorch training every iteration, at a memory cost that is proven before the run."""

from checkflow.training import Training

__all__ = ["Training"]
