"""Does a training fit in this machine's memory?"""

from __future__ import annotations

from pathlib import Path

from checkflow.errors import TraceError
from checkflow.trace.names import State
from checkflow.units import format_bytes


def needed_bytes(states: tuple[State, ...]) -> int:
    """Bytes of state, and of one gradient for each parameter that wants one: the least that an iteration needs."""
    storages = {state.tensor.untyped_storage()._cdata: state.tensor.untyped_storage().nbytes() for state in states}
    trained = {id(s.tensor): s.tensor.nbytes for s in states if s.tensor.requires_grad}
    return sum(storages.values()) + sum(trained.values())


def available_bytes() -> int | None:
    """Host memory that can still be used, within the control group's limit; None where the system does not say."""
    found: list[int] = []
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            found.append(int(limit) - int((group / "memory.current").read_text(encoding="ascii")))
    except (OSError, ValueError):
        pass
    return min(found, default=None)


def check_memory(needed: int, model: str, why: str) -> None:
    """Raises TraceError where a trace on real tensors cannot fit."""
    available = available_bytes()
    if available is not None and needed > available:
        raise TraceError(
            f"{model}: {why}, but that takes at least {format_bytes(needed)} and {format_bytes(max(available, 0))} is "
            "free; take that operator out of the iteration, or trace where the training fits"
        )
