"""Declares the operators that torchvision registers fakes for, where its library does not load beside this torch.

The wheels of torchvision link to CUDA; on a CPU build of torch its Python parts work once these names exist. No model
of these trainings calls them.
"""

from __future__ import annotations

import contextlib

from torch import library

_LIBRARY = library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]  # lives as long as the process


def declare() -> None:
    """Before torchvision is imported."""
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # it loaded
            _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
