"""How much memory this process may still take, before it takes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Allowance:
    """Bytes that may still be taken, and what sets that limit, in words."""

    free_bytes: int
    limit: str


def allowance(proc: Path = PROC, cgroups: Path = CGROUPS) -> Allowance | None:
    """The tightest of the machine's memory and every control group's limit; None where nothing can be read."""
    return min(_limits(proc, cgroups), key=lambda limit: limit.free_bytes, default=None)


def _limits(proc: Path, cgroups: Path) -> Iterator[Allowance]:
    available = _keyed(proc / "meminfo").get("MemAvailable:")
    if available is not None:
        yield Allowance(available * 1024, "the machine's available memory")
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _groups(cgroups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _groups(cgroups / "memory", path, *names)


def _groups(root: Path, path: str, limit_name: str, usage_name: str, cache_name: str) -> Iterator[Allowance]:
    """The limits from a group up to the root; in a container the group's own path may not be mounted."""
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        limit, usage = _text(folder / limit_name).strip(), _text(folder / usage_name).strip()
        if limit.isdigit() and usage.isdigit():
            cache = _keyed(folder / "memory.stat").get(cache_name, 0)  # pages the kernel drops first
            yield Allowance(
                max(0, int(limit) - int(usage) + cache), f"the control group's limit ({folder}/{limit_name})"
            )
        if folder == root:
            return


def _keyed(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
