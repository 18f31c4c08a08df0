"""Does a training fit in this machine's memory?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from checkflow.errors import TraceError
from checkflow.spelling import option
from checkflow.trace.execution import DataDependent
from checkflow.trace.storages import Ledger
from checkflow.training import Training
from checkflow.units import format_bytes

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_MEMORY = Path("/proc/meminfo")


def expected_bytes(training: Training, ledger: Ledger) -> int:
    """What an iteration that broke off on fake tensors holds on real ones: what is alive, gradients, optimizer state.

    The optimizers step here, under the same fake mode, so that their state is there; one that cannot counts as it is.
    """
    with contextlib.suppress(Exception, DataDependent):
        for optimizer in training.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad and parameter.grad is None:
                        parameter.grad = torch.empty_like(parameter)
        for optimizer in training.optimizers:
            optimizer.step()
    return ledger.alive_bytes


def available_bytes() -> int | None:
    """Host memory that can still be used, within the control groups' limits; None where the system does not say."""
    return min(_available(), default=None)


def room_bytes() -> int | None:
    """What real tensors may take of it: a tenth is left for what kernels use on the side."""
    available = available_bytes()
    return None if available is None else available - available // 10


def check_memory(needed: int, model: str, stage: str, notes: Sequence[str]) -> None:
    """Raises TraceError where a trace on real tensors cannot fit."""
    room = room_bytes()
    if room is not None and needed > room:
        raise too_large(f"at least {format_bytes(needed)}", model, stage, notes)


def too_large(size: str, model: str, stage: str, notes: Sequence[str]) -> TraceError:
    """Real tensors do not fit; the last note says why they were needed."""
    why = notes[-1] if notes else "asked to trace on real tensors"
    fakes = f"trace it on fake tensors (without {option('real', True)} or {option('device', 'measure')})"
    way = "take that operator out of it" if notes else fakes
    return TraceError(
        f"{model}: {why}, but its {stage} takes {size} and {format_bytes(max(available_bytes() or 0, 0))} is free; "
        f"{way}, use a smaller batch, or trace where the training fits"
    )


def _available() -> Iterator[int]:
    yield from _of_machine()
    for folder, limit, used in _limits():
        with contextlib.suppress(OSError, ValueError):  # "max", or no such controller
            allowed = int((folder / limit).read_text(encoding="ascii"))
            yield allowed - int((folder / used).read_text(encoding="ascii")) + _reclaimable(folder)


def _of_machine() -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):
        for line in _MEMORY.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024


def _limits() -> Iterator[tuple[Path, str, str]]:
    """(folder, file of the limit, file of the use) of this process's control groups and all above them."""
    with contextlib.suppress(OSError, ValueError):
        for line in _OWN_GROUPS.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                root, files = _GROUPS, ("memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                root, files = _GROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            else:
                continue
            own = root / path.lstrip("/")
            yield from ((folder, *files) for folder in (own, *own.parents) if folder.is_relative_to(root))


def _reclaimable(folder: Path) -> int:
    """Of a group's use: file pages that the kernel gives back first."""
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines():
            name, value = line.split()
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    return 0
