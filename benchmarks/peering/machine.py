"""The machine that a run was made on, in one line."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def describe() -> str:
    """Cores, memory, GPU, kernel."""
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    parts = [f"{os.cpu_count()} cores ({_processor()})", f"{memory_gib:.0f} GiB", f"Linux {platform.release()}"]
    if torch.cuda.is_available():
        parts.insert(0, torch.cuda.get_device_name())
    return ", ".join(parts)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
