"""What a group of an optimizer says of the kernels that compute its update."""

from __future__ import annotations

from collections.abc import Mapping

IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Keys that choose how an update is computed, not which: a restored optimizer keeps its own."""


def read_scalars(group: Mapping[str, object]) -> bool:
    """Whether they read Adam's step and its like, so that these are on the device that the parameters are on."""
    return bool(group.get("capturable") or group.get("fused"))
