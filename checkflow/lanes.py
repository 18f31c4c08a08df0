"""Names of files in a checkpoint that was saved in lanes: each lane has its own of every file."""

from __future__ import annotations

import re

_NAME = re.compile(r"lane-(\d{1,2})\.(.+)", re.ASCII)


def lane_file(lane: int, name: str) -> str:
    """(2, "model.safetensors") -> "lane-2.model.safetensors"."""
    return f"lane-{lane}.{name}"


def lane_of(name: str) -> tuple[int, str] | None:
    """The inverse; None for what is of no lane."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), match[2])
